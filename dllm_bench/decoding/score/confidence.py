"""Confidence = probability of the most probable token (LLaDA low-confidence remasking, Fast-dLLM).

Threshold and ranking read the same value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.protocols import Score, Scores, Window
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import top1


@dataclass(frozen=True)
class Confidence(Score):
    """max_v p_v for every window position."""

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        ids_KW, probability_KW = top1(logits_KWV)
        return Scores(ids_KW, probability_KW, probability_KW)
