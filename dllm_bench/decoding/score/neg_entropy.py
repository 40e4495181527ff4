"""Negative entropy as confidence: sum_v p_v ln p_v (Dream's `entropy`, LoPA's Dream scripts).

Only the ranking changes; thresholds still compare the probability of the candidate, as in the
released D2F and LoPA code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.numerics import Candidates, read_logits
from dllm_bench.decoding.score.ranked import Ranked
from dllm_bench.registry import register


@register("score.neg_entropy")
@dataclass(frozen=True)
class NegEntropy(Ranked):
    """-H(p) for every window position, in nats."""

    gives: ClassVar[frozenset[Condition | BlockLength]] = Score.gives | {Condition.ENTROPY}
    reads_entropy: ClassVar[bool] = True
    eps: float = 0.0  # of the published form p ln(p + eps), where it is 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps < 0:
            raise DllmBenchError(f"NegEntropy has eps {self.eps}; give 0 or a tiny number.")

    def read(self, logits_KWV: Tensor, entropy: bool, ids_KW: Tensor | None = None) -> Candidates:
        return read_logits(logits_KWV, self.precision, entropy, ids_KW, self.eps)

    def rank(self, logits_KWV: Tensor, candidates: Candidates) -> Tensor:
        assert candidates.neg_entropy_KW is not None  # because of `reads_entropy`
        return candidates.neg_entropy_KW

    def _scores(self, logits_KWV: Tensor, ids_KW: Tensor | None = None) -> Scores:
        scores = super()._scores(logits_KWV, ids_KW)
        return replace(scores, neg_entropy_KW=scores.confidence_KW)
