"""Causal models that draft for themselves: I-DLM, Nemotron-Labs-Diffusion.

I-DLM (arXiv 2604.11035): masks after the draft make the next draft in the verifying forward.

Written after a reading of the released code, thuEcstasy/I-DLM@3342a17 (idlm_blockN.py); there are
no recorded cases. For causal models that were trained to predict at masks as well. Left out:
skipped or partial verification, drafts among the best few tokens, an adapter for masks alone.

Nemotron-Labs-Diffusion's linear self-speculation (arXiv 2607.05722): one model in two modes.

Written after a description of `linear_spec_generate` in the model's remote code; there are no
recorded cases. For models trained for diffusion in blocks and for autoregression alike. Left out:
slots that stay masks below a confidence (default: none), an adapter for drafting alone, a budget of
thinking, and the quadratic form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm_bench.core.declared import Positive
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, one_hot
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import register

# --- I-DLM ----------------------------------------------------------------------------------------


@register("draft.strided")
@dataclass(frozen=True)
class StridedDraft(Draft):
    """Tokens that the target itself predicted at masks, in the forward that verified the last ones.

    A round feeds the draft and as many masks after it. If the whole draft is accepted, the rows of
    these masks are the next draft; otherwise a round feeds masks alone. Masks are a part of the
    proposal, whose end is always rejected; a length rule that cuts it costs drafts, but no
    losslessness. Above temperature 0 drafts are drawn, so that rejection keeps the target's
    distribution (released: the most probable tokens with p/q, which has another one).
    """

    tokens: Positive
    """Draft tokens of a round; the published N less one."""

    @property
    def longest(self) -> int:
        return 2 * self.tokens

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        masks_D = context.tokens_L.new_full((self.tokens,), context.target.special.mask)
        ahead_DV = context.ahead_DV
        if ahead_DV is None or len(ahead_DV) != self.tokens:
            return Proposal(masks_D)
        drafts_D, laws_DV = sampler.sample(ahead_DV)
        if laws_DV is not None:
            laws_DV = torch.cat([laws_DV, one_hot(masks_D, laws_DV.shape[1])])
        return Proposal(torch.cat([drafts_D, masks_D]), laws_DV)


# --- Nemotron-Labs-Diffusion ----------------------------------------------------------------------


@register("draft.bidirectional")
@dataclass(frozen=True)
class BidirectionalDraft(Draft):
    """Tokens of a block of masks after the anchor, by the target itself with full attention in it.

    The block reads the target's own causal K/V and leaves none. The slots of a model trained for
    both modes predict their own positions, although its autoregressive rows predict the next ones.
    """

    tokens: Positive
    """Draft tokens; the published block has one more, the anchor."""
    shifted: bool = False
    """Whether a row of the block predicts the position after its own, too (Dream's form)."""

    @property
    def longest(self) -> int:
        return self.tokens

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        model, kv, anchor = context.target, context.target_kv, context.anchor
        assert kv is not None
        masks_D = context.tokens_L.new_full((self.tokens,), model.special.mask)
        canvas_1L = torch.cat([context.tokens_L, masks_D])[None]
        # The row that predicts p in autoregression is that of the slot at p - 1.
        first = anchor + (1 if self.shifted else 2)
        feed, rows = (anchor, anchor + 1 + self.tokens), (first, first + self.tokens)
        plan = ForwardPlan(ForwardKind.SELF_DRAFT, feed, rows, store=(anchor, anchor))
        logits_1DV = model.forward(canvas_1L, plan, kv)
        drafts_D, laws_DV = sampler.sample(logits_1DV[0])
        return Proposal(drafts_D, laws_DV, calls=1, kind=plan.kind, fed=plan.fed, cached=anchor)
