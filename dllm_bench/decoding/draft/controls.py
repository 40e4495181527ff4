"""Control drafts that need no trained drafter: none, random tokens, the least probable tokens.

They show what verification is worth alone: the text (or, when sampling, its distribution) must stay
the target's own although next to nothing is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dllm_bench.core.denoiser import KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, Target
from dllm_bench.decoding.draft.model import next_logits
from dllm_bench.registry import register


@register("draft.none")
@dataclass(frozen=True)
class NoDraft(Draft):
    """Proposes nothing: plain autoregressive decoding, with the same loop, cache and sampling.

    The baseline of every speed-up.
    """

    @property
    def longest(self) -> int:
        return 0

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        return Proposal(context.tokens_L[:0])


@register("draft.random")
@dataclass(frozen=True)
class RandomDraft(Draft):
    """Tokens drawn uniformly from the vocabulary, at any temperature, by the request's seed."""

    tokens: int
    """Draft tokens per round."""
    uses_seed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise DllmBenchError(f"RandomDraft has tokens={self.tokens}; choose 1 or more.")

    @property
    def longest(self) -> int:
        return self.tokens

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        vocabulary, device = context.target.vocab_size, context.tokens_L.device
        tokens_D = (sampler.uniforms(self.tokens) * vocabulary).long()
        probabilities_DV = torch.full((self.tokens, vocabulary), 1 / vocabulary, device=device)
        return Proposal(tokens_D, probabilities_DV)


@register("draft.adversarial")
@dataclass(frozen=True)
class AdversarialDraft(Draft):
    """Tokens that the target itself finds least probable: a draft that is wrong on purpose.

    It costs a forward of the target per token, and none of them is accepted.
    """

    tokens: int
    """Draft tokens per round."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise DllmBenchError(f"AdversarialDraft has tokens={self.tokens}; choose 1 or more.")

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
