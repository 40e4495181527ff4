"""Confidence = probability of the candidate (LLaDA low-confidence remasking, Fast-dLLM).

Threshold and ranking read the same value. `last` names end tokens that stay candidates but are
committed last: probabilities are those of a distribution without these tokens, in which an end
token has probability 0 (LLaDA's `confidence_eos_eot_inf`: both; its code drops eot alone above
temperature 0).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Scores
from dllm_bench.core.request import EndTokens
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import Candidates, forbid
from dllm_bench.decoding.score.ranked import Ranked
from dllm_bench.registry import register


@register("score.confidence")
@dataclass(frozen=True)
class Confidence(Ranked):
    """max_v p_v for every window position."""

    last: EndTokens | None = None  # end tokens that are committed last

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last is not None:
            check_choice(self, "last", self.last, EndTokens)

    def rank(self, logits_KWV: Tensor, candidates: Candidates) -> Tensor:
        return candidates.probability_KW

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        scores = super().__call__(logits_KWV, state, window)
        return self.of(logits_KWV, scores.ids_KW, state) if self.last else scores

    def of(self, logits_KWV: Tensor, ids_KW: Tensor, state: DecodeState) -> Scores:
        if self.last:
            logits_KWV = logits_KWV.clone()
            forbid(logits_KWV, state.special.named(self.last))
        return super().of(logits_KWV, ids_KW, state)
