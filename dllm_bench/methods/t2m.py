"""Token-to-mask re-masking (arXiv 2604.18738, 2605.26436; synsis/remasked_DLM): LLaDA2.1 with masks
instead of edits.

In every forward, earlier committed positions of the open block are masked again if one of three
measures rejects them: the token's probability is below `tau` ("probability"); the row's candidate
is another token with a probability above `tau` ("candidate"); the token's probability has fallen by
more than `tau` since the last forward ("drop"; signed as in the code, although the README says
absolute). At most a share `ratio` of them is masked at a time, the worst first, and each position
at most `per_position` times. A block without masks stays open until a forward over it rejects
nothing, or for `rounds` such forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.declared import Count, Probability, Proportion
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.methods.revising import (
    STANDING,
    ReadsStanding,
    Revision,
    committed_before,
    hold,
    largest,
    masking,
    post_rounds,
)
from dllm_bench.registry import register

LAST = MemoKey[Tensor]("remask.last")  # (K, L) probability of each token in the last forward
FORGOTTEN = MemoKey[Tensor]("remask.forgotten")  # (K, L) changes that no longer count

Judge = Literal["probability", "candidate", "drop"]


@register("revise.remask")
@dataclass(frozen=True, kw_only=True)
class Remask(ReadsStanding):
    """Masks doubtful tokens again."""

    judge: Judge  # the measure that judges a token
    tau: Probability  # rejected: a probability below it, a candidate or drop above it
    ratio: Proportion = 0.25  # largest share of the block's committed positions masked at once
    rounds: Count = 16  # forwards over a block without masks
    edits_end: bool = True  # whether a full block with an end token stays open
    forgets: bool = False  # as released: `per_position` counts start again after a forward that
    # found no committed position in the block

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        masked_K, committed_KW = window.eligible_KW.any(1), committed_before(window, state)
        rounds_K = post_rounds(masked_K, window, state)
        doubt_KW, wrong_KW = self._judged(scores, window, state)
        most_K = (committed_KW.sum(1).double() * self.ratio).long().clamp(min=1)
        remask_KW = largest(doubt_KW, wrong_KW & self.revisable(window, state), most_K)
        moves_K = remask_KW.any(1)
        if self._looks:
            moves_K = moves_K | masked_K
        if not self.edits_end:
            moves_K &= ~(state.tokens_KL[:, state.prompt_len :] == state.special.eos).any(1)
        hold(moves_K & (rounds_K < self.rounds), state)
        return masking(remask_KW, state)

    def revisable(self, window: Window, state: DecodeState) -> Tensor:
        if not self.forgets or self.per_position is None:
            return super().revisable(window, state)
        assert state.changes_KL is not None
        committed_KW = committed_before(window, state)
        forgotten_KL = state.recall(FORGOTTEN, state.changes_KL.dtype)
        counts_K1 = committed_KW.any(1, keepdim=True)
        state.memo[FORGOTTEN] = torch.where(counts_K1, forgotten_KL, state.changes_KL)
        counted_KL = state.changes_KL - state.memo[FORGOTTEN]
        return committed_KW & (window.of(counted_KL) < self.per_position)

    @property
    def _looks(self) -> bool:
        """Whether any token can be rejected; if not, no forward over a full block is made."""
        return self.tau > 0 if self.judge == "probability" else self.tau < 1

    def _judged(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Return (badness, higher is worse; whether the token is to be masked again), each (K,
        W)."""
        standing_KW = state.memo[STANDING]
        if self.judge == "candidate":
            other_KW = scores.ids_KW != window.of(state.tokens_KL)
            return scores.probability_KW, other_KW & (scores.probability_KW > self.tau)
        if self.judge == "probability":
            return -standing_KW, standing_KW < self.tau
        fell_KW = window.of(self._last(scores, window, state)) - standing_KW
        return fell_KW, fell_KW > self.tau

    def _last(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """Return the probability of each token in the last forward, (K, L); remember those of this
        one.

        As released, a block's first forward, which has nothing to judge, is not remembered (0).
        """
        standing_KW = state.memo[STANDING]
        last_KL = state.recall(LAST, standing_KW.dtype)
        judges_K1 = committed_before(window, state).any(1, keepdim=True)
        fresh_KW = window.of(state.born_KL) == state.forwards
        now_KW = torch.where(fresh_KW, scores.probability_KW.to(last_KL.dtype), standing_KW)
        state.memo[LAST] = window.put(last_KL, now_KW * judges_K1)
        return last_KL
