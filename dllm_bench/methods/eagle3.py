"""EAGLE-3 as DeepSpec implements it: one layer drafts a chain of tokens.

The layer reads the target's features at the committed tokens, and then its own hidden state for
every token it drafts. After a draft its cache is cropped: the next round feeds the target's
features of what was committed. Left out, as in DeepSpec: the trees of candidates of the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dllm_bench.core.declared import Positive
from dllm_bench.core.denoiser import KVCache
from dllm_bench.core.request import first_end
from dllm_bench.core.speculative import ChainDrafter, Context, Draft, Proposal, Sampler, Target
from dllm_bench.core.transfer import to_host
from dllm_bench.registry import register


@register("draft.eagle3")
@dataclass(frozen=True)
class Eagle3(Draft):
    """A chain of draft tokens; an end token is the last one of a draft."""

    drafter: ChainDrafter
    tokens: Positive | None = None
    """Draft tokens per round; None: as many as the drafter was unrolled for in training."""

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
        hidden_11H, logits_1V = network.extend(context)
        tokens_1, probabilities_1V = sampler.sample(logits_1V)
        tokens, distributions = [tokens_1], [probabilities_1V]
        for _ in range(self.longest - 1):
            hidden_11H, logits_1V = network.step(tokens[-1], hidden_11H, context)
            tokens_1, probabilities_1V = sampler.sample(logits_1V)
            tokens.append(tokens_1)
            distributions.append(probabilities_1V)
        fed = kv.length - cached
        kv.crop(context.anchor)
        return Proposal(
            torch.cat(tokens),
            sampler.joined(distributions),
            calls=len(tokens),
            fed=fed,
            cached=cached,
        )

    def cut(self, proposals: Sequence[Proposal], target: Target) -> list[Proposal]:
        """Return the drafts, each cut after its first end token."""
        drafted = to_host([one.tokens_D for one in proposals])
        ends = [first_end(tokens, target.special) for tokens in drafted]
        return [
            one if end is None else one.first(end + 1)
            for one, end in zip(proposals, ends, strict=True)
        ]
