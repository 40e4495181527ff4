"""RemeDi's loop (arXiv 2509.23653, maple-research-lab/RemeDi): mask all but the best K again.

Step i of a block of B positions keeps the K_i positions with the largest logits and masks the
others again. The logit is that of the committed token or, at a mask, of the candidate (selector
`threshold` with tau 0 commits them all). K rises by B // steps each step, and by one more in the
last B mod steps of them, so that the last step keeps the whole block. The released network also
outputs confidences, which its loop does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm_bench.core.blocks import HELD, Window
from dllm_bench.core.contracts import Round, Scores
from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import ONE_BRANCH
from dllm_bench.core.state import DecodeState
from dllm_bench.methods.revising import (
    REVISES_BLOCK,
    STANDING,
    Budgeted,
    Revision,
    hold_only_branch,
    largest,
    masking,
    step_and_masks,
)
from dllm_bench.registry import register


@register("revise.keep_best")
@dataclass(frozen=True, kw_only=True)
class KeepBest(Budgeted):
    """Keeps a growing number of positions: in each step those with the largest logits."""

    steps: Positive | None = None  # forwards per block; None: as many as the block has positions
    needs = REVISES_BLOCK | {ONE_BRANCH}

    def on_scores(self, round: Round) -> None:
        window, state = round.window, round.state
        ids_KW = torch.where(window.eligible_KW, round.scores.ids_KW, window.of(state.tokens_KL))
        standing_KW1 = round.rows_KRV[:, : window.width].gather(-1, ids_KW[..., None])
        state.memo[STANDING] = standing_KW1[..., 0].float()

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        before, masks = step_and_masks(window, state)
        step, steps = before + 1, self.steps or window.width
        each, rest = divmod(masks, steps)
        keep = step * each + max(step + rest - steps, 0)
        committed_KW = window.of(state.born_KL) >= 0
        remask_KW = committed_KW & ~largest(state.memo[STANDING], committed_KW, keep)
        hold_only_branch(HELD if step < steps else 0, state)
        return masking(remask_KW, state)
