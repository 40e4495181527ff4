"""DSpark's hardware-aware prefix scheduler (Algorithm 1) with early stop.

A draft token is verified while it adds to the expected tokens per second of the whole batch on this
machine. Survival estimates are taken for probabilities, so calibrate them before; the decision
about a token reads only what is drafted before it, so the law is kept (Appendix A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dllm_bench.core.speculative import Proposal, VerifyLength
from dllm_bench.decoding.length.chances import Temperatures, chances
from dllm_bench.decoding.length.prefix import early_stop
from dllm_bench.decoding.length.profile import StepProfile


@dataclass(frozen=True)
class HardwareAware(VerifyLength):
    """Lengths at the first peak of expected tokens per second."""

    profile: StepProfile
    temperatures: Temperatures = field(default_factory=Temperatures)

    needs: ClassVar[frozenset[tuple[str, str]]] = frozenset({("draft", "survival estimates")})

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return early_stop(
            [chances(proposal, self.temperatures) for proposal in proposals], self.profile
        )
