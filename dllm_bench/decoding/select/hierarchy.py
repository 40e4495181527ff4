"""Divide and conquer over runs of adjacent masks (dInfer's hierarchical decoding).

In every run of adjacent masks of a block, the most probable position is committed if its
probability is above `low`, so that each forward splits the runs. So is every position above `tau`.
Both comparisons are strict. A block that must progress and has neither commits its most confident
position. With `fall`, tau begins at 1 and falls (`iter_threshold` of dInfer's HierarchyDecoder).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_probabilities
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.select.threshold import check_fall, falling
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("select.hierarchy")
@dataclass(frozen=True)
class Hierarchy(Select):
    """Commits positions above `tau`, and above `low` the most probable position of each run."""

    tau: float  # 1: off
    low: float = 0.4  # 0: always
    fall: float | None = field(default=None, metadata=DEFAULT_LEFT_OUT)  # of tau, see `falling`

    def __post_init__(self) -> None:
        check_probabilities(self, "tau", "low")
        check_fall(self, self.fall)

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        probability_KNP = window.blocks(scores.probability_KW)
        masked_KNP = window.blocks(window.eligible_KW)
        run_KNP = (~masked_KNP).cumsum(2)  # equal for all positions of a run
        open_KNP = probability_KNP.masked_fill(~masked_KNP, -1.0)
        best_KNX = torch.full_like(torch.nn.functional.pad(open_KNP, (0, 1)), -1.0)
        best_KNX = best_KNX.scatter_reduce(2, run_KNP, open_KNP, "amax")
        best_KNP = (open_KNP == best_KNX.gather(2, run_KNP)) & (open_KNP > self.low)
        tau = falling(self.tau, self.fall, state)
        return window.flat((best_KNP | (open_KNP > tau)) & masked_KNP)
