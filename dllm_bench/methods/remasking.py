"""Committed tokens are masked again: ReMDM, RemeDi, Saber, T2M, WINO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import HELD, LEFT, Window
from dllm_bench.core.contracts import HOLD, Round, Scores, Select
from dllm_bench.core.declared import Count, Positive, PositiveProportion, Probability, Proportion
from dllm_bench.core.decoder import ONE_BRANCH, Condition, needing
from dllm_bench.core.denoiser import AddedRows
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.numerics import Precision
from dllm_bench.methods import revising
from dllm_bench.methods.common import COUNTS_STEPS, WithInner, largest, most_confident, same_block
from dllm_bench.registry import register

# --- ReMDM ----------------------------------------------------------------------------------------

COMMIT_CONFIDENCE = MemoKey[Tensor]("remdm.confidence")  # (K, L) probability at commit


@register("revise.remdm")
@dataclass(frozen=True, kw_only=True)
class ReMDM(revising.Budgeted):
    """ReMDM on LLaDA (arXiv 2503.00307, guanghanwang/ReMDM-LLaDA): re-masks the least confident.

    A block takes 2 S forwards. The phase begins when 7/8 of the block are committed, at one token
    per forward, and lasts S forwards, or to the last one. Before each of them, the `number`
    positions of the block with the smallest confidence are masked again; the forward commits as
    many (selector `best` with `refills`). A token's confidence is its probability when it was
    committed; it is not updated. Masks that remain after 2 S forwards stay.
    """

    number: Positive = 1  # positions masked again at a time
    steps: Positive | None = None  # S; None: as many as the block has positions
    start: PositiveProportion = 0.875  # share of the block that is committed before the phase
    needs = revising.REVISES_BLOCK | {ONE_BRANCH}

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> revising.Revision:
        before, _, size = revising.block_at_entry(window, state)
        step, steps, first = before + 1, self.steps or size, int(size * self.start)
        known_KL = state.recall(COMMIT_CONFIDENCE, scores.probability_KW.dtype)
        fresh_KW = window.of(state.born_KL) == state.forwards
        confidence_KW = torch.where(fresh_KW, scores.probability_KW, window.of(known_KL))
        state.memo[COMMIT_CONFIDENCE] = window.put(known_KL, confidence_KW)
        number = self.number if first <= step < min(first + steps, 2 * steps) else 0
        committed_KW = window.of(state.committed_KL)
        revising.hold_only_branch(HELD if step < 2 * steps else LEFT, state)
        return revising.Revision(largest(-confidence_KW, committed_KW, number))


@register("revise.remdm_loop")
@dataclass(frozen=True, kw_only=True)
class ReMDMLoop(revising.ReadsStanding):
    """ReMDM's loop (arXiv 2503.00307, as in NEUIR/PC-Sampler): decode, re-mask and refill, decode.

    First, a share `start` of the block is decoded by the selector. Then, `loops` times, one forward
    masks the `number` positions with the currently least probable tokens again and commits nothing;
    the next forward commits. Finally, the rest is decoded. Positions masked again compete with all
    other masks.
    """

    number: Positive = 1  # positions committed, and masked again, in a forward
    loops: Count = 32  # number of repetitions
    start: PositiveProportion = 0.875  # share of the block that is decoded before the loop
    precision: Precision = "model"  # precision of the committed token's probability
    needs = revising.REVISES_BLOCK | {ONE_BRANCH}

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> revising.Revision:
        step, masks, _ = revising.block_at_entry(window, state)
        turn = step - int(masks * self.start) // self.number
        revising.hold_only_branch(HELD if turn + 1 < 2 * self.loops else 0, state)
        if not 0 <= turn < 2 * self.loops or turn % 2:
            return revising.Revision(torch.zeros_like(window.eligible_KW))
        fresh_KW = window.of(state.born_KL) == state.forwards
        least_KW = largest(
            -state.memo[revising.STANDING], self.revisable(window, state), self.number
        )
        return revising.Revision(least_KW | fresh_KW)


# --- RemeDi ---------------------------------------------------------------------------------------


@register("revise.keep_best")
@dataclass(frozen=True, kw_only=True)
class KeepBest(revising.Budgeted):
    """RemeDi's loop (arXiv 2509.23653, maple-research-lab/RemeDi): mask all but the best K again.

    Keeps a growing number of positions: in each step those with the largest logits. Step i of a
    block of B positions keeps the K_i positions with the largest logits and masks the others again.
    The logit is that of the committed token or, at a mask, of the candidate (selector `threshold`
    with tau 0 commits them all). K rises by B // steps each step, and by one more in the last B mod
    steps of them, so that the last step keeps the whole block. With more steps than masks, as in a
    text shorter than a block, the first ones keep nothing, by the same rule. The released network
    also outputs confidences, which its loop does not use.
    """

    steps: Positive | None = None  # forwards per block; None: as many as the block has positions
    needs = revising.REVISES_BLOCK | {ONE_BRANCH}

    def on_scores(self, round: Round) -> None:
        window, state = round.window, round.state
        ids_KW = torch.where(window.eligible_KW, round.scores.ids_KW, window.of(state.tokens_KL))
        standing_KW1 = round.rows_KRV[:, : window.width].gather(-1, ids_KW[..., None])
        state.memo[revising.STANDING] = standing_KW1[..., 0].float()

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> revising.Revision:
        before, masks, size = revising.block_at_entry(window, state)
        step, steps = before + 1, self.steps or size
        each, rest = divmod(masks, steps)
        keep = step * each + max(step + rest - steps, 0)
        committed_KW = window.of(state.committed_KL)
        revising.hold_only_branch(HELD if step < steps else 0, state)
        return revising.Revision(
            committed_KW & ~largest(state.memo[revising.STANDING], committed_KW, keep)
        )


# --- Saber ----------------------------------------------------------------------------------------

ACCEPTED_PROBABILITY = MemoKey[Tensor]("accepted_mean.probability")
"""(K, L) probability of each token at its last commit; 0: never committed."""


@register("select.accepted_mean")
@dataclass(frozen=True)
class AcceptedMean(Select):
    """Saber's threshold (arXiv 2510.18165): the mean confidence of what was committed so far.

    A position is committed if its candidate is more probable than the mean commit probability of
    all positions, up to the open block's end, that were ever committed (1 before the first commit).
    If fewer than n pass, the n most confident ones are committed instead.
    """

    number: Positive = 2  # n
    gives = frozenset({Condition.NEVER_STALLS})
    needs = COUNTS_STEPS | {ONE_BRANCH}

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        accepted_KL = state.recall(ACCEPTED_PROBABILITY, scores.probability_KW.dtype)
        seen_KX = accepted_KL[:, : window.stop]
        count_K = (seen_KX > 0).sum(1)
        mean_K = (seen_KX.sum(1) / count_K).masked_fill(count_K == 0, 1.0)
        where_KW = window.eligible_KW & (scores.probability_KW > mean_K[:, None])
        few_K1 = where_KW.sum(1, keepdim=True) < self.number
        where_KW = torch.where(few_K1, most_confident(scores, window, self.number), where_KW)
        accepted_KW = torch.where(where_KW, scores.probability_KW, window.of(accepted_KL))
        state.memo[ACCEPTED_PROBABILITY] = window.put(accepted_KL, accepted_KW)
        return where_KW

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Return no positions: it never stalls, and an earlier block may wait for the open one."""
        return torch.zeros_like(window.eligible_KW), scores.ids_KW


