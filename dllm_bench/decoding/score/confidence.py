"""Confidence = probability of the candidate (LLaDA low-confidence remasking, Fast-dLLM).

Threshold and ranking read the same value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.decoding.score.ranked import Ranked


@dataclass(frozen=True)
class Confidence(Ranked):
    """max_v p_v for every window position."""

    def rank(self, logits_KWV: Tensor, probability_KW: Tensor) -> Tensor:
        return probability_KW
