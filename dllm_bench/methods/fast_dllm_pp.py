"""Fast-dLLM++ (arXiv 2606.02955): a bound on the joint probability in place of the factor.

Released code: Ringo-Star/FastdLLM_plusplus@29fd034, v1/llada/generate.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.declared import Probability
from dllm_bench.methods.fast_dllm import MostProbable
from dllm_bench.registry import register


@register("select.frechet_bound")
@dataclass(frozen=True)
class FrechetBound(MostProbable):
    """Commits the most probable positions of each block, as many as the Fréchet bound allows.

    For any joint distribution, the first n candidates of a block, with probabilities sorted c(1) >=
    c(2) >= ..., are all right with probability at least c(1) + ... + c(n) - (n - 1); any other
    tokens at these positions have probability at most 1 - c(n). The first n are committed for the
    largest n at which the difference of these bounds exceeds `delta`; the difference never grows
    with n. If a block must progress but there is no such n, its most confident position is
    committed.
    """

    delta: Probability  # the difference of the two bounds; 1: one token per forward

    def allowed(self, sorted_KNP: Tensor, rank_P: Tensor) -> Tensor:
        return sorted_KNP.cumsum(2) - rank_P + sorted_KNP > self.delta
