"""What the plain scores share: a candidate, its probability, and a ranking value of its own.

Thresholds compare the probability of the candidate, ranking reads what `rank` returns. All is
computed in `precision` (float32); published samplers use the logits' own dtype (Dream, LoPA:
`model`) or float64 (Fast-dLLM for LLaDA). Sampling pieces ask for tokens other than the surest.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import Candidates, Precision, check_choice, read_logits


@dataclass(frozen=True)
class Ranked(Score):
    """A score that knows nothing but the logits."""

    precision: Precision = "float32"
    reads_entropy: ClassVar[bool] = False
    row_by_row: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self, "precision", self.precision, Precision)

    @abstractmethod
    def rank(self, logits_KWV: Tensor, seen: Candidates) -> Tensor:
        """The ranking value (K, W), larger is surer; `seen` is what one pass has found already."""

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        return self._scores(logits_KWV)

    def of(self, logits_KWV: Tensor, ids_KW: Tensor, state: DecodeState) -> Scores:
        """The scores of candidates that were chosen elsewhere; `state` is for what knows tokens."""
        return self._scores(logits_KWV, ids_KW)

    def _scores(self, logits_KWV: Tensor, ids_KW: Tensor | None = None) -> Scores:
        seen = read_logits(logits_KWV, self.precision, self.reads_entropy, ids_KW)
        return Scores(seen.ids_KW, seen.probability_KW, self.rank(logits_KWV, seen))


def check_sampler(sampler: Score, inner: Score, temperature: float) -> None:
    """A sampler draws from the logits it is given and leaves the ranking to a plain score."""
    name = type(sampler).__name__
    if temperature < 0:
        raise DllmBenchError(f"{name} has temperature {temperature}; give 0 (the surest) or more.")
    if not isinstance(inner, Ranked):
        raise DllmBenchError(
            f"{name} draws for a plain score, its inner one is {type(inner).__name__}; wrap it the "
            f"other way round, with {name} inside."
        )
