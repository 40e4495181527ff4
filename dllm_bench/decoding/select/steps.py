"""Step counts of selectors that decode a block in a fixed number of steps.

`step_in_block` counts the forwards of the open block in the memo, so the count follows its branch.
It needs one open block at a time; all selectors of a decoder share the count. `most_confident`
chooses a number of positions that may differ by branch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.numerics import stable_top

Ties = Literal["lower", "canvas", "block"]
"""Which of equal positions count: the lower ones, or those that `torch.topk` takes of the canvas
(LLaDA, Dream) or of the open block (PC-Sampler)."""
COUNTS_STEPS = frozenset(
    {Need("schedule", Condition.ONE_OPEN_BLOCK), Need("schedule", Condition.EQUAL_BLOCKS)}
)
ENTRY = MemoKey[Tensor]("steps.entry")  # (K, 3): open block, its masks when entered, forward then


def ties_needs(ties: Ties) -> frozenset[Need]:
    """Return what `ties` needs: one branch, where the host asks for the number of positions."""
    return frozenset({Need("explore", Condition.ONE_BRANCH)} if ties != "lower" else ())


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


def count_in_block(
    key: MemoKey[Tensor], counts_K: Tensor, window: Window, state: DecodeState
) -> Tensor:
    """Forwards of the open block for which `counts_K` (bool) was true, this one included, (K,).

    `key` holds the open block and its count, (K, 2).
    """
    block_K, count_K, known_K2 = open_block(window), counts_K.long(), state.memo.get(key)
    if known_K2 is not None:
        count_K = count_K + known_K2[:, 1] * (known_K2[:, 0] == block_K)
    state.memo[key] = torch.stack([block_K, count_K], 1)
    return count_K


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
    if count_K is None:
        best_K1 = confidence_order(scores, window, 1)
        return torch.zeros_like(eligible_KW).scatter_(1, best_K1, True) & eligible_KW
    return first_of(confidence_order(scores, window), count_K, window)


def most_confident_by(
    ties: Ties, scores: Scores, window: Window, count_K: Tensor | None, length: int
) -> Tensor:
    """Return the `count` most confident eligible positions (None: one), ties by `ties`, (K, W).

    length: positions of the canvas. With `torch.topk` there is one branch, and the host waits for
    the count.
    """
    if ties == "lower":
        return most_confident(scores, window, count_K)
    count = 1 if count_K is None else int(count_K)
    taken_1W = taken_by_topk(scores, window, count, length if ties == "canvas" else None)
    return taken_1W & window.eligible_KW


def taken_by_topk(scores: Scores, window: Window, count: int, length: int | None) -> Tensor:
    """Return what `torch.topk` takes of the window or of a canvas of `length` positions, (1, W).

    Positions that are not eligible are at -inf. Which of equal ones it takes depends on all values
    and on `count`.
    """
    values_1X = scores.confidence_KW.masked_fill(~window.eligible_KW, -torch.inf)
    around = (0, 0) if length is None else (window.start, length - window.stop)
    values_1X = torch.nn.functional.pad(values_1X, around, value=-torch.inf)
    best_1C = values_1X.topk(min(count, values_1X.shape[1])).indices
    taken_1X = torch.zeros_like(values_1X, dtype=torch.bool).scatter_(1, best_1C, True)
    return taken_1X[:, around[0] :][:, : window.width]


def confidence_order(scores: Scores, window: Window, n: int | None = None) -> Tensor:
    """Positions from the most to the least confident, the first `n` or all of them, (K, n).

    Of equal ones the lower position comes first; those that are not eligible come last.
    """
    confidence_KW = scores.confidence_KW.masked_fill(~window.eligible_KW, -torch.inf)
    return stable_top(confidence_KW, n or window.width)


def first_of(order_KW: Tensor, count_K: Tensor, window: Window) -> Tensor:
    """The eligible ones among the first `count` positions of an order, bool (K, W)."""
    chosen_KW = torch.arange(order_KW.shape[1], device=count_K.device) < count_K[:, None]
    return torch.zeros_like(chosen_KW).scatter_(1, order_KW, chosen_KW) & window.eligible_KW
