"""KLASS (arXiv 2511.05664): commit what is sure and has stopped moving.

Ready are the positions whose candidate is probable enough and whose distribution moved by less than
`eps` in each of the remembered forwards. If a block that must progress has none, `fallback` chooses
in it. The released code for LLaDA is strict and commits nothing as ready before a block has seen as
many forwards as are remembered (`warm_up`), though their divergences are older; that for Dream is
neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice, check_probabilities
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.select.steps import COUNTS_STEPS, most_confident, step_in_block
from dllm_bench.registry import register

Commits = Literal["all", "most_probable", "most_stable"]


@register("select.stable")
@dataclass(frozen=True)
class Stable(Select):
    """Commits positions that are probable and stable."""

    fallback: Select  # chooses where no position is ready
    tau: float  # probability; 1 and `strict`: `fallback` alone
    eps: float  # nats; the divergences of a ready position are below it
    strict: bool = False  # > tau instead of >=
    commits: Commits = "all"  # of the ready positions; KLASS's unmask_strategy
    warm_up: bool = False  # whether a block's first H - 1 forwards are left to `fallback`

    def __post_init__(self) -> None:
        check_choice(self, "commits", self.commits, Commits)
        check_probabilities(self, "tau")
        if self.eps < 0:
            raise DllmBenchError(f"Stable has eps {self.eps}; give a divergence of 0 or more nats.")

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        """Divergences, and for the warm-up a count of the block's forwards."""
        divergences = {Need("score", Condition.DIVERGENCES)}
        return COUNTS_STEPS | divergences if self.warm_up else frozenset(divergences)

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        ready_KW = window.eligible_KW & self._ready(scores)
        if self.warm_up:
            assert scores.divergence_KWH is not None  # by `needs`
            step_K, _ = step_in_block(state, window)
            ready_KW = ready_KW & (step_K >= scores.divergence_KWH.shape[2] - 1)[:, None]
        return ready_KW if self.commits == "all" else self._first(ready_KW, scores, window)

    def _ready(self, scores: Scores) -> Tensor:
        """Positions that are probable and stable, committed ones included, (K, W)."""
        assert scores.divergence_KWH is not None
        chance_KW = scores.probability_KW
        sure_KW = chance_KW > self.tau if self.strict else chance_KW >= self.tau
        return sure_KW & (scores.divergence_KWH < self.eps).all(-1)

    def _first(self, ready_KW: Tensor, scores: Scores, window: Window) -> Tensor:
        """The most probable or the most stable ready position."""
        assert scores.divergence_KWH is not None
        stable_KW = -scores.divergence_KWH[..., -1]
        order_KW = scores.probability_KW if self.commits == "most_probable" else stable_KW
        return most_confident(
            replace(scores, confidence_KW=order_KW), replace(window, eligible_KW=ready_KW)
        )

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW = self.fallback(scores, window, state) & window.eligible_KW
        best_KW, ids_KW = self.fallback.on_stall(scores, window, state)
        return where_KW | window.forced(where_KW, best_KW), ids_KW
