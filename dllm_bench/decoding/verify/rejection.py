"""Speculative sampling by rejection, DeepSpec's rule (Leviathan et al. 2023, Chen et al. 2023).

Token x is accepted with probability min(1, p_t(x) / p_d(x)). After the first rejection the next
token is drawn from the normalised residual max(p_t - p_d, 0), after full acceptance from p_t. A
position is accepted with probability sum min(p_t, p_d). At temperature 0 a token is accepted if it
is the target's argmax, and no distribution is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.speculative import Proposal, Sampler, Verify, VerifyResult, one_hot, row_at
from dllm_bench.decoding.verify.greedy_match import GreedyMatch
from dllm_bench.registry import register

TINY = 1e-8
"""Smallest draft probability and smallest residual mass used as a divisor."""


@register("verify.rejection")
@dataclass(frozen=True)
class Rejection(Verify):
    """Takes one random number per draft token, also after a rejection, then one for the next; none
    at temperature 0.
    """

    reads_probabilities: ClassVar[bool] = True

    def __call__(self, proposal: Proposal, logits_RV: Tensor, sampler: Sampler) -> VerifyResult:
        if sampler.greedy:
            return GreedyMatch()(proposal, logits_RV, sampler)
        target_RV = sampler.probabilities(logits_RV)
        draft_DV = proposal.probabilities_DV
        if draft_DV is None:
            draft_DV = one_hot(proposal.tokens_D, target_RV.shape[-1])
        accepted_D = self.acceptance_probability(proposal.tokens_D, draft_DV, target_RV)
        count = (sampler.uniforms(len(proposal)) < accepted_D).long().cumprod(0).sum()
        bonus = sampler.draw(self.next_distribution(count, draft_DV, target_RV)[None])[0]
        return VerifyResult(count, bonus)

    @staticmethod
    def acceptance_probability(tokens_D: Tensor, draft_DV: Tensor, target_RV: Tensor) -> Tensor:
        """Probability (D,) that each token is accepted if all before it are."""
        tokens_D1 = tokens_D[:, None]
        draft_D = draft_DV.gather(1, tokens_D1)[:, 0].clamp(min=TINY)
        return (target_RV[:-1].gather(1, tokens_D1)[:, 0] / draft_D).clamp(max=1)

    @staticmethod
    def next_distribution(count: Tensor, draft_DV: Tensor, target_RV: Tensor) -> Tensor:
        """Probabilities (V,) of the token after `count` accepted ones."""
        nothing_1V = torch.zeros_like(target_RV[:1])
        target_V = row_at(target_RV, count)
        residual_V = (target_V - row_at(torch.cat([draft_DV, nothing_1V]), count)).clamp(min=0)
        mass = residual_V.sum()
        return torch.where(mass > TINY, residual_V / mass.clamp(min=TINY), target_V)
