"""Saber's backtracking (arXiv 2510.18165, zhaoyMa/Saber): re-mask where confidence fell most.

After a forward that committed a positions, with m = max(a, n), the
r = min(max(n // 2, ceil(m / 8)), m - 1) committed positions up to the open block's end whose row
lost most confidence since the last forward are masked again, those just committed included.
Confidence is the probability of the row's candidate, whatever token stands there. Nothing is masked
again once everything up to the block's end is committed. Selector `accepted_mean` has the same n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.revise.budgets import REVISES_CANVAS, Budgeted, Revision, largest, masking
from dllm_bench.registry import register

LAST = MemoKey[Tensor]("drop.last")  # (K, L) confidence of each row in the last forward

EIGHTH = 8  # one position is masked again for every 8 that are committed


@register("revise.drop")
@dataclass(frozen=True, kw_only=True)
class ConfidenceDrop(Budgeted):
    """Masks the positions again whose confidence fell most."""

    number: int = 2  # n, the least that the selector commits
    spans: ClassVar[tuple[bool, bool]] = (True, False)
    needs: ClassVar[frozenset[Need]] = REVISES_CANVAS | {Need("explore", Condition.ONE_BRANCH)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.number < 1:
            raise DllmBenchError(
                f"ConfidenceDrop number is {self.number}; give 1 or more positions."
            )

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        born_KW, now_KW = window.of(state.born_KL), scores.probability_KW
        fell_KW = window.of(self._last(scores, window, state)) - now_KW
        accepted_K = (born_KW == state.forwards).sum(1)
        most_K = accepted_K.clamp(min=self.number)
        count_K = ((most_K + EIGHTH - 1) // EIGHTH).clamp(min=self.number // 2)
        gained_K = (accepted_K - 1).clamp(min=0)  # fewer than n come from another selector
        count_K = torch.minimum(count_K, gained_K) * window.of(state.masked_KL).any(1)
        remask_KW = largest(fell_KW, (born_KW >= 0) & fell_KW.isfinite(), count_K)
        return masking(remask_KW, scores)

    def _last(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """Confidence of the last forward, (K, L); remembers that of this one.

        0 before the first forward; -inf at rows that were not open then.
        """
        now_KL = torch.full_like(state.tokens_KL, -torch.inf, dtype=scores.probability_KW.dtype)
        last_KL = state.memo.get(LAST)
        last_KL = torch.zeros_like(now_KL) if last_KL is None else last_KL
        now_KL[:, window.start : window.stop] = scores.probability_KW
        state.memo[LAST] = now_KL
        return last_KL
