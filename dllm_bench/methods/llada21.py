"""LLaDA2.1 (arXiv 2602.08676): committed tokens are edited."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.declared import Amount, Count, Positive, Probability
from dllm_bench.core.decoder import Conditions
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.methods.common import COUNTS_STEPS, OF_LOGITS, count_in_block, most_confident
from dllm_bench.methods.revising import Budgeted, Revision, hold, overwriting, post_rounds
from dllm_bench.registry import register


@register("score.repeat_penalty")
@dataclass(frozen=True)
class RepeatPenalty(Score):
    """Penalises repeating the token to the left (SGLang's JointThreshold, `penalty_lambda`).

    In every row of a block except the first, `penalty` is subtracted from the logit of the token at
    the previous position, including prompt tokens and the mask token. The first row has no penalty,
    because the released step sees one block at a time. Another score reads the result.
    """

    inner: Score
    penalty: Amount = 0.0  # subtracted from a logit

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner score, except the row-wise ones."""
        return self.inner.gives - OF_LOGITS

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        before_KW1 = window.of(state.tokens_KL.roll(1, 1))[..., None]
        penalty_KW1 = torch.full_like(before_KW1, -self.penalty, dtype=logits_KWV.dtype)
        penalty_KW1[:, :: window.block] = 0  # a window begins with a block
        return self.inner(logits_KWV.scatter_add(2, before_KW1, penalty_KW1), state, window)


SHARE_BEGUN = MemoKey[Tensor]("share.begun")
"""The open block, and its forwards that began with masks, (K, 2)."""


@register("select.share")
@dataclass(frozen=True)
class Share(Select):
    """Commits an even share of the block in every forward (diffusers' BlockRefinementScheduler).

    The n-th forward that begins with masks commits the P // S most confident positions of a block
    of P positions, and one more if n is among the first P mod S, regardless of how many the block
    had committed at entry. If S is larger than P, nothing is due after P forwards (`idle`).
    """

    steps: Positive  # S, forwards per block
    idle: bool = False  # whether a forward commits nothing if nothing is due, as released
    needs = COUNTS_STEPS

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        begun_K = count_in_block(SHARE_BEGUN, window.eligible_KW.any(1), window, state)
        more_K = begun_K <= window.block % self.steps
        return most_confident(scores, window, window.block // self.steps + more_K)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = super().on_stall(scores, window, state)
        return torch.zeros_like(where_KW) if self.idle else where_KW, ids_KW


BEGUN = MemoKey[Tensor]("edit.begun")  # (K, 2): open block, its forwards that began with masks


@register("revise.edit")
@dataclass(frozen=True, kw_only=True)
class Edit(Budgeted):
    """Token-to-token editing (LLaDA2.1, arXiv 2602.08676): overwrites tokens the model now rejects.

    In every forward, an earlier committed position of the open block gets the candidate of its own
    row if that is another token with a probability above `tau`. A block without masks stays open
    until a forward over it edits nothing, or for `rounds` such forwards, as in LLaDA2.1's
    `generate`; SGLang's JointThreshold makes one more forward and ignores its edits
    (`ignores_last`). diffusers' block refinement closes a block after `steps` forwards that began
    with masks, even if masks remain; selector `share` has the same number. Editing uses the score's
    probabilities; with `forbid_mask` off an edit may write the mask token, which masks the position
    again.
    """

    tau: Probability  # edits are made above it; 1: never, without extra forwards
    rounds: Count = 16  # forwards with edits over a block without masks
    ignores_last: bool = False  # whether one more forward is made, without edits
    steps: Positive | None = None  # forwards after which a block is closed, even with masks; None:
    # no limit

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        masked_K = window.eligible_KW.any(1)
        rounds_K = post_rounds(masked_K, window, state)
        write_KW = (
            self.revisable(window, state)
            & (scores.ids_KW != window.of(state.tokens_KL))
            & (scores.probability_KW > self.tau)
            & (rounds_K <= self.rounds)[:, None]
        )
        moves_K = write_KW.any(1)
        if self.tau < 1 or self.steps is not None:  # otherwise there is nothing to edit
            moves_K = moves_K | masked_K
        holds_K = moves_K & (rounds_K < self.rounds + self.ignores_last)
        left_K = None
        if self.steps is not None:
            begun_K = count_in_block(BEGUN, masked_K, window, state)
            left_K = torch.where(masked_K, begun_K >= self.steps, ~holds_K)
        hold(holds_K, state, left_K)
        return overwriting(write_KW, scores)
