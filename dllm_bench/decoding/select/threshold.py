"""Commit every position whose candidate is probable enough (Fast-dLLM §3; D2F with `strict`).

{p >= tau}, or {p > tau} when strict; a block that must progress and has none commits its surest
position (the inherited stall rule). That equals Fast-dLLM's "the best one always, the others by
threshold", because whenever anything passes, the most probable position passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.protocols import Scores, Select, Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState


@dataclass(frozen=True)
class Threshold(Select):
    """`tau` is compared with the candidate's probability; above 1 one token is taken per forward."""

    tau: float
    strict: bool = False

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise DllmBenchError(f"Threshold tau is {self.tau}; give a probability (0 to 1).")

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        probability_KW = scores.probability_KW
        return probability_KW > self.tau if self.strict else probability_KW >= self.tau
