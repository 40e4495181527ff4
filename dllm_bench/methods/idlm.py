"""I-DLM (arXiv 2604.11035): masks after the draft make the next draft in the verifying forward.

Written after a reading of the released code, thuEcstasy/I-DLM@3342a17 (idlm_blockN.py); there are
no recorded cases. For causal models that were trained to predict at masks as well. Left out:
skipped or partial verification, drafts among the best few tokens, an adapter for masks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm_bench.core.declared import Positive
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, one_hot
from dllm_bench.registry import register


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
