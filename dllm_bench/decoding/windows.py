"""Which blocks of a request are open, and the window that follows, from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import Schedule
from dllm_bench.core.transfer import to_device


@dataclass
class WindowTracker:
    """Follows the blocks of one request from round to round."""

    schedule: Schedule
    grid: BlockGrid
    whole: bool = False  # whether windows begin with the first block
    to_end: bool = False  # whether windows end with the last block, open or not
    opened: Sequence[int] = (0,)  # how many blocks each branch of the last round had open
    first: int = 0  # block with which that window begins

    def progress(
        self,
        length: int,
        winner: int,
        masks: Sequence[int],
        closed: Sequence[int],
        stays: Sequence[int] = (),
        ends: Sequence[int] = (),
    ) -> list[BlockProgress]:
        """Every branch at the beginning of a round; `masks`: `masks_per_block` of the last window,
        flattened; `ends`: where blocks end that a piece has ended in that round."""
        self.grid = replace(self.grid, length=length, ends=(*self.grid.ends, *ends))
        blocks, opened = len(masks) // len(closed), self.opened[winner]
        return [
            BlockProgress(
                self.grid,
                self.first,
                masks[k * blocks : (k + 1) * blocks],
                opened,
                bool(flag),
                stay,
            )
            for k, (flag, stay) in enumerate(zip_longest(closed, stays, fillvalue=0))
        ]

    def move(
        self, branches: Sequence[BlockProgress], opened: Sequence[int], masked_KL: Tensor
    ) -> Window:
        """The next window: from the base's first unfinished block to the last open one of any
        branch; `opened` blocks are open in each.
        """
        grid = self.grid
        ends = [grid.start(n) for n in opened]
        first = BlockProgress(grid).finished if self.whole else branches[-1].finished
        start, stop = grid.start(first), grid.length if self.to_end else max(ends)
        blocks = grid.blocks if self.to_end else max(opened)
        eligible_KW, end_K = masked_KL[:, start:stop], None
        if min(ends) < stop:
            end_K = to_device(ends, masked_KL.device)
            position_W = torch.arange(start, stop, device=masked_KL.device)
            eligible_KW = eligible_KW & (position_W < end_K[:, None])
        self.opened, self.first = opened, first
        return Window(
            start=start,
            stop=stop,
            visible=grid.length if grid.sees_future else stop,
            retired=start,
            block=grid.block,
            origin=grid.origin,
            eligible_KW=eligible_KW,
            must_KN=self._must(branches, range(first, blocks), masked_KL.device),
            visible_K=None if grid.sees_future else end_K,
            masks=sum(map(BlockProgress.open_masks, branches, opened)),
            end_known=first < len(grid.ends),
        )

    def _must(
        self, branches: Sequence[BlockProgress], blocks: range, device: torch.device
    ) -> Tensor | None:
        """Blocks of the window that must progress, (K, N); None: all."""
        rows = [[self.schedule.must_progress(branch, n) for n in blocks] for branch in branches]
        return None if all(map(all, rows)) else to_device(rows, device)


def masks_per_block(masked_KL: Tensor, window: Window) -> Tensor:
    """Masks left in the blocks of a window, int64 (K, N)."""
    masked_KW = window.of(masked_KL)
    if window.end is not None:
        masked_KW = masked_KW & window.eligible_KW
    return window.blocks(masked_KW).sum(-1)
