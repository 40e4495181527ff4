"""Commit the most confident positions in a fixed number of steps per block (LLaDA Algorithm 5).

A block entered with m masks and S steps commits floor(m / S) positions per step, one more in the
first m mod S steps. Without `steps`, S is the block length: one token per forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.select.steps import COUNTS_STEPS, most_confident, step_in_block
from dllm_bench.registry import register


@register("select.topk")
@dataclass(frozen=True)
class TopK(Select):
    """Commits an equal number of positions in each step."""

    steps: int | None = None  # S, forwards per block; None: as many as the block has positions
    never_stalls: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = COUNTS_STEPS

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise DllmBenchError(f"TopK steps is {self.steps}; give at least 1 step per block.")

    @property
    def one_per_forward(self) -> bool:  # type: ignore[override]
        """If there are as many steps as positions."""
        return self.steps is None

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        if self.steps is None:
            return most_confident(scores, window)
        step_K, total_K = step_in_block(state, window)
        return most_confident(
            scores, window, total_K // self.steps + (step_K < total_K % self.steps)
        )
