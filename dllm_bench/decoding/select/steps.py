"""Step counts of selectors that decode a block in a fixed number of steps.

`step_in_block` counts the forwards of the open block in the memo, so the count follows its branch.
It needs one open block at a time; all selectors of a decoder share the count. `most_confident`
chooses a number of positions that may differ by branch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.numerics import stable_top

COUNTS_STEPS = frozenset({Need("schedule", Condition.ONE_OPEN_BLOCK)})
ENTRY = MemoKey[Tensor]("steps.entry")  # (K, 3): open block, its masks when entered, forward then


def step_in_block(state: DecodeState, window: Window) -> tuple[Tensor, Tensor]:
    """Forwards made in the open block before this one, and its masks at first, each (K,)."""
    block_K = open_block(window)
    fresh_K3 = torch.stack(
        [block_K, window.eligible_KW.sum(1), torch.full_like(block_K, state.forwards)], 1
    )
    known_K3 = state.memo.get(ENTRY)
    known_K3 = fresh_K3 if known_K3 is None else known_K3
    is_known_K = known_K3[:, 0] == block_K
    state.memo[ENTRY] = torch.where(is_known_K[:, None], known_K3, fresh_K3)
    _, total_K, entered_K = state.memo[ENTRY].unbind(1)
    return state.forwards - entered_K, total_K


def open_block(window: Window) -> Tensor:
    """Index of the block with the first eligible position, (K,).

    With lookahead the window may begin with a block that a branch has finished.
    """
    eligible_KW, before = window.eligible_KW, window.start - window.origin
    if window.width <= window.block:
        number = before // window.block
        return eligible_KW.new_full(eligible_KW.shape[:1], number, dtype=torch.long)
    return (eligible_KW.int().argmax(1) + before) // window.block


def most_confident(scores: Scores, window: Window, count_K: Tensor | None = None) -> Tensor:
    """The `count` most confident eligible positions (None: one), bool (K, W).

    Of equal ones the lower position counts.
    """
    eligible_KW = window.eligible_KW
    if count_K is None and window.width == 1:
        return eligible_KW
    confidence_KW = scores.confidence_KW.masked_fill(~eligible_KW, -torch.inf)
    if count_K is None:
        best_K1 = stable_top(confidence_KW, 1)
        return torch.zeros_like(eligible_KW).scatter_(1, best_K1, True) & eligible_KW
    order_KW = stable_top(confidence_KW, window.width)
    chosen_KW = torch.arange(eligible_KW.shape[1], device=count_K.device) < count_K[:, None]
    return torch.zeros_like(eligible_KW).scatter_(1, order_KW, chosen_KW) & eligible_KW
