"""From what a round tells the host to the window of the next one.

The device counts the masks left in the blocks of the last window, branch by branch; a schedule says
on the host which blocks are open, and the window spans from the base's first unfinished block to
the last one open in any branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockProgress, Window
from dllm_bench.core.contracts import Schedule
from dllm_bench.core.errors import DllmBenchError


def check_divides(block: int, new: int) -> None:
    """Prompt-relative blocks fill the generation without rest."""
    if new % block:
        raise DllmBenchError(
            f"A block of {block} does not divide the generation length {new}; "
            f"set max_new_tokens to a multiple of {block}."
        )


def masks_per_block(masked_KL: Tensor, window: Window | None) -> Tensor:
    """Masks left in the blocks of a window, int64 (K, N); nothing without one."""
    if window is None:
        return masked_KL.new_empty(0, dtype=torch.long)
    return window.blocks(window.of(masked_KL)).sum(-1)


@dataclass
class WindowTracker:
    """Where the blocks of one request stand; `opened`: leading blocks that the winner had open."""

    schedule: Schedule
    prompt_len: int
    window: Window | None = None
    opened: Sequence[int] = field(default=(0,))

    def progress(
        self, length: int, winner: int, masks: Sequence[int], closed: Sequence[int]
    ) -> list[BlockProgress]:
        """Every branch of the round that begins; `masks` are `masks_per_block`, laid flat."""
        grid = self.schedule.grid(self.prompt_len, length)
        first = 0 if self.window is None else (self.window.start - grid.origin) // grid.block
        blocks, opened = len(masks) // len(closed), self.opened[winner]
        return [
            BlockProgress(
                grid, first, masks[k * blocks : (k + 1) * blocks], opened, bool(is_closed)
            )
            for k, is_closed in enumerate(closed)
        ]

    def move(
        self, branches: Sequence[BlockProgress], opened: Sequence[int], masked_KL: Tensor
    ) -> Window:
        """The window of the branches that go on, with `opened` leading blocks open."""
        grid = branches[-1].grid
        ends = [grid.start(n) for n in opened]
        start, stop = grid.start(branches[-1].done), max(ends)
        eligible_KW, end_K = masked_KL[:, start:stop], None
        if min(ends) < stop:
            end_K = torch.tensor(ends, device=masked_KL.device)
            position_W = torch.arange(start, stop, device=masked_KL.device)
            eligible_KW = eligible_KW & (position_W < end_K[:, None])
        self.opened = opened
        self.window = Window(
            start=start,
            stop=stop,
            visible=grid.length if self.schedule.sees_future else stop,
            retired=start,
            block=grid.block,
            origin=grid.origin,
            eligible_KW=eligible_KW,
            must_KN=self._must(branches, max(opened), masked_KL.device),
            visible_K=None if self.schedule.sees_future else end_K,
            masks=sum(map(BlockProgress.open_masks, branches, opened)),
        )
        return self.window

    def _must(
        self, branches: Sequence[BlockProgress], opened: int, device: torch.device
    ) -> Tensor | None:
        """Blocks of the window that have to make progress, (K, N); None: all."""
        window_blocks = range(branches[-1].done, opened)
        rows = [[self.schedule.pushes(branch, n) for n in window_blocks] for branch in branches]
        return None if all(map(all, rows)) else torch.tensor(rows, device=device)
