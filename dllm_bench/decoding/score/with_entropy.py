"""Another score and the entropy beside it, both from one pass over the logits.

For selectors that order by one value and bound another, as d2Cache's form of the EB-Sampler: order
by confidence, bound on entropy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Score, Scores
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.ranked import Ranked
from dllm_bench.registry import register


@register("score.with_entropy")
@dataclass(frozen=True)
class WithEntropy(Score):
    """The scores of `inner`, with the entropy of every position."""

    inner: Ranked = field(default_factory=Confidence)
    gives: ClassVar[frozenset[Condition | BlockLength]] = Score.gives | {Condition.ENTROPY}
    reads_rows: ClassVar[Reads] = "masked"

    def __post_init__(self) -> None:
        if isinstance(self.inner, Confidence) and self.inner.last:
            raise DllmBenchError(
                f"WithEntropy reads the logits once, and its inner score has last "
                f"{self.inner.last!r}, whose probabilities are those of other logits; use null."
            )

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        candidates = self.inner.read(logits_KWV, entropy=True)
        return Scores(
            candidates.ids_KW,
            candidates.probability_KW,
            self.inner.rank(logits_KWV, candidates),
            neg_entropy_KW=candidates.neg_entropy_KW,
        )
