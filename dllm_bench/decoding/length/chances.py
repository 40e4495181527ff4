"""What a confidence head says, as the rules of length read it: chances instead of logits.

Sequential Temperature Scaling (DSpark, section 3.2.1) divides the logit at each position by a
temperature of its own before the sigmoid. `dllm-bench train temperatures` fits them; without any,
a head is taken at its word. What is stored of a run stays unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Proposal
from dllm_bench.decoding.length.stored import read


@dataclass(frozen=True)
class Temperatures:
    """One temperature per position; positions beyond the last have 1."""

    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in self.values):
            raise DllmBenchError(
                f"Temperatures {list(self.values)} are given for the positions of a draft; give "
                "numbers above 0."
            )

    def chances(self, logits: Sequence[float]) -> list[float]:
        """Chance of every token to be accepted if all before it are."""
        scales = [*self.values, *[1.0] * len(logits)]
        return [sigmoid(logit / scale) for logit, scale in zip(logits, scales, strict=False)]


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), for any logit."""
    return (1 + math.tanh(logit / 2)) / 2


def chances(proposal: Proposal, temperatures: Temperatures) -> list[float]:
    """The same of a proposal with survival estimates."""
    assert proposal.survival_N is not None  # the draft gives survival estimates
    return temperatures.chances(proposal.survival_N.double().tolist())


def read_temperatures(source: str | None) -> Temperatures:
    """The temperatures in a file that `dllm-bench train temperatures` wrote; None: none."""
    if source is None:
        return Temperatures()
    return read(
        source,
        lambda plain: Temperatures(tuple(map(float, plain["temperatures"]))),
        "temperatures",
        "train temperatures RUN",
    )
