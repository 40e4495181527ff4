"""What the selectors with a step count share: where a block's decoding stands, and the surest n.

`step_in_block` counts the forwards of the open block in the memo, so it follows its branch and
needs one open block at a time; all selectors of a decoder read the same count. `most_confident`
picks a count of positions that may differ by branch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import stable_top

COUNTS_STEPS = frozenset({("schedule", "one open block at a time")})
MEMO = "steps.block_total_entered"


def step_in_block(state: DecodeState, window: Window) -> tuple[Tensor, Tensor]:
    """Forwards made in the open block before this one, and its masks at entry, each (K,)."""
    block_K = open_block(window)
    fresh_K3 = torch.stack(
        [block_K, window.eligible_KW.sum(1), torch.full_like(block_K, state.forwards)], 1
    )
    known_K3 = state.memo.get(MEMO, fresh_K3)
    is_known_K = known_K3[:, 0] == block_K
    state.memo[MEMO] = torch.where(is_known_K[:, None], known_K3, fresh_K3)
    _, total_K, entered_K = state.memo[MEMO].unbind(1)
    return state.forwards - entered_K, total_K


def open_block(window: Window) -> Tensor:
    """Number of the block that has the first eligible position, (K,).

    With lookahead the window begins with a block that a branch may have finished.
    """
    eligible_KW, before = window.eligible_KW, window.start - window.origin
    if window.width <= window.block:
        number = before // window.block
        return eligible_KW.new_full(eligible_KW.shape[:1], number, dtype=torch.long)
    return (eligible_KW.int().argmax(1) + before) // window.block


def most_confident(scores: Scores, window: Window, count_K: Tensor | None = None) -> Tensor:
    """The `count` eligible positions of largest confidence (None: one), ties to the lower position,
    (K, W).
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
