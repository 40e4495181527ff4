"""Saber's threshold (arXiv 2510.18165): above the mean confidence of what was committed so far.

A position is committed if its candidate is more probable than the mean, over the positions up to
the open block's end that were ever committed, of the probability with which they were (1 before
the first). If fewer than n are, the n most confident ones are committed instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.select.steps import COUNTS_STEPS, most_confident
from dllm_bench.registry import register

ACCEPTED = MemoKey[Tensor]("accepted_mean.probability")  # (K, L) when last committed; 0: never


@register("select.accepted_mean")
@dataclass(frozen=True)
class AcceptedMean(Select):
    """Commits what is more probable than the average committed token was."""

    number: int = 2  # n
    never_stalls: ClassVar[bool] = True
    by_position: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = COUNTS_STEPS | {Need("explore", Condition.ONE_BRANCH)}

    def __post_init__(self) -> None:
        if self.number < 1:
            raise DllmBenchError(f"AcceptedMean number is {self.number}; give 1 or more positions.")

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        accepted_KL = state.memo.get(ACCEPTED)
        if accepted_KL is None:
            accepted_KL = torch.zeros_like(state.tokens_KL, dtype=scores.probability_KW.dtype)
        seen_KX = accepted_KL[:, : window.stop]
        count_K = (seen_KX > 0).sum(1)
        mean_K = torch.where(count_K > 0, seen_KX.sum(1) / count_K.clamp(min=1), 1.0)
        where_KW = window.eligible_KW & (scores.probability_KW > mean_K[:, None])
        least_K = torch.full_like(count_K, self.number)
        few_K1 = where_KW.sum(1, keepdim=True) < self.number
        where_KW = torch.where(few_K1, most_confident(scores, window, least_K), where_KW)
        accepted_KL = accepted_KL.clone()
        accepted_KW = accepted_KL[:, window.start : window.stop]
        accepted_KW.copy_(torch.where(where_KW, scores.probability_KW, accepted_KW))
        state.memo[ACCEPTED] = accepted_KL
        return where_KW

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Nothing: it never stalls, and an earlier block may wait for the open one."""
        return torch.zeros_like(window.eligible_KW), scores.ids_KW
