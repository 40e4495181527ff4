"""dLLM-Cache (arXiv 2506.06295): each layer computes the response rows whose V changed most.

All hidden states pass through every layer, and all rows have logits. For rows that a layer does not
compute, it takes K, V and the outputs of attention and MLP from the cache. The prompt's rows are
computed every `prompt_every` forwards, the response's every `every`; both count all forwards of the
request. In the other forwards a layer computes and keeps V of the whole response, then computes the
rows whose V has the smallest cosine with the previous V. Their number is the share `share` of the
response, rounded down, including decoded tokens and later blocks. With a share of 0, V is not
renewed. The first layer computes everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dllm_bench.core.contracts import Cache, Round
from dllm_bench.core.declared import Positive, Proportion
from dllm_bench.core.decoder import ONE_BRANCH, Condition, needing
from dllm_bench.core.denoiser import ForwardPlan, LayerRows
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.numerics import stable_top
from dllm_bench.methods.caches import NoCache
from dllm_bench.registry import register


@dataclass(frozen=True)
class MostChanged:
    """Chooses the rows a layer computes; implements `core.denoiser.RowChoice`."""

    prompt: int  # positions of the prompt
    length: int  # X, length of prompt and response
    renews_prompt: bool
    renews_response: bool
    share: float

    def rows(self, layer: LayerRows) -> Tensor | None:
        """Return the rows to renew; of the response, if it is not renewed, those chosen."""
        if layer.index == 0 or (self.renews_prompt and self.renews_response):
            return None
        if self.renews_response:
            return layer.span(self.prompt, self.length)
        if not self.share:
            return layer.span(0, self.prompt if self.renews_prompt else 0)
        chosen_R = layer.compared(self.prompt, self.length, self.choose)
        return torch.cat([layer.span(0, self.prompt), chosen_R]) if self.renews_prompt else chosen_R

    def choose(self, old_SC: Tensor, new_SC: Tensor) -> Tensor:
        """Return the rows of the response with the smallest cosine; of equal ones the first."""
        cosine_S = cosine_similarity(new_SC.float(), old_SC.float(), dim=-1)
        return stable_top(-cosine_S[None], int(len(cosine_S) * self.share))[0]


@register("cache.dllm_cache")
@dataclass(frozen=True)
class DLLMCache(Cache):
    """Caches K, V and the outputs of attention and MLP, in every layer and at every position."""

    prompt_every: Positive = 100  # forwards between those that compute the prompt
    every: Positive = 7  # forwards between those that compute the response
    share: Proportion = 0.25  # response rows computed by a layer in the other forwards
    gives = frozenset({Condition.FED_WINDOW, Condition.FULL_ATTENTION})
    needs = needing(ONE_BRANCH, {"model": Condition.CHOSEN_ROWS})

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        plan, now = NoCache().plan(round), branches.forwards
        span = (0, window.visible)
        fresh = kv.length < window.visible  # positions that no forward has computed
        renews = now % self.prompt_every == 0, now % self.every == 0 or fresh
        rule = MostChanged(branches.prompt_len, window.visible, *renews, self.share)
        kind = ForwardKind.REFRESH if any(renews) else ForwardKind.DENOISE
        return replace(plan, kind=kind if now else ForwardKind.PREFILL, store=span, recompute=rule)
