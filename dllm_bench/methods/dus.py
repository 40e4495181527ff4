"""Dilated unmasking schedule (DUS, arXiv 2506.19037): positions by a fixed pattern, no scores.

A block is committed in levels, one per forward; the positions of a level are far from each other.
"dilated": multiples of a stride that is divided by `base` from level to level; "binary": midpoints
of halves, of quarters, and so on. A last level that is smaller than the previous one is merged into
it. With `least`, the released code immediately masks candidates below that probability again (in
all levels but the last) and never returns to them; here they are committed after the last level, in
one forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.declared import Positive
from dllm_bench.core.state import DecodeState
from dllm_bench.core.transfer import constant, to_device
from dllm_bench.methods.common import COUNTS_STEPS, step_in_block
from dllm_bench.registry import register

Kind = Literal["dilated", "binary"]


@register("select.dilated")
@dataclass(frozen=True)
class Dilated(Select):
    """Commits the positions of one level after the other."""

    kind: Kind = "dilated"
    base: Positive = 2  # divisor of the stride; 1: one level
    skip: Positive = 1  # the first stride is the block's length divided by base ** skip
    least: float | None = None  # a candidate below this probability waits; None: none does
    block: Positive | None = None  # length of the repeated pattern; None: the open block
    needs = COUNTS_STEPS

    @property
    def idle(self) -> bool:
        """Whether a forward may commit nothing, because it masks its whole level again."""
        return self.least is not None

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step_K, _ = step_in_block(state, window)
        size = self.block or window.block
        place_W = constant(range(window.width), step_K.device) % window.block
        level_P, levels = pattern(size, self.kind, self.base, self.skip, step_K.device)
        own_W = level_P[place_W % size]
        due_KW = place_W // size * levels + own_W == step_K[:, None]
        if self.least is not None:
            due_KW = due_KW & ((scores.probability_KW >= self.least) | (own_W == levels - 1))
        return due_KW | (step_K >= -(-window.block // size) * levels)[:, None]

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = super().on_stall(scores, window, state)
        return torch.zeros_like(where_KW) if self.idle else where_KW, ids_KW


@cache
def pattern(
    size: int, kind: Kind, base: int, skip: int, device: torch.device
) -> tuple[Tensor, int]:
    """Return the level of each position of a block, int64 (P,), and the number of levels."""
    levels = midpoints(size) if kind == "binary" else multiples(size, base, skip)
    if len(levels) > 1 and len(levels[-1]) < len(levels[-2]):
        levels[-2:] = [levels[-2] + levels[-1]]
    level_P = torch.zeros(size, dtype=torch.long)
    for number, places in enumerate(levels):
        level_P[places] = number
    return to_device(level_P, device), len(levels)


def multiples(size: int, base: int, skip: int) -> list[list[int]]:
    """Yield multiples of shorter and shorter strides, each position once."""
    levels, left, stride = [], list(range(size)), size // base**skip
    while stride >= 1 and base > 1 and left:
        levels.append([place for place in left if place % stride == 0])
        left = [place for place in left if place % stride]
        stride //= base
    return [level for level in [*levels, left] if level]


def midpoints(size: int) -> list[list[int]]:
    """Return the middle of the block, of its halves, of their halves, and so on."""
    levels, spans = [], [(0, size)]
    while spans:
        levels.append([(first + last - 1) // 2 for first, last in spans])
        halves = zip(spans, levels[-1], strict=True)
        cut = [part for (a, b), mid in halves for part in ((a, mid), (mid + 1, b))]
        spans = [(first, last) for first, last in cut if first < last]
    return levels
