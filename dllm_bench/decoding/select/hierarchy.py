"""Divide and conquer over runs of adjacent masks (dInfer's hierarchical decoding).

Committed are the surest position of every run of adjacent masks in a block if its probability is
above `low`, so that each forward splits the runs, and every position above `tau`, both strict. A
block that must progress and has neither commits its surest position.
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


@register("select.hierarchy")
@dataclass(frozen=True)
class Hierarchy(Select):
    """`tau` for any position (1: off), `low` for the surest of a run (0: always)."""

    tau: float
    low: float = 0.4

    def __post_init__(self) -> None:
        if self.tau < 0 or not 0 <= self.low <= 1:
            raise DllmBenchError(
                f"Hierarchy has tau {self.tau} and low {self.low}; give probabilities (0 to 1)."
            )

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        probability_KNB = window.blocks(scores.probability_KW)
        masked_KNB = window.blocks(window.eligible_KW)
        run_KNB = (~masked_KNB).cumsum(2)  # positions between two decoded ones share a number
        sure_KNB = probability_KNB.masked_fill(~masked_KNB, -1.0)
        best_KNR = torch.full_like(torch.nn.functional.pad(sure_KNB, (0, 1)), -1.0)
        best_KNR = best_KNR.scatter_reduce(2, run_KNB, sure_KNB, "amax")
        best_KNB = (sure_KNB == best_KNR.gather(2, run_KNB)) & (sure_KNB > self.low)
        return window.flat((best_KNB | (sure_KNB > self.tau)) & masked_KNB)
