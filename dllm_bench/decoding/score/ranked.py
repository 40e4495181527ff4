"""What the scores that read nothing but the logits have in common.

Thresholds compare the probability of the candidate; ranking compares what `rank` returns. All is
computed in `precision` (float32); published samplers use the logits' own dtype (Dream, LoPA:
`model`) or float64 (Fast-dLLM for LLaDA). Sampling pieces choose the candidates themselves.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Reads, Score, Scores
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import Candidates, Precision, read_logits


@dataclass(frozen=True)
class Ranked(Score):
    """A score of the logits alone: candidate, its probability, and a value to rank by."""

    precision: Precision = "float32"
    reads_entropy: ClassVar[bool] = False  # whether `rank` reads `Candidates.neg_entropy_KW`
    reads_rows: ClassVar[Reads] = "masked"

    def __post_init__(self) -> None:
        check_choice(self, "precision", self.precision, Precision)

    @abstractmethod
    def rank(self, logits_KWV: Tensor, candidates: Candidates) -> Tensor:
        """Confidences (K, W), from the logits or from what one pass over them has yielded."""

    def read(self, logits_KWV: Tensor, entropy: bool, ids_KW: Tensor | None = None) -> Candidates:
        """What the logits say in the score's precision; see `read_logits`."""
        return read_logits(logits_KWV, self.precision, entropy, ids_KW)

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        return self._scores(logits_KWV)

    def of(self, logits_KWV: Tensor, ids_KW: Tensor, state: DecodeState) -> Scores:
        """The scores of the candidates `ids`, which were chosen elsewhere."""
        return self._scores(logits_KWV, ids_KW)

    def _scores(self, logits_KWV: Tensor, ids_KW: Tensor | None = None) -> Scores:
        candidates = self.read(logits_KWV, self.reads_entropy, ids_KW)
        confidence_KW = self.rank(logits_KWV, candidates)
        return Scores(candidates.ids_KW, candidates.probability_KW, confidence_KW)


def check_sampler(sampler: Score, inner: Score, temperature: float) -> None:
    """Refuse negative temperatures, and inner scores that read more than the logits."""
    name = type(sampler).__name__
    if temperature < 0:
        raise DllmBenchError(
            f"{name} has temperature {temperature}; give 0 (the most probable token) or more."
        )
    if not isinstance(inner, Ranked):
        raise DllmBenchError(
            f"{name} draws tokens for a score of the logits alone, and its inner score is "
            f"{type(inner).__name__}; wrap it the other way round, with {name} inside."
        )
