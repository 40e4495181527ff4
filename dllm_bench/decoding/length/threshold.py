"""DSpark's static threshold: verify up to the first token that is unlikely to be accepted.

DeepSpec compares the confidence at each position with one threshold. The confidences are not
multiplied up to the probability that the whole prefix survives, and the load of the machine does
not matter. A confidence depends only on tokens drafted before its own, so the output distribution
is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Proposal, VerifyLength
from dllm_bench.decoding.length.measurements import Temperatures, acceptance_probabilities
from dllm_bench.registry import register


@register("length.threshold")
@dataclass(frozen=True)
class SurvivalThreshold(VerifyLength):
    """Cut each draft before the first token whose acceptance probability is below tau."""

    tau: float
    """Threshold in [0, 1]; 0 verifies everything."""
    temperatures: Temperatures = field(default_factory=Temperatures)
    """Calibration of the confidence head."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need("draft", Condition.SURVIVAL_ESTIMATES)})

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise DllmBenchError(
                f"SurvivalThreshold has tau={self.tau}, which is no probability; choose a number "
                "from 0 to 1."
            )

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return [
            likely_prefix(probabilities, self.tau)
            for probabilities in acceptance_probabilities(proposals, self.temperatures)
        ]


def likely_prefix(probabilities: Sequence[float], tau: float) -> int:
    """Number of tokens before the first one whose probability is below tau."""
    return len(list(takewhile(lambda probability: probability >= tau, probabilities)))
