"""Drafts of the model's own next steps (FreeDave, arXiv 2510.00294; cychomatica/FreeDave@8b48121).

A forward proposes a token for every mask, and the selector commits some of them; the result is the
next state, the base. Draft j also holds the j next most confident of the other tokens, as a guess
of the state j steps later. All branches share a forward. The target of a branch is the branch after
the commit that the selector would make. Starting from the base, the walk goes to the deepest draft
whose tokens all agree with the target of the current branch, as long as there is one. The last
branch reached continues, with its selector's commit. A round costs one forward, like a step without
drafts. It is lossless (same tokens as the decoder with `Greedy`, in no more forwards) if the
selector commits one token per forward, and scores and cache depend only on the tokens of the open
block: no memory of earlier forwards, no renewal within the block, no random numbers, no revision.
The drafts are then the greedy verification tree of SSD (arXiv 2510.04147) with draft_steps nodes.
With a threshold (FreeDave++) it is not lossless: a draft may contain only a part of a step's
commits, and the rest is decided again. The released eager mode (`eager_acceptance_mode`), which
drafts into the next block and is not lossless, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Explore, Scores
from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import Condition, Conditions, MostBranches
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.transfer import constant
from dllm_bench.methods.common import confidence_order, first_of
from dllm_bench.registry import register

DRAFT = MemoKey[Tensor]("self_draft.draft")
"""Canvas positions of the draft tokens, and the tokens, -1 where no mask was left, (K, 2, D)."""


@register("explore.self_draft")
@dataclass(frozen=True)
class SelfDraft(Explore):
    """Makes drafts in addition to the base and continues with the deepest confirmed one."""

    draft_steps: Positive  # branches of a forward, including the base; 1: no drafts

    @property
    def gives(self) -> Conditions:
        """The base and its drafts."""
        return frozenset({Condition.DRAFTS, MostBranches(self.draft_steps)})

    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        if last is None or self.draft_steps == 1:
            return state
        scores, window = last
        window = replace(window, eligible_KW=window.eligible_KW & window.of(state.masked_KL))
        drafts = min(self.draft_steps - 1, window.width)
        order_1W = confidence_order(scores, window)
        branches = state.fork(drafts + 1)
        depth_K = constant((*range(1, drafts + 1), 0), order_1W.device)  # 0: the base
        where_KW = first_of(order_1W.expand(drafts + 1, -1), depth_K, window)
        branches.fill(where_KW, scores.ids_KW, window.start)
        place_1D = order_1W[:, :drafts]
        nothing = constant(-1, order_1W.device)
        ids_1D = torch.where(window.eligible_KW, scores.ids_KW, nothing).gather(1, place_1D)
        draft_12D = torch.stack([place_1D + window.start, ids_1D], 1)
        branches.memo[DRAFT] = draft_12D.expand(drafts + 1, -1, -1)
        return branches

    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        """Return the number of draft tokens, from the first on, that agree with a branch's target,
        (K,)."""
        place_KD, ids_KD = branches.memo.pop(DRAFT).unbind(1)
        agrees_KD = branches.tokens_KL.gather(1, place_KD) == ids_KD
        return agrees_KD.cumprod(1).sum(1)

    def pick(self, rating_K: Tensor) -> Tensor:
        """Return the branch that the walk from the base reaches; draft j is branch j - 1, the base
        is the last one."""
        next_K = (rating_K - 1) % len(rating_K)
        for _ in range((len(rating_K) - 2).bit_length()):  # each pass doubles the number of steps
            next_K = next_K.index_select(0, next_K)
        return next_K[-1]
