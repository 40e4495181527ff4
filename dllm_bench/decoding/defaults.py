"""The default pieces of a masked decoder: no exploration, no revision."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Explore, Revise, Scores, Stop
from dllm_bench.core.decoder import Condition
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("explore.greedy")
@dataclass(frozen=True)
class Greedy(Explore):
    """One branch, one forward, its own scores: no exploration."""

    gives = frozenset({Condition.ONE_BRANCH})

    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        return state

    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        return scores.confidence_KW.new_zeros(branches.branches)


@register("revise.none")
@dataclass(frozen=True)
class NoRevision(Revise):
    """Changes nothing and reads nothing: what is committed stays."""

    gives = frozenset({Condition.NO_CHANGES})


@register("stop.filled")
@dataclass(frozen=True)
class Filled(Stop):
    """Decodes until nothing is masked: every generation has full length (LLaDA, Dream)."""
