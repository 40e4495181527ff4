"""Fast-dLLM++ (arXiv 2606.02955): a bound on the joint probability in place of the factor.

Released code: Ringo-Star/FastdLLM_plusplus@29fd034, v1/llada/generate.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.declared import Probability
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("select.frechet_bound")
@dataclass(frozen=True)
class FrechetBound(Select):
    """Commits the most probable positions of each block, as many as the Fréchet bound allows.

    For any joint distribution, the first n candidates of a block, with probabilities sorted c(1) >=
    c(2) >= ..., are all right with probability at least c(1) + ... + c(n) - (n - 1); any other
    tokens at these positions have probability at most 1 - c(n). The first n are committed for the
    largest n at which the difference of these bounds exceeds `delta`; the difference never grows
    with n. If a block must progress but there is no such n, its most confident position is
    committed.
    """

    delta: Probability  # the difference of the two bounds; 1: one token per forward

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        open_KW = window.eligible_KW
        probability_KW = scores.probability_KW.masked_fill(~open_KW, -torch.inf)
        probability_KNP = window.blocks(probability_KW, -torch.inf)
        sorted_KNP, order_KNP = probability_KNP.sort(dim=2, descending=True, stable=True)
        rank_P = torch.arange(1, window.block + 1, device=probability_KNP.device)
        allowed_KNP = sorted_KNP.cumsum(2) - rank_P + sorted_KNP > self.delta
        where_KNP = torch.zeros_like(allowed_KNP).scatter_(2, order_KNP, allowed_KNP)
        return window.flat(where_KNP) & open_KW
