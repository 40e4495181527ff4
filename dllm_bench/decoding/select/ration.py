"""Another selector within a budget: S steps per block share its masks evenly.

After step i at most (i + 1) / S of the masks are committed that the block had at first. What a step
leaves unused is carried over, and after S steps only the inner selector limits. Around a threshold,
with the whole generation as one block, this is Fast-dLLM's threshold for Dream without a cache.
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


@register("select.ration")
@dataclass(frozen=True)
class Ration(Select):
    """`inner` chooses among the most confident positions, as many as the budget allows."""

    inner: Select
    steps: int  # S
    needs: ClassVar[frozenset[Need]] = COUNTS_STEPS

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DllmBenchError(f"Ration steps is {self.steps}; give at least 1 step per block.")

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step_K, total_K = step_in_block(state, window)
        due_K = total_K * (step_K + 1).clamp(max=self.steps) // self.steps
        left_K = due_K - (total_K - window.eligible_KW.sum(1))
        return most_confident(scores, window, left_K) & self.inner(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.inner.on_stall(scores, window, state)
