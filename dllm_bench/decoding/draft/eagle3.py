"""EAGLE-3 as DeepSpec implements it: one layer, a chain of tokens, the full vocabulary.

The layer reads the target's features of the committed tokens, then its own hidden state for every
token it drafts. Afterwards the cache is cropped: the next round feeds true features of what was
committed. Left out, as there: trees of candidates and the reduced draft vocabulary of the original.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.denoiser import KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import first_end
from dllm_bench.core.speculative import ChainDrafter, Context, Draft, Proposal, Sampler, Target
from dllm_bench.registry import register


@register("draft.eagle3")
@dataclass(frozen=True)
class Eagle3(Draft):
    """`tokens` a round, None: as many as it was unrolled for; a drafted end token is the last."""

    drafter: ChainDrafter
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise DllmBenchError(f"Eagle3 has tokens={self.tokens}; choose 1 or more.")

    @property
    def longest(self) -> int:
        return self.tokens or self.drafter.steps

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers

    def new_cache(self, target: Target, length: int) -> KVCache:
        return self.drafter.on(target).new_cache(length)

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        network, kv = self.drafter.on(context.target), context.kv
        assert kv is not None
        cached = kv.length
        hidden_11D, logits_1V = network.extend(context)
        tokens_1, law_1V = sampler.sample(logits_1V)
        tokens, laws = [tokens_1], [law_1V]
        for _ in range(self.longest - 1):
            hidden_11D, logits_1V = network.step(tokens[-1], hidden_11D, context)
            tokens_1, law_1V = sampler.sample(logits_1V)
            tokens.append(tokens_1)
            laws.append(law_1V)
        fed = kv.length - cached
        kv.crop(context.anchor)
        proposal = Proposal(
            torch.cat(tokens),
            None if sampler.greedy else torch.cat([law for law in laws if law is not None]),
            calls=len(tokens),
            fed=fed,
            cached=cached,
        )
        return proposal.first(self._until_end(proposal.tokens_N, context.target))

    def _until_end(self, tokens_N: Tensor, target: Target) -> int:
        """Number of tokens up to the first that ends a text, that one included."""
        end = first_end(tokens_N.tolist(), target.special)
        return len(tokens_N) if end is None else end + 1
