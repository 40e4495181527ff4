"""How drafts are verified: what is sampled, their length, and which of their tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.speculative import (
    Proposal,
    Sampler,
    Verify,
    VerifyLength,
    VerifyResult,
    one_hot,
    row_at,
)
from dllm_bench.decoding.numerics import keep_top_k, keep_top_p
from dllm_bench.registry import register


@dataclass(frozen=True)
class TruncatedSampler(Sampler):
    """Samples among the most probable tokens alone."""

    top_p: float = 1.0
    """Tokens are left out whose more probable ones sum to more than this."""
    top_k: int | None = None
    """How many tokens are left at most; None: all."""

    def probabilities(self, logits_DV: Tensor) -> Tensor:
        if self.greedy:
            return super().probabilities(logits_DV)
        scaled_DV = logits_DV.float() / self.temperature
        if self.top_k is not None:
            scaled_DV = keep_top_k(scaled_DV, self.top_k)
        return keep_top_p(scaled_DV, self.top_p).softmax(-1)


@register("length.fixed")
@dataclass(frozen=True)
class FixedLength(VerifyLength):
    """The same limit for every proposal.

    Verify the whole draft, or always its first tokens up to a fixed number.

    The reference for every other length rule: calibration data are collected with it, and it is
    what a production system with a static speculation budget does.
    """

    tokens: int | None = None
    """Most draft tokens verified; None: all of them, 0: plain autoregressive decoding."""

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return [len(proposal.tokens_D[: self.tokens]) for proposal in proposals]


@register("verify.greedy_match")
@dataclass(frozen=True)
class GreedyMatch(Verify):
    """Accept while the target draws the same token; the text is its plain decoding.

    Verification by equality, the rule of the z-lab DFlash release.

    The target draws its own token at every proposed position. Draft tokens are accepted as long as
    they equal what it drew, and its first differing token is kept. The draft's distributions are
    not used, so drafters take their most probable token at any temperature; a token is accepted
    with probability p_t(draft token).
    """

    reads_probabilities: ClassVar[bool] = False

    def __call__(self, proposal: Proposal, logits_RV: Tensor, sampler: Sampler) -> VerifyResult:
        own_R, _ = sampler.sample(logits_RV)
        count = (own_R[:-1] == proposal.tokens_D).long().cumprod(0).sum()
        return VerifyResult(count, row_at(own_R, count))


TINY = 1e-8
"""Smallest draft probability and smallest residual mass used as a divisor."""


@register("verify.rejection")
@dataclass(frozen=True)
class Rejection(Verify):
    """Takes one random number per draft token, also after a rejection, then one for the next.

    At temperature 0 it takes none.

    Speculative sampling by rejection, DeepSpec's rule (Leviathan et al. 2023, Chen et al. 2023).

    Token x is accepted with probability min(1, p_t(x) / p_d(x)). After the first rejection the next
    token is drawn from the normalised residual max(p_t - p_d, 0), after full acceptance from p_t. A
    position is accepted with probability sum min(p_t, p_d). At temperature 0 a token is accepted if
    it is the target's argmax, and no distribution is made.
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
