"""DSpark's static cut: verify up to the first token whose survival looks unlikely.

DeepSpec compares the confidence at each position with one threshold; the chance that all tokens so
far survive is not multiplied up, and the load of the machine plays no part. A confidence reads what
is drafted before its token only, so the law is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Proposal, VerifyLength
from dllm_bench.decoding.length.measurements import Temperatures, chances
from dllm_bench.registry import register


@register("length.threshold")
@dataclass(frozen=True)
class SurvivalThreshold(VerifyLength):
    """Cut before the first token with a chance below tau; 0 verifies everything."""

    tau: float
    temperatures: Temperatures = field(default_factory=Temperatures)

    needs: ClassVar[frozenset[tuple[str, str]]] = frozenset({("draft", "survival estimates")})

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise DllmBenchError(
                f"Threshold has tau={self.tau}, which is no probability; choose one of 0 to 1."
            )

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return [
            sure_tokens(chances(proposal, self.temperatures), self.tau) for proposal in proposals
        ]


def sure_tokens(chances: Sequence[float], tau: float) -> int:
    """How many tokens stand before the first with a chance below tau."""
    return len(list(takewhile(lambda chance: chance >= tau, chances)))