ROW_CONFIDENCE = MemoKey[Tensor]("drop.last")  # (K, L) confidence of each row in the last forward

EIGHTH = 8  # one position is masked again for every 8 that are committed


@register("revise.drop")
@dataclass(frozen=True, kw_only=True)
class ConfidenceDrop(revising.Budgeted):
    """Saber's backtracking (arXiv 2510.18165, zhaoyMa/Saber): re-masks where confidence fell most.

    Let a be the number of positions that a forward committed, m = max(a, n) and r = min(max(n // 2,
    ceil(m / 8)), m - 1). Among the committed positions up to the open block's end, including those
    just committed, the r whose rows lost most confidence since the last forward are masked again.
    Confidence is the probability of the row's candidate, even if another token is committed there.
    Nothing is masked again once everything up to the block's end is committed. Selector
    `accepted_mean` has the same n.
    """

    number: Positive = 2  # n, the minimum that the selector commits
    gives = frozenset({Condition.FROM_FIRST_BLOCK})
    needs = revising.REVISES_CANVAS | {ONE_BRANCH}

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> revising.Revision:
        born_KW, now_KW = window.of(state.born_KL), scores.probability_KW
        fell_KW = window.of(self._last(scores, window, state)) - now_KW
        accepted_K = (born_KW == state.forwards).sum(1)
        most_K = accepted_K.clamp(min=self.number)
        count_K = ((most_K + EIGHTH - 1) // EIGHTH).clamp(min=self.number // 2)
        gained_K = (accepted_K - 1).clamp(min=0)  # another selector may commit fewer than n
        count_K = torch.minimum(count_K, gained_K) * window.of(state.masked_KL).any(1)
        comparable_KW = window.of(state.committed_KL) & (fell_KW > -torch.inf)
        return revising.Revision(largest(fell_KW, comparable_KW, count_K))

    def _last(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """Return the confidence of the last forward, (K, L); remember that of this one.

        It is 0 before the first forward, and -inf at rows that were not open then.
        """
        last_KL = state.recall(ROW_CONFIDENCE, scores.probability_KW.dtype)
        now_KL = torch.full_like(last_KL, -torch.inf)
        now_KL[:, window.start : window.stop] = scores.probability_KW
        state.memo[ROW_CONFIDENCE] = now_KL
        return last_KL


# --- T2M ------------------------------------------------------------------------------------------

TOKEN_PROBABILITY = MemoKey[Tensor]("remask.last")
"""(K, L) probability of each token in the last forward."""
FORGOTTEN = MemoKey[Tensor]("remask.forgotten")  # (K, L) changes that no longer count


@register("revise.remask")
@dataclass(frozen=True, kw_only=True)
class Remask(revising.ReadsStanding):
    """Token-to-mask re-masking (arXiv 2604.18738, 2605.26436; synsis/remasked_DLM): LLaDA2.1 with
    masks instead of edits.

    Masks doubtful tokens again. In every forward, earlier committed positions of the open block are
    masked again if one of three measures rejects them: the token's probability is below `tau`
    ("probability"); the row's candidate is another token with a probability above `tau`
    ("candidate"); the token's probability has fallen by more than `tau` since the last forward
    ("drop"; signed as in the code, although the README says absolute). At most a share `ratio` of
    them, at least one, is masked at a time, the worst first, and each position at most
    `per_position` times. A block without masks stays open until a forward over it rejects nothing,
    or for `rounds` such forwards.
    """

    judge: Literal["probability", "candidate", "drop"]  # the measure that judges a token
    tau: Probability  # rejected: a probability below it, a candidate or drop above it
    ratio: Proportion = 0.25  # largest share of the block's committed positions masked at once
    rounds: Count = 16  # forwards over a block without masks
    edits_end: bool = True  # whether a full block with an end token stays open
    forgets: bool = False  # as released: `per_position` counts start again after a forward that
    # found no committed position in the block

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> revising.Revision:
        masked, rounds = revising.full_rounds(window, state)
        doubt_KW, wrong_KW = self._judged(scores, window, state)
        most_K = (window.of(state.earlier_KL).sum(1).double() * self.ratio).long().clamp(min=1)
        remask_KW = largest(doubt_KW, wrong_KW & self.revisable(window, state), most_K)
        # if no token can be rejected, no forward over a full block is made
        looks = self.tau > 0 if self.judge == "probability" else self.tau < 1
        moves_K = revising.moves(remask_KW.any(1), looks and masked, rounds < self.rounds)
        if not self.edits_end:
            moves_K &= ~((state.tokens_KL == state.special.eos) & state.committed_KL).any(1)
        state.memo[HOLD] = moves_K * HELD
        return revising.Revision(remask_KW)

    def _unspent(self, window: Window, state: DecodeState) -> Tensor:
        if not self.forgets or self.per_position is None:
            return super()._unspent(window, state)
        assert state.changes_KL is not None
        committed_KW = window.of(state.earlier_KL)
        forgotten_KL = state.recall(FORGOTTEN, state.changes_KL.dtype)
        counts_K1 = committed_KW.any(1, keepdim=True)
        state.memo[FORGOTTEN] = torch.where(counts_K1, forgotten_KL, state.changes_KL)
        counted_KL = state.changes_KL - state.memo[FORGOTTEN]
        return committed_KW & (window.of(counted_KL) < self.per_position)

    def _judged(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Return (badness, higher is worse; whether the token is to be masked again), each (K,
        W)."""
        standing_KW = state.memo[revising.STANDING]
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
        standing_KW = state.memo[revising.STANDING]
        last_KL = state.recall(TOKEN_PROBABILITY, standing_KW.dtype)
        judges_K1 = window.of(state.earlier_KL).any(1, keepdim=True)
        fresh_KW = window.of(state.born_KL) == state.forwards
        now_KW = torch.where(fresh_KW, scores.probability_KW.to(last_KL.dtype), standing_KW)
        state.memo[TOKEN_PROBABILITY] = window.put(last_KL, now_KW * judges_K1)
        return last_KL


# --- WINO -----------------------------------------------------------------------------------------


@register("select.capped")
@dataclass(frozen=True)
class Capped(WithInner):
    """Limits `inner` to a share of the masks, the most confident ones (WINO, arXiv 2507.18578).

    Among the positions that `inner` chooses, the max(min(int(share m), most), least) most confident
    ones are committed, where m is the number of masks in the open block.
    """

    share: PositiveProportion = 0.7  # share of the masks
    least: Positive = 5  # lower limit of the cap
    most: int = 20  # upper limit of the cap

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise DllmBenchError(
                f"Capped has least={self.least}, above most={self.most}; lower least or raise most."
            )

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        masks_K = window.eligible_KW.sum(1)
        cap_K = (masks_K.double() * self.share).long().clamp(self.least, self.most)
        return most_confident(scores, window, cap_K) & self.inner(scores, window, state)


Span = tuple[int, int]
WINO_BLOCK = MemoKey[Any]("wino.block")  # the open block, as `open_block` gives it
ACCEPTED_COUNT = MemoKey[Tensor]("wino.accepted")  # commits of its last forward, (K,)


@register("revise.wino")
@dataclass(frozen=True, kw_only=True)
class Wino(revising.ReadsStanding):
    """WINO (arXiv 2507.18578, Feng-Hong/WINO-DLLM): verifies tokens with leave-one-out rows.

    Every forward also feeds the open block a second time, as masks. The second row of a position
    sees the whole canvas except this position, so it predicts the position from all other tokens.
    Earlier committed tokens of the block with a probability below `tau` in their second row are
    masked again, the least probable first: fewer than the previous forward committed, and none if
    this forward commits a single position. So any two forwards make progress, and decoding ends.
    Selector `capped` is the other half of the method.
    """

    tau: Probability = 0.9  # masked again below this probability; 0: never
    first: Count = 30  # commits assumed before a block's first forward
    precision: Precision = "float64"  # precision of the second row's probability
    needs = revising.REVISES_CANVAS | needing(
        {"cache": Condition.FULL_ATTENTION, "model": Condition.UNSHIFTED}
    )

    def on_plan(self, round: Round) -> None:
        """Feed the window a second time, as masks."""
        span, state = (round.window.start, round.window.stop), round.state
        rows = leave_one_out(span, round.plan.feed, state.special.mask, state.tokens_KL.device)
        round.plan = replace(round.plan, added=rows)

    def judging_KWV(self, round: Round) -> Tensor:
        """Return the logits of the rows that see everything but their own position."""
        return round.added_KEV

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> revising.Revision:
        support_KW = state.memo[revising.STANDING]
        accepted_K = (window.of(state.born_KL) == state.forwards).sum(1)
        wrong_KW = self.revisable(window, state) & (support_KW < self.tau)
        most_K = (self._last(accepted_K, window, state) - 1) * (accepted_K > 1)
        return revising.Revision(largest(-support_KW, wrong_KW, most_K))

    def _last(self, accepted_K: Tensor, window: Window, state: DecodeState) -> Tensor:
        """Return the number of commits of the block's last forward, (K,); remember that of this
        one."""
        known_K, is_known = state.memo.get(ACCEPTED_COUNT), same_block(WINO_BLOCK, window, state)
        state.memo[ACCEPTED_COUNT] = accepted_K
        if known_K is None or is_known is False:
            return torch.full_like(accepted_K, self.first)
        return known_K if is_known is True else torch.where(is_known, known_K, self.first)


@lru_cache(maxsize=16)
def leave_one_out(span: Span, feed: Span, mask: int, device: torch.device) -> AddedRows:
    """Return added rows: masks at the positions of a span, each of which sees everything fed except
    its own position."""
    position_E = torch.arange(*span, device=device)
    other_EF = position_E[:, None] != torch.arange(*feed, device=device)
    each_EE = torch.ones_like(other_EF[:, :1]).expand(-1, len(position_E))
    tokens_E = torch.full_like(position_E, mask)
    return AddedRows(tokens_E, position_E, torch.cat([other_EF, each_EE], dim=1))
