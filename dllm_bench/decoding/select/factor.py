"""Commit as many positions as their confidences together allow (Fast-dLLM §3.2, factor decoding).

Per block, with confidences sorted c(1) >= c(2) >= ...: the largest n with (n + 1) (1 - c(n)) < f
is committed; f plays the part of a threshold that tightens as more is decoded at once. A block that
must progress and has no such n commits its surest position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("select.factor")
@dataclass(frozen=True)
class Factor(Select):
    """`factor` = f; larger commits more."""

    factor: float

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise DllmBenchError(f"Factor is {self.factor}; give a number above 0 (for example 1).")

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        open_KW = window.eligible_KW
        sure_KNB = window.blocks(
            scores.probability_KW.masked_fill(~open_KW, -torch.inf), -torch.inf
        )
        sorted_KNB, order_KNB = sure_KNB.sort(dim=2, descending=True, stable=True)
        rank_B = torch.arange(1, window.block + 1, device=sure_KNB.device)
        holds_KNB = (rank_B + 1) * (1 - sorted_KNB) < self.factor
        count_KN1 = (holds_KNB * rank_B).amax(2, keepdim=True)
        where_KNB = torch.zeros_like(holds_KNB).scatter_(2, order_KNB, rank_B <= count_KN1)
        return window.flat(where_KNB) & open_KW
