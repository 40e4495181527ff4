"""ReMDM (arXiv 2503.00307): re-mask the least confident tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.declared import Count, Positive, PositiveProportion
from dllm_bench.core.decoder import ONE_BRANCH
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.numerics import Precision
from dllm_bench.methods.common import step_in_block
from dllm_bench.methods.revising import (
    REVISES_BLOCK,
    STANDING,
    Budgeted,
    ReadsStanding,
    Revision,
    hold,
    largest,
    masking,
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
        step_K, _ = step_in_block(state, window)
        steps, first = self.steps or window.width, int(window.width * self.start)
        confidence_KW = self._recorded(scores, window, state)
        due_K = (step_K + 1 >= first) & (step_K + 1 < first + steps)
        committed_KW = window.of(state.born_KL) >= 0
        remask_KW = largest(-confidence_KW, committed_KW, due_K * self.number)
        over_K = step_K + 1 >= 2 * steps
        hold(~over_K, state, left_K=over_K)
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
        step_K, masks_K = step_in_block(state, window)
        before_K = (masks_K.double() * self.start).long() // self.number
        round_K = step_K - before_K
        looping_K = (round_K >= 0) & (round_K < 2 * self.loops)
        remasks_K = looping_K & (round_K % 2 == 0)
        fresh_KW = window.of(state.born_KL) == state.forwards
        committed_KW = self.revisable(window, state)
        least_KW = largest(-state.memo[STANDING], committed_KW, remasks_K * self.number)
        hold(round_K + 1 < 2 * self.loops, state)
        remask_KW = least_KW | (fresh_KW & remasks_K[:, None])
        return masking(remask_KW, state)
