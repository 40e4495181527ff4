"""ReMDM (arXiv 2503.00307): re-mask the least confident tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import HELD, LEFT, Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.declared import Count, Positive, PositiveProportion
from dllm_bench.core.decoder import ONE_BRANCH
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.numerics import Precision
from dllm_bench.methods.caches import step_of_block
from dllm_bench.methods.revising import (
    REVISES_BLOCK,
    STANDING,
    Budgeted,
    ReadsStanding,
    Revision,
    hold_only_branch,
    largest,
    masking,
    step_and_masks,
)
from dllm_bench.registry import register

CONFIDENCE = MemoKey[Tensor]("remdm.confidence")  # (K, L) probability at commit


@register("revise.remdm")
@dataclass(frozen=True, kw_only=True)
class ReMDM(Budgeted):
    """ReMDM on LLaDA (arXiv 2503.00307, guanghanwang/ReMDM-LLaDA): re-masks the least confident.

    A block takes 2 S forwards. The phase begins when 7/8 of the block are committed, at one token
    per forward, and lasts S forwards. Before each of them, the `number` positions of the block with
    the smallest confidence are masked again; the forward commits as many (selector `best` with
    `refills`). A token's confidence is its probability when it was committed; it is not updated.
    Masks that remain after 2 S forwards stay.
    """

    number: Positive = 1  # positions masked again at a time
    steps: Positive | None = None  # S; None: as many as the block has positions
    start: PositiveProportion = 0.875  # share of the block that is committed before the phase
    needs = REVISES_BLOCK | {ONE_BRANCH}

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        step = step_of_block(state, window) + 1
        steps, first = self.steps or window.width, int(window.width * self.start)
        confidence_KW = self._recorded(scores, window, state)
        number = self.number if first <= step < first + steps else 0
        committed_KW = window.of(state.born_KL) >= 0
        remask_KW = largest(-confidence_KW, committed_KW, number)
        hold_only_branch(HELD if step < 2 * steps else LEFT, state)
        return masking(remask_KW, state)

    def _recorded(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """Return the probability with which each token of the window was committed, (K, W)."""
        known_KL = state.recall(CONFIDENCE, scores.probability_KW.dtype)
        fresh_KW = window.of(state.born_KL) == state.forwards
        now_KW = torch.where(fresh_KW, scores.probability_KW, window.of(known_KL))
        state.memo[CONFIDENCE] = window.put(known_KL, now_KW)
        return now_KW


@register("revise.remdm_loop")
@dataclass(frozen=True, kw_only=True)
class ReMDMLoop(ReadsStanding):
    """ReMDM's loop (arXiv 2503.00307, as in NEUIR/PC-Sampler): decode, re-mask and refill, decode.

    First, a share `start` of the block is decoded by the selector. Then, `loops` times, one forward
    masks the `number` positions with the currently least probable tokens again and commits nothing;
    the next forward commits. Finally, the rest is decoded. Positions masked again compete with all
    other masks.
    """

    number: Positive = 1  # positions committed, and masked again, in a forward
    loops: Count = 32  # number of repetitions
    start: PositiveProportion = 0.875  # share of the block that is decoded before the loop
    precision: Precision = "model"  # precision of the committed token's probability
    needs = REVISES_BLOCK | {ONE_BRANCH}

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        step, masks = step_and_masks(window, state)
        turn = step - int(masks * self.start) // self.number
        hold_only_branch(HELD if turn + 1 < 2 * self.loops else 0, state)
        if not 0 <= turn < 2 * self.loops or turn % 2:
            return masking(torch.zeros_like(window.eligible_KW), state)
        fresh_KW = window.of(state.born_KL) == state.forwards
        least_KW = largest(-state.memo[STANDING], self.revisable(window, state), self.number)
        return masking(least_KW | fresh_KW, state)
