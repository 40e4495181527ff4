"""Commit an even share of the block in every forward (diffusers' BlockRefinementScheduler).

The n-th forward that begins with masks commits the P // S most confident positions of a block of P,
one more if n is among the first P mod S, whatever the block had committed at first. Once more than
P forwards were asked for and made, nothing is due (`idle`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.select.steps import COUNTS_STEPS, count_in_block, most_confident
from dllm_bench.registry import register

BEGUN = MemoKey[Tensor]("share.begun")  # (K, 2): open block, its forwards that began with masks


@register("select.share")
@dataclass(frozen=True)
class Share(Select):
    """Commits block length / steps positions in each step."""

    steps: int  # S, forwards per block
    idle: bool = False  # whether a forward may commit nothing once nothing is due, as released
    needs: ClassVar[frozenset[Need]] = COUNTS_STEPS

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DllmBenchError(f"Share steps is {self.steps}; give at least 1 step per block.")

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        begun_K = count_in_block(BEGUN, window.eligible_KW.any(1), window, state)
        more_K = begun_K <= window.block % self.steps
        return most_confident(scores, window, window.block // self.steps + more_K)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = super().on_stall(scores, window, state)
        return where_KW & (not self.idle), ids_KW
