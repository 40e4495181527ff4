"""No exploration: one branch, one forward, its own scores (every decoder but LoPA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Explore, Scores
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("explore.greedy")
@dataclass(frozen=True)
class Greedy(Explore):
    """One branch, K = 1."""

    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset({Condition.ONE_BRANCH})

    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        return state

    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        return scores.confidence_KW.new_zeros(branches.branches)
