"""DSpark's scheduler for an engine that overlaps steps (section 5.2): sizes known two steps ahead.

How many tokens a step verifies is the best number for the chances of two steps before, searched
without early stop; which tokens, the surest of this step. The number knows nothing of the tokens it
counts, so the law is kept. The first two steps of a batch stop early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dllm_bench.core.speculative import Lengths, Proposal
from dllm_bench.decoding.length.chances import chances
from dllm_bench.decoding.length.hardware_aware import HardwareAware
from dllm_bench.decoding.length.prefix import TwoStepsAhead


@dataclass(frozen=True)
class Asynchronous(HardwareAware):
    """Sizes at the highest peak of two steps before; without them, in one round, early stop."""

    def begin(self) -> Lengths:
        rule = TwoStepsAhead(self.profile)

        def lengths(proposals: Sequence[Proposal]) -> list[int]:
            return rule([chances(proposal, self.temperatures) for proposal in proposals])

        return lengths
