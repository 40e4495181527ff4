"""Verification by equality, the rule of the z-lab DFlash release.

The target draws its own token at every proposed position; drafts are accepted as long as they are
what it drew, and its first other token is kept. The drafts' law plays no part, so drafters take
their best guess at any temperature; acceptance at one position is p_t(draft).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.speculative import Proposal, Sampler, Verify, VerifyResult, at
from dllm_bench.registry import register


@register("verify.greedy_match")
@dataclass(frozen=True)
class GreedyMatch(Verify):
    """Accept while the target draws the same token: its plain decoding by construction."""

    reads_probabilities: ClassVar[bool] = False

    def __call__(self, proposal: Proposal, logits_NV: Tensor, sampler: Sampler) -> VerifyResult:
        own_N, _ = sampler.sample(logits_NV)
        count = (own_N[:-1] == proposal.tokens_N).long().cumprod(0).sum()
        return VerifyResult(count, at(own_N, count))
