"""DMax (arXiv 2604.08302): tokens are fed as mean embeddings and revised until the block settles.

Released code: czg1225/DMax@82bc29e, dInfer/python/dinfer/decoding/generate_uniform.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_bench.core.blocks import HELD, Window
from dllm_bench.core.contracts import HOLD, Round, Scores, Select
from dllm_bench.core.declared import Positive, Probability
from dllm_bench.core.decoder import ONE_BRANCH, Condition
from dllm_bench.core.state import MASKED, DecodeState, MemoKey
from dllm_bench.decoding.switches import with_added
from dllm_bench.methods.caches import step_of_block
from dllm_bench.methods.revising import (
    REVISES_BLOCK,
    Budgeted,
    Revision,
    committed_before,
    hold,
    overwriting,
)
from dllm_bench.registry import register

ADDED = MemoKey[Tensor]("soft.added")  # added to embeddings of the window, (K, W, H)
START = MemoKey[int]("soft.start")  # start of that window
TINY = 1e-6  # added to a length before dividing by it, as released


@register("select.leftmost")
@dataclass(frozen=True)
class Leftmost(Select):
    """Commits a block's masks from left to right, up to the first one below the threshold.

    The first mask of a block is always committed, so no mask is left before a committed token.
    """

    tau: Probability  # probability
    gives = frozenset({Condition.NEVER_STALLS})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        masked_KNP = window.blocks(window.eligible_KW)
        doubtful_KNP = masked_KNP & (window.blocks(scores.probability_KW) < self.tau)
        run_KNP = doubtful_KNP.cumsum(2) == 0
        first_KNP = masked_KNP.cumsum(2) == 1
        return window.flat((run_KNP | first_KNP) & masked_KNP)


@register("revise.soft")
@dataclass(frozen=True, kw_only=True)
class SoftRevision(Budgeted):
    """Overwrites tokens in every forward and feeds them as mean embeddings until the block settles.

    Every earlier committed token of the open block is replaced by the candidate of its row. At
    committed positions of the block the next forward is fed a mean embedding: that of the row's
    `likeliest` tokens, weighted by their probabilities, and of the mask token, weighted by the
    remaining probability, scaled to the mean of their lengths. A block without masks is closed once
    the candidate of each row has at least probability `sure`, once a forward has changed nothing,
    or after as many forwards as it has positions. As `released`, it is closed in the last case even
    with masks.
    """

    sure: Probability  # probability; 1: until nothing changes
    likeliest: Positive = 1  # number of tokens of a row in the mean
    released: bool = False  # whether a block may be closed with masks
    needs = REVISES_BLOCK | {ONE_BRANCH}

    def on_plan(self, round: Round) -> None:
        """Add the mean embeddings in the block of the last forward."""
        memo, window = round.state.memo, round.window
        if ADDED in memo and memo[START] == window.start:
            behind = round.state.length - window.stop
            added_KLH = pad(memo[ADDED], (0, 0, window.start, behind))
            round.plan = with_added(round.plan, added_KLH)

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        born_KW, tokens_KW = window.of(state.born_KL), window.of(state.tokens_KL)
        write_KW = committed_before(window, state) & (scores.ids_KW != tokens_KW)
        changes_K = (write_KW | (born_KW == state.forwards)).any(1)
        doubtful_K = ((born_KW >= MASKED) & (scores.probability_KW < self.sure)).any(1)
        forwards = step_of_block(state, window) + 1
        stays_K = changes_K & doubtful_K & (forwards < window.block)
        if not self.released:
            masked_KW = (born_KW == MASKED) | (write_KW & (scores.ids_KW == state.special.mask))
            stays_K = stays_K | masked_KW.any(1)
        hold(stays_K, state, left_K=~stays_K)
        return overwriting(write_KW, scores)

    def on_commit(self, round: Round) -> None:
        super().on_commit(round)
        window, state = round.window, round.state
        soft_KW = (window.of(state.born_KL) >= 0) & (state.memo[HOLD] == HELD)[:, None]
        hard_KWH = round.model.embed(window.of(state.tokens_KL)).detach()
        added_KWH = self._means(round).to(hard_KWH.dtype) - hard_KWH
        state.memo[ADDED], state.memo[START] = added_KWH * soft_KW[..., None], window.start

    def _means(self, round: Round) -> Tensor:
        """Return the mean embeddings of the window's rows, float32 (K, W, H)."""
        ids_KWC, weight_KWC = self._likeliest(round)
        left_KW1 = 1 - weight_KWC.sum(2, keepdim=True).clamp(max=1)
        ids_KWC = pad(ids_KWC, (0, 1), value=round.state.special.mask)
        weight_KWC1 = torch.cat([weight_KWC, left_KW1], 2)[..., None]
        weighted_KWCH = weight_KWC1 * round.model.embed(ids_KWC).detach().float()
        mean_KWH, length_KW1 = weighted_KWCH.sum(2), weighted_KWCH.norm(dim=3).sum(2, keepdim=True)
        return mean_KWH * length_KW1 / (mean_KWH.norm(dim=2, keepdim=True) + TINY)

    def _likeliest(self, round: Round) -> tuple[Tensor, Tensor]:
        """Return the tokens (K, W, C) of the means, and their probabilities, float32."""
        if self.likeliest == 1:
            return round.scores.ids_KW[..., None], round.scores.probability_KW.float()[..., None]
        laws_KWV = round.rows_KRV[:, : round.window.width].float().softmax(2)
        weight_KWC, ids_KWC = laws_KWV.topk(self.likeliest)
        return ids_KWC, weight_KWC
