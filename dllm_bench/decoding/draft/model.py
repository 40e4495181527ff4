"""A smaller autoregressive model drafts, token by token (Leviathan et al. 2023).

The control every drafter has to beat: its quality is that of a whole model, its cost grows with
every token. It reads nothing of the target but the committed tokens.
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
    """`tokens` tokens a round from the model in `drafter`."""

    drafter: ModelDrafter
    tokens: int

    @property
    def longest(self) -> int:
        return self.tokens

    def new_cache(self, target: Target, length: int) -> KVCache:
        return self.drafter.on(target).new_cache(length)

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        model, kv = self.drafter.on(context.target), context.kv
        assert kv is not None
        text_L, cached = context.tokens_L, kv.length
        laws = []
        for _ in range(self.tokens):
            token_1, law_1V = sampler.sample(next_logits(model, text_L, kv))
            text_L = torch.cat([text_L, token_1])
            laws.append(law_1V)
        kv.crop(context.anchor)
        drafted = len(text_L) - len(context.tokens_L)
        return Proposal(
            text_L[-drafted:],
            None if sampler.greedy else torch.cat([law for law in laws if law is not None]),
            calls=drafted,
            fed=len(text_L) - 1 - cached,
            cached=cached,
        )


def next_logits(model: Denoiser, text_L: Tensor, kv: KVCache) -> Tensor:
    """Logits (1, V) of what follows the text; the cache then holds all of it."""
    fed = (kv.length, len(text_L))
    rows = (len(text_L), len(text_L) + 1)
    plan = ForwardPlan(ForwardKind.DRAFT, fed, rows, store=fed, attention="block_causal", block=1)
    logits_1V = model.forward(text_L[None], plan, kv)[0]
    kv.keep(plan, torch.zeros((), dtype=torch.long, device=text_L.device))
    return logits_1V
