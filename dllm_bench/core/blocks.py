"""Where the blocks of a canvas lie, and how far a branch is with them, as the host knows it.

Blocks are counted from an origin: the prompt's end (LLaDA, D2F) or the canvas's beginning (block
diffusion, dInfer), where the first one to decode may overlap the prompt. A round tells the host how
many masks are left in the blocks of its window; all else follows, because blocks before the window
are finished and those behind it are untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of `block` positions from `origin` to `length`, where the last one may be cut short;
    positions before `prompt_len` are prompt.
    """

    origin: int
    block: int
    prompt_len: int
    length: int

    @property
    def blocks(self) -> int:
        """N."""
        return -(-(self.length - self.origin) // self.block)

    def start(self, n: int) -> int:
        """Absolute position at which block `n` begins, and block n - 1 ends."""
        return min(self.origin + n * self.block, self.length)

    def room(self, n: int) -> int:
        """Positions of block `n` that are not prompt."""
        return max(self.start(n + 1) - max(self.start(n), self.prompt_len), 0)


@dataclass(frozen=True)
class BlockProgress:
    """One branch at the beginning of a round.

    masks: left in the blocks from `first` on that the last round's window held; opened: leading
    blocks that were open then; closed: nothing more may be opened.
    """

    grid: BlockGrid
    first: int = 0
    masks: Sequence[int] = ()
    opened: int = 0
    closed: bool = False

    def left(self, n: int) -> int:
        """Masks of block `n`."""
        if n < self.first:
            return 0
        seen = n - self.first
        return self.masks[seen] if seen < len(self.masks) else self.grid.room(n)

    def begun(self, n: int) -> bool:
        """Whether a position of block `n` was decoded by this request."""
        return self.left(n) < self.grid.room(n)

    @cached_property
    def done(self) -> int:
        """Leading blocks without a mask."""
        blocks = self.grid.blocks
        n = min(self.first, blocks)
        while n < blocks and self.left(n) == 0:
            n += 1
        return n

    def open_masks(self, opened: int) -> int:
        """Masks in the first `opened` blocks."""
        return sum(self.left(n) for n in range(self.done, opened))


@dataclass(frozen=True)
class Window:
    """The part of the canvas that is being decoded, the same span for all K branches.

    [start, stop) begins with a block, the last block may be cut short; [0, retired) is final in
    every branch; the model sees [0, visible) of the longest branch and [0, visible_K[k]) of branch
    k. Blocks are counted from `origin`, what lies before it is one block. eligible_KW: still masked
    and open for decoding; must_KN: blocks that have to make progress while they have a mask (None:
    all); masks: how many positions are eligible in all branches, where the host knows; rows_M: the
    places in (K, W), laid flat, whose logits a score is given as (1, M, V); None: all.
    """

    start: int
    stop: int
    visible: int
    retired: int
    block: int
    origin: int
    eligible_KW: Tensor
    must_KN: Tensor | None = None
    visible_K: Tensor | None = None
    masks: int | None = None
    rows_M: Tensor | None = None

    def take(self, index: Tensor) -> Window:
        """The window of the branches `index` (int64), in that order."""
        visible_K, must_KN = self.visible_K, self.must_KN
        return replace(
            self,
            eligible_KW=self.eligible_KW.index_select(0, index),
            must_KN=None if must_KN is None else must_KN.index_select(0, index),
            visible_K=None if visible_K is None else visible_K.index_select(0, index),
            masks=None,
        )

    def pick(self, j: Tensor) -> Window:
        """The window of branch `j` alone."""
        return replace(self, visible_K=None).take(j.reshape(1))

    @property
    def width(self) -> int:
        """W."""
        return self.stop - self.start

    def blocks(self, values_KW: Tensor, fill: float = 0.0) -> Tensor:
        """(K, W) -> (K, N, B); places beyond the end of a short last block hold `fill`."""
        short = -self.width % self.block
        if short:
            values_KW = torch.nn.functional.pad(values_KW, (0, short), value=fill)
        return values_KW.reshape(values_KW.shape[0], -1, self.block)

    def flat(self, values_KNB: Tensor) -> Tensor:
        """(K, N, B) -> (K, W), the inverse of `blocks`."""
        values_KX = values_KNB.reshape(values_KNB.shape[0], -1)
        return values_KX[:, : self.width] if values_KX.shape[1] > self.width else values_KX

    def rescued(self, where_KW: Tensor, rescue_KW: Tensor) -> Tensor:
        """(K, W) what of `rescue` lies in blocks that must progress and have nothing in `where`."""
        stalled_KN1 = ~self.blocks(where_KW).any(-1, keepdim=True)
        if self.must_KN is not None:
            stalled_KN1 &= self.must_KN[..., None]
        return self.flat(self.blocks(rescue_KW) & stalled_KN1)

    def of(self, canvas_KL: Tensor) -> Tensor:
        """The window's columns of a canvas-wide tensor."""
        return canvas_KL[:, self.start : self.stop]
