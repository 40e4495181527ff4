"""Margin as ranking value: p_1 - p_2, the two most probable tokens (Dream's `topk_margin`).

Only the ranking changes; thresholds still compare the probability of the candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.protocols import Score, Scores, Window
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import margin, top1


@dataclass(frozen=True)
class Margin(Score):
    """p_1 - p_2 for every window position."""

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        ids_KW, probability_KW = top1(logits_KWV)
        return Scores(ids_KW, probability_KW, margin(logits_KWV))
