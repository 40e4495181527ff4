"""Negative entropy as ranking value: sum_v p_v ln p_v (Dream's `entropy`, LoPA's Dream scripts).

Only the ranking changes; thresholds still compare the probability of the candidate, as in the
released D2F and LoPA code.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.protocols import Score, Scores, Window
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import neg_entropy, top1


@dataclass(frozen=True)
class NegEntropy(Score):
    """-H(p) for every window position."""

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        ids_KW, probability_KW = top1(logits_KWV)
        return Scores(ids_KW, probability_KW, neg_entropy(logits_KWV))
