"""The target's own least probable tokens: a drafter that is always wrong, on purpose.

A control: it costs a forward of the target per token and nothing of it is accepted, so text that
stays the target's own owes it to verification alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm_bench.core.denoiser import KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, Target
from dllm_bench.decoding.draft.model import next_logits


@dataclass(frozen=True)
class Adversarial(Draft):
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
