"""Control drafts that need no drafter: no draft, random tokens, the least probable tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm_bench.core.denoiser import KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, Target
from dllm_bench.decoding.draft.model import next_logits
from dllm_bench.registry import register


@register("draft.none")
@dataclass(frozen=True)
class NoDraft(Draft):
    """Proposes nothing; the target decides every token alone."""

    @property
    def longest(self) -> int:
        return 0

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        return Proposal(context.tokens_L[:0])


@register("draft.random")
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


@register("draft.adversarial")
@dataclass(frozen=True)
class AdversarialDraft(Draft):
    """`tokens` tokens a round, each what the target would say last after those before it."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise DllmBenchError(f"Adversarial has tokens={self.tokens}; choose 1 or more.")

    @property
    def longest(self) -> int:
        return self.tokens

    def new_cache(self, target: Target, length: int) -> KVCache:
        return target.new_cache(length)

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        kv, text_L = context.kv, context.tokens_L
        assert kv is not None
        cached = kv.length
        for _ in range(self.tokens):
            text_L = torch.cat([text_L, next_logits(context.target, text_L, kv).argmin(-1)])
        kv.crop(context.anchor)
        fed = len(text_L) - 1 - cached
        return Proposal(text_L[-self.tokens :], calls=self.tokens, fed=fed, cached=cached)
