"""Verification by equality, the rule of the z-lab DFlash release.

The target draws its own token at every proposed position. Draft tokens are accepted as long as they
equal what it drew, and its first differing token is kept. The draft's distributions are not used,
so drafters take their most probable token at any temperature; a token is accepted with probability
p_t(draft token).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.speculative import Proposal, Sampler, Verify, VerifyResult, row_at
from dllm_bench.registry import register


@register("verify.greedy_match")
@dataclass(frozen=True)
class GreedyMatch(Verify):
    """Accept while the target draws the same token; the text is its plain decoding."""

    reads_probabilities: ClassVar[bool] = False

    def __call__(self, proposal: Proposal, logits_RV: Tensor, sampler: Sampler) -> VerifyResult:
        own_R, _ = sampler.sample(logits_RV)
        count = (own_R[:-1] == proposal.tokens_D).long().cumprod(0).sum()
        return VerifyResult(count, row_at(own_R, count))
