"""Tokens by chance, each as likely as any other: what verification is worth without a drafter.

A control: greedy text must still be the target's own, sampled text must have its law, although next
to nothing is accepted. The tokens follow from the request's random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler


@dataclass(frozen=True)
class RandomDraft(Draft):
    """`tokens` tokens a round, drawn uniformly from the vocabulary at any temperature."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise DllmBenchError(f"RandomDraft has tokens={self.tokens}; choose 1 or more.")

    @property
    def longest(self) -> int:
        return self.tokens

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        vocabulary, device = context.target.vocab_size, context.tokens_L.device
        tokens_N = (sampler.uniforms(self.tokens) * vocabulary).long()
        law_NV = torch.full((self.tokens, vocabulary), 1 / vocabulary, device=device)
        return Proposal(tokens_N, law_NV)
