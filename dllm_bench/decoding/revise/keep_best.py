"""RemeDi's loop (arXiv 2509.23653, maple-research-lab/RemeDi): mask all but the best K again.

Step i of a block of B positions leaves the K_i positions with the largest logits of the tokens that
stand there, of the candidates where it was masked (selector `threshold` with tau 0 commits them
all). K rises by B // steps each step, and by one more in the last B mod steps of them, so
that the last step keeps the block. The released network also gives confidences, which its loop does
not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Revision, Scores
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.revise.budgets import (
    REVISES_BLOCK,
    Budgeted,
    hold_while,
    largest,
    masking,
)
from dllm_bench.decoding.select.steps import step_in_block
from dllm_bench.registry import register


@register("revise.keep_best")
@dataclass(frozen=True, kw_only=True)
class KeepBest(Budgeted):
    """Keeps a growing number of positions, each time those with the largest logits."""

    steps: int | None = None  # forwards per block; None: as many as the block has positions
    needs: ClassVar[frozenset[Need]] = REVISES_BLOCK | {Need("explore", Condition.ONE_BRANCH)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 1:
            raise DllmBenchError(f"KeepBest steps is {self.steps}; give at least 1 step per block.")

    def read(
        self, scores: Scores, logits_KWV: Tensor, branches: DecodeState, window: Window
    ) -> Scores:
        masked_KW = window.of(branches.masked_KL)
        ids_KW = torch.where(masked_KW, scores.ids_KW, window.of(branches.tokens_KL))
        standing_KW1 = logits_KWV.gather(-1, ids_KW[..., None])
        return replace(scores, standing_KW=standing_KW1[..., 0].float())

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        assert scores.standing_KW is not None
        step_K, masks_K = step_in_block(state, window)
        steps = self.steps or window.width
        more_K = (step_K + 1 - (-masks_K % steps)).clamp(min=0) * (masks_K % steps > 0)
        keep_K = (step_K + 1) * (masks_K // steps) + more_K
        committed_KW = window.of(state.born_KL) >= 0
        remask_KW = committed_KW & ~largest(scores.standing_KW, committed_KW, keep_K)
        hold_while(step_K + 1 < steps, state)
        return masking(remask_KW, scores)
