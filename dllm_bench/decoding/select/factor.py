"""Commit as many positions as their joint confidence allows (Fast-dLLM §3.2, factor decoding).

Per block, with confidences sorted c(1) >= c(2) >= ...: the first n positions are committed, for the
largest n with (n + 1) (1 - c(n)) < f. So f acts like a threshold that rises with the number of
positions committed at once. A block that must progress and has no such n commits its most confident
position. As `released` (NVlabs/Fast-dLLM, `get_transfer_index_dynamic`) the comparison is <=, one
position is always committed, and where all masks of a block but one pass, that one is committed
too: of the last two masks always both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("select.factor")
@dataclass(frozen=True)
class Factor(Select):
    """Commits the most probable positions of each block, as many as `factor` allows."""

    factor: float  # f; larger commits more
    released: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)  # see the head of this file

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise DllmBenchError(f"Factor is {self.factor}; give a number above 0 (for example 1).")

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        open_KW = window.eligible_KW
        probability_KNP = window.blocks(
            scores.probability_KW.masked_fill(~open_KW, -torch.inf), -torch.inf
        )
        sorted_KNP, order_KNP = probability_KNP.sort(dim=2, descending=True, stable=True)
        rank_P = torch.arange(1, window.block + 1, device=probability_KNP.device)
        spread_KNP = (rank_P + 1) * (1 - sorted_KNP)
        allowed_KNP = spread_KNP <= self.factor if self.released else spread_KNP < self.factor
        count_KN1 = (allowed_KNP * rank_P).amax(2, keepdim=True)
        if self.released:
            masks_KN1 = window.blocks(open_KW).sum(2, keepdim=True)
            count_KN1 = count_KN1.clamp(min=1)
            count_KN1 += count_KN1 == masks_KN1 - 1
        where_KNP = torch.zeros_like(allowed_KNP).scatter_(2, order_KNP, rank_P <= count_KN1)
        return window.flat(where_KNP) & open_KW
