"""ReMDM on LLaDA (arXiv 2503.00307, guanghanwang/ReMDM-LLaDA): re-mask the least confident tokens.

A block takes 2 S forwards. From the one on at which 7/8 of the block are committed at one token a
forward, S times, the `number` positions of the block with the smallest confidence are masked again
before the forward, which commits as many (selector `best` with `refills`). A token's confidence is
the probability with which it was committed; it is not looked at again. Masks that are left after
2 S forwards stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.revise.budgets import (
    REVISES_BLOCK,
    Budgeted,
    Revision,
    largest,
    masking,
    stay,
)
from dllm_bench.decoding.select.steps import step_in_block
from dllm_bench.registry import register

CONFIDENCE = MemoKey[Tensor]("remdm.confidence")  # (K, L) with which a token was committed


@register("revise.remdm")
@dataclass(frozen=True, kw_only=True)
class ReMDM(Budgeted):
    """Masks the tokens with the smallest recorded confidence again, in a stretch of forwards."""

    number: int = 1  # positions masked again at a time
    steps: int | None = None  # S; None: as many as the block has positions
    start: float = 0.875  # share of the block's positions: the forward at which it begins
    needs: ClassVar[frozenset[Need]] = REVISES_BLOCK | {Need("explore", Condition.ONE_BRANCH)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.number < 1 or (self.steps or 1) < 1 or not 0 < self.start <= 1:
            raise DllmBenchError(
                f"ReMDM has number {self.number}, steps {self.steps}, start {self.start}; give 1 "
                "or more positions and steps, and a share above 0 and up to 1."
            )

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        step_K, _ = step_in_block(state, window)
        steps, first = self.steps or window.width, int(window.width * self.start)
        confidence_KW = self._recorded(scores, window, state)
        due_K = (step_K + 1 >= first) & (step_K + 1 < first + steps)
        committed_KW = window.of(state.born_KL) >= 0
        remask_KW = largest(-confidence_KW, committed_KW, due_K * self.number)
        over_K = step_K + 1 >= 2 * steps
        stay(~over_K, over_K, state)
        return masking(remask_KW, scores)

    def _recorded(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """The probability with which each token of the window was committed, (K, W)."""
        known_KL = state.memo.get(CONFIDENCE)
        if known_KL is None:
            known_KL = torch.zeros_like(state.tokens_KL, dtype=scores.probability_KW.dtype)
        fresh_KW = window.of(state.born_KL) == state.forwards
        now_KW = torch.where(fresh_KW, scores.probability_KW, window.of(known_KL))
        known_KL = known_KL.clone()
        known_KL[:, window.start : window.stop] = now_KW
        state.memo[CONFIDENCE] = known_KL
        return now_KW
