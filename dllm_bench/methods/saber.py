"""Saber (arXiv 2510.18165): a threshold that follows the text, and backtracking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import ONE_BRANCH, Condition
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.methods.common import COUNTS_STEPS, most_confident
from dllm_bench.methods.revising import REVISES_CANVAS, Budgeted, Revision, largest, masking
from dllm_bench.registry import register

ACCEPTED = MemoKey[Tensor]("accepted_mean.probability")  # (K, L) at the last commit; 0: never


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
        accepted_KL = state.recall(ACCEPTED, scores.probability_KW.dtype)
        seen_KX = accepted_KL[:, : window.stop]
        count_K = (seen_KX > 0).sum(1)
        mean_K = (seen_KX.sum(1) / count_K).masked_fill(count_K == 0, 1.0)
        where_KW = window.eligible_KW & (scores.probability_KW > mean_K[:, None])
        least_K = torch.full_like(count_K, self.number)
        few_K1 = where_KW.sum(1, keepdim=True) < self.number
        where_KW = torch.where(few_K1, most_confident(scores, window, least_K), where_KW)
        accepted_KW = torch.where(where_KW, scores.probability_KW, window.of(accepted_KL))
        state.memo[ACCEPTED] = window.put(accepted_KL, accepted_KW)
        return where_KW

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Return no positions: it never stalls, and an earlier block may wait for the open one."""
        return torch.zeros_like(window.eligible_KW), scores.ids_KW


LAST = MemoKey[Tensor]("drop.last")  # (K, L) confidence of each row in the last forward

EIGHTH = 8  # one position is masked again for every 8 that are committed


@register("revise.drop")
@dataclass(frozen=True, kw_only=True)
class ConfidenceDrop(Budgeted):
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
    needs = REVISES_CANVAS | {ONE_BRANCH}

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        born_KW, now_KW = window.of(state.born_KL), scores.probability_KW
        fell_KW = window.of(self._last(scores, window, state)) - now_KW
        accepted_K = (born_KW == state.forwards).sum(1)
        most_K = accepted_K.clamp(min=self.number)
        count_K = ((most_K + EIGHTH - 1) // EIGHTH).clamp(min=self.number // 2)
        gained_K = (accepted_K - 1).clamp(min=0)  # another selector may commit fewer than n
        count_K = torch.minimum(count_K, gained_K) * window.of(state.masked_KL).any(1)
        remask_KW = largest(fell_KW, (born_KW >= 0) & (fell_KW > -torch.inf), count_K)
        return masking(remask_KW, state)

    def _last(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """Return the confidence of the last forward, (K, L); remember that of this one.

        It is 0 before the first forward, and -inf at rows that were not open then.
        """
        last_KL = state.recall(LAST, scores.probability_KW.dtype)
        now_KL = torch.full_like(last_KL, -torch.inf)
        now_KL[:, window.start : window.stop] = scores.probability_KW
        state.memo[LAST] = now_KL
        return last_KL
