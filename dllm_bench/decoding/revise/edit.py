"""Token-to-token editing (LLaDA2.1, arXiv 2602.08676): overwrite what the model now sees otherwise.

In every forward, a position of the open block that was committed before gets the candidate of its
own row if that is another token with a probability above `tau`. A block without masks stays open
until a forward over it edits nothing, or for `rounds` such forwards, as in LLaDA2.1's `generate`;
SGLang's JointThreshold makes one more forward and ignores its edits (`ignores_last`). diffusers'
block refinement leaves a block after `steps` forwards that began with masks, whatever is masked
then; selector `share` has the same number. Editing reads the score's probabilities; with
`forbid_mask` off an edit may write the mask token, which masks the position again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_probabilities
from dllm_bench.core.contracts import Scores
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.revise.budgets import Budgeted, Revision, hold_while, post_rounds, stay
from dllm_bench.decoding.select.steps import count_in_block
from dllm_bench.registry import register

BEGUN = MemoKey[Tensor]("edit.begun")  # (K, 2): open block, its forwards that began with masks


@register("revise.edit")
@dataclass(frozen=True, kw_only=True)
class Edit(Budgeted):
    """Overwrites tokens by more probable ones."""

    tau: float  # edits are made above this probability; 1: never, and no forward looks for them
    rounds: int = 16  # forwards over a block without masks whose edits are made
    ignores_last: bool = False  # whether one more forward is made, without edits
    steps: int | None = None  # forwards after which a block is left, masks or not; None: no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(self, "tau")
        if self.rounds < 0 or (self.steps is not None and self.steps < 1):
            raise DllmBenchError(
                f"Edit has rounds {self.rounds} and steps {self.steps}; give 0 or more rounds, and "
                "1 or more steps or null."
            )

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        rounds_K, full_K = post_rounds(window, state), ~window.eligible_KW.any(1)
        write_KW = (
            self.revisable(window, state)
            & (scores.ids_KW != window.of(state.tokens_KL))
            & (scores.probability_KW > self.tau)
            & (rounds_K <= self.rounds)[:, None]
        )
        moves_K = write_KW.any(1)
        if self.tau < 1 or self.steps is not None:  # else there is nothing to look for
            moves_K = moves_K | ~full_K
        holds_K = moves_K & (rounds_K < self.rounds + self.ignores_last)
        if self.steps is None:
            hold_while(holds_K, state)
        else:
            begun_K = count_in_block(BEGUN, ~full_K, window, state)
            stay(holds_K, torch.where(full_K, ~holds_K, begun_K >= self.steps), state)
        return Revision(torch.zeros_like(write_KW), write_KW, scores.ids_KW)
