"""DSpark's static cut: verify up to the first token whose survival looks unlikely.

DeepSpec compares the confidence head's own output at each position with one threshold; the chance
that all tokens so far survive is not multiplied up, nothing is calibrated, the load of the machine
plays no part. A confidence reads what is drafted before its token only, so the law is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.speculative import Proposal, VerifyLength


@dataclass(frozen=True)
class Threshold(VerifyLength):
    """Cut before the first token with sigmoid(survival) < tau; 0 verifies everything."""

    tau: float

    needs: ClassVar[frozenset[tuple[str, str]]] = frozenset({("draft", "survival estimates")})

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise DllmBenchError(
                f"Threshold has tau={self.tau}, which is no probability; choose one of 0 to 1."
            )

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return [self._length(proposal) for proposal in proposals]

    def _length(self, proposal: Proposal) -> int:
        assert proposal.survival_N is not None  # the draft gives survival estimates
        sure_N = proposal.survival_N.float().sigmoid() >= self.tau
        return int(sure_N.long().cumprod(0).sum())
