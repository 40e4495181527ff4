"""ReMDM's loop (arXiv 2503.00307, as in NEUIR/PC-Sampler): decode, re-mask and refill, decode.

A share `start` of the block is decoded as the selector says. Then, `loops` times, one forward only
masks the `number` positions again whose tokens are least probable now, and the next one commits.
Then the rest is decoded. What is masked again competes with all other masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import Precision
from dllm_bench.decoding.revise.budgets import (
    REVISES_BLOCK,
    STANDING,
    ReadsStanding,
    Revision,
    hold_while,
    largest,
    masking,
)
from dllm_bench.decoding.select.steps import step_in_block
from dllm_bench.registry import register


@register("revise.remdm_loop")
@dataclass(frozen=True, kw_only=True)
class ReMDMLoop(ReadsStanding):
    """Masks the now least probable tokens again, in every second forward of a stretch."""

    number: int = 1  # positions committed in a forward, and masked again in one of the loop
    loops: int = 32  # how often
    start: float = 0.875  # share of the block that is decoded before
    precision: Precision = "model"  # of the standing token's probability
    needs: ClassVar[frozenset[Need]] = REVISES_BLOCK | {Need("explore", Condition.ONE_BRANCH)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.number < 1 or self.loops < 0 or not 0 < self.start <= 1:
            raise DllmBenchError(
                f"ReMDMLoop has number {self.number}, loops {self.loops}, start {self.start}; give "
                "1 or more positions, 0 or more loops, and a share above 0 and up to 1."
            )

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        step_K, masks_K = step_in_block(state, window)
        before_K = (masks_K.double() * self.start).long() // self.number
        round_K = step_K - before_K
        looping_K = (round_K >= 0) & (round_K < 2 * self.loops)
        remasks_K = looping_K & (round_K % 2 == 0)
        fresh_KW = window.of(state.born_KL) == state.forwards
        committed_KW = self.revisable(window, state)
        least_KW = largest(-state.memo[STANDING], committed_KW, remasks_K * self.number)
        hold_while(round_K + 1 < 2 * self.loops, state)
        remask_KW = least_KW | (fresh_KW & remasks_K[:, None])
        return masking(remask_KW, scores)
