"""Margin as confidence: p_1 - p_2 of the two most probable tokens (Dream's `topk_margin`).

Only the ranking changes; thresholds still compare the probability of the candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.decoding.numerics import Candidates, margin
from dllm_bench.decoding.score.ranked import Ranked
from dllm_bench.registry import register


@register("score.margin")
@dataclass(frozen=True)
class Margin(Ranked):
    """p_1 - p_2 for every window position."""

    def rank(self, logits_KWV: Tensor, candidates: Candidates) -> Tensor:
        return margin(logits_KWV, self.precision)
