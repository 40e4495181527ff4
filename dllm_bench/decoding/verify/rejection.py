"""Speculative sampling by rejection, DeepSpec's rule (Leviathan et al. 2023, Chen et al. 2023).

Token x at a position is accepted with probability min(1, p_t(x) / p_d(x)); after the first
rejection the next token comes from the residual max(p_t - p_d, 0), after full acceptance from p_t.
Acceptance at one position is sum min(p_t, p_d). At temperature 0 this is equality with the argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.speculative import Proposal, Sampler, Verify, VerifyResult, at, one_hot
from dllm_bench.registry import register

TINY = 1e-8  # least draft probability, and least residual mass, that is divided by


@register("verify.rejection")
@dataclass(frozen=True)
class Rejection(Verify):
    """A uniform number for every proposed token, also past a rejection, then one for the next."""

    reads_probabilities: ClassVar[bool] = True

    def __call__(self, proposal: Proposal, logits_NV: Tensor, sampler: Sampler) -> VerifyResult:
        target_NV = sampler.law(logits_NV)
        draft_NV = proposal.law_NV
        if draft_NV is None:
            draft_NV = one_hot(proposal.tokens_N, target_NV.shape[-1])
        accepted_N = self.chance(proposal.tokens_N, draft_NV, target_NV)
        count = (sampler.uniforms(len(proposal)) < accepted_N).long().cumprod(0).sum()
        bonus = sampler.draw(self.next_law(count, draft_NV, target_NV)[None])[0]
        return VerifyResult(count, bonus)

    @staticmethod
    def chance(tokens_N: Tensor, draft_NV: Tensor, target_NV: Tensor) -> Tensor:
        """Probability (n,) that each token is accepted if all before it are."""
        tokens_N1 = tokens_N[:, None]
        draft_N = draft_NV.gather(1, tokens_N1)[:, 0].clamp(min=TINY)
        return (target_NV[:-1].gather(1, tokens_N1)[:, 0] / draft_N).clamp(max=1)

    @staticmethod
    def next_law(count: Tensor, draft_NV: Tensor, target_NV: Tensor) -> Tensor:
        """The law (V,) of the token after `count` accepted ones."""
        nothing_1V = torch.zeros_like(target_NV[:1])
        target_V = at(target_NV, count)
        residual_V = (target_V - at(torch.cat([draft_NV, nothing_1V]), count)).clamp(min=0)
        mass = residual_V.sum()
        return torch.where(mass > TINY, residual_V / mass.clamp(min=TINY), target_V)
