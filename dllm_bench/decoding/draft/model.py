"""A smaller autoregressive model drafts, token by token (Leviathan et al. 2023).

The control that every trained drafter has to beat: it drafts with the quality of a whole model, at
a cost that grows with every token. Of the target it reads the committed tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.speculative import Context, Draft, ModelDrafter, Proposal, Sampler, Target
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import register


@register("draft.model")
@dataclass(frozen=True)
class ModelDraft(Draft):
    """Tokens drafted one by one by the model in `drafter`."""

    drafter: ModelDrafter
    tokens: int
    """Draft tokens per round."""

    @property
    def longest(self) -> int:
        return self.tokens

    def new_cache(self, target: Target, length: int) -> KVCache:
        return self.drafter.on(target).new_cache(length)

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        model, kv = self.drafter.on(context.target), context.kv
        assert kv is not None
        text_L, cached = context.tokens_L, kv.length
        distributions = []
        for _ in range(self.tokens):
            token_1, probabilities_1V = sampler.sample(next_logits(model, text_L, kv))
            text_L = torch.cat([text_L, token_1])
            distributions.append(probabilities_1V)
        kv.crop(context.anchor)
        drafted = len(text_L) - len(context.tokens_L)
        return Proposal(
            text_L[-drafted:],
            None
            if sampler.greedy
            else torch.cat([one for one in distributions if one is not None]),
            calls=drafted,
            fed=len(text_L) - 1 - cached,
            cached=cached,
        )


def next_logits(model: Denoiser, text_L: Tensor, kv: KVCache) -> Tensor:
    """Logits (1, V) of the token after the text; afterwards the cache holds the whole text."""
    fed = (kv.length, len(text_L))
    rows = (len(text_L), len(text_L) + 1)
    plan = ForwardPlan(ForwardKind.DRAFT, fed, rows, store=fed, attention="block_causal", block=1)
    logits_1V = model.forward(text_L[None], plan, kv)[0]
    kv.keep(plan, torch.zeros((), dtype=torch.long, device=text_L.device))
    return logits_1V
