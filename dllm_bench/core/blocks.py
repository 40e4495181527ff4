"""The blocks of a canvas, the progress of each branch, and the window that is being decoded.

Blocks are counted from an origin: the end of the prompt (LLaDA, D2F) or the beginning of the canvas
(block diffusion, dInfer), where the first block that is decoded may overlap the prompt. After every
round the host receives the number of masks in each block of the window. Blocks before the window
are finished, and blocks after it are entirely masked. As exceptions, a piece may keep a block open
that has no masks, or close a block that has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dllm_bench.core.transfer import selected

HELD, LEFT = 1, -1  # a block that stays open without masks; one that is left with masks
LAST = 2  # a block that stays open, and after which none opens yet


@dataclass(frozen=True)
class BlockGrid:
    """Where the blocks of a canvas lie; the last one may be short."""

    origin: int  # position at which block 0 begins; everything before it is one block
    size: int | None  # block length; None: the whole generation is one block
    prompt_len: int
    length: int  # L
    ends: tuple[int, ...] = ()  # where the first blocks end, if a schedule chose; those after them
    # have `block` positions
    sees_future: bool = True  # whether the model sees the masks after the open blocks
    given: tuple[int, ...] = ()  # positions after the prompt whose tokens are known from the start

    @property
    def block(self) -> int:
        """P, positions of a block."""
        return self.size or max(self.length - self.prompt_len, 1)

    @property
    def blocks(self) -> int:
        """N."""
        ends = [end for end in self.ends if end < self.length]
        rest = self.length - (ends[-1] if ends else self.origin)
        return len(ends) - (-rest // self.block)

    def start(self, n: int) -> int:
        """Return the canvas position at which block `n` begins and block n - 1 ends."""
        known = min(n, len(self.ends))
        base = self.ends[known - 1] if known else self.origin
        return min(base + (n - known) * self.block, self.length)

    def new_positions(self, n: int) -> int:
        """Return the number of positions of block `n` after the prompt that are to be decoded."""
        start, stop = max(self.start(n), self.prompt_len), self.start(n + 1)
        return max(stop - start, 0) - sum(start <= place < stop for place in self.given)


@dataclass(frozen=True)
class BlockProgress:
    """Progress of one branch at the beginning of a round, as far as the host knows it."""

    grid: BlockGrid
    first: int = 0  # first block of the last round's window
    masks: Sequence[int] = ()  # remaining masks in that window's blocks
    opened: int = 0  # number of blocks open in the last round, from block 0 on
    closed: bool = False  # whether the branch may open no further block
    stays: Sequence[int] = ()  # `HELD`, `LAST`, `LEFT` or 0 of the last open blocks, as many as
    # there are, or of the text before one opens

    def masks_left(self, n: int) -> int:
        """Return the number of masks in block `n`."""
        if n < self.first:
            return 0
        index = n - self.first
        return self.masks[index] if index < len(self.masks) else self.grid.new_positions(n)

    def begun(self, n: int) -> bool:
        """Return whether any position of block `n` is committed."""
        return self.masks_left(n) < self.grid.new_positions(n)

    @cached_property
    def finished(self) -> int:
        """Number of finished blocks from block 0 on. A block without masks is finished, unless a
        reviser decides otherwise."""
        later = range(self.first, self.grid.blocks)
        return next((n for n in later if not self._is_finished(n)), self.grid.blocks)

    def _is_finished(self, n: int) -> bool:
        place = n - self.opened + len(self.stays)
        stays = self.stays[place] if 0 <= place < len(self.stays) else 0
        return stays == LEFT if stays else self.masks_left(n) == 0

    def all_finished(self, opened: int) -> bool:
        """Return whether the first `opened` blocks are finished."""
        of_text = () if self.opened else self.stays  # a cut may have taken blocks that stay
        return max(of_text, default=0) <= 0 and self.finished >= min(opened, self.grid.blocks)

    def open_masks(self, opened: int) -> int:
        """Return the number of masks in the first `opened` blocks."""
        return sum(self.masks_left(n) for n in range(self.finished, opened))


@dataclass(frozen=True)
class Window:
    """The part [start, stop) of the canvas that is being decoded, the same for all K branches.

    It begins with a block; its last block may be short.
    """

    start: int  # [0, start) is final in every branch
    stop: int
    visible: int  # the largest `visible_K`: fed positions lie in [0, visible)
    block: int  # P, positions of a block
    origin: int  # position from which blocks are counted; everything before it is one block
    eligible_KW: Tensor  # bool: masked and in an open block
    must_KN: Tensor | None = None  # bool: blocks that must commit something while masked; None: all
    visible_K: Tensor | None = None  # branch k sees [0, visible_K[k]); None: all see the same
    masks: int | None = None  # eligible positions of all branches; None: unknown to the host
    rows_M: Tensor | None = None  # indices into flattened (K, W) of the rows scored; None: all
    end: Tensor | None = None  # where the open block ends, 0-d int64, if this round decided it
    end_known: bool = False  # whether an earlier round decided where the open block ends

    def take(self, index: Tensor) -> Window:
        """Return the window of the branches `index` (int64), in that order."""
        names = ("eligible_KW", "must_KN", "visible_K")
        return replace(self, masks=None, **selected(self, names, index))

    def pick(self, j: Tensor) -> Window:
        """Return the window of branch `j` alone."""
        return replace(self, visible_K=None).take(j.reshape(1))

    @property
    def width(self) -> int:
        """W."""
        return self.stop - self.start

    def of(self, canvas_KL: Tensor) -> Tensor:
        """Return the window's columns of a tensor over the canvas, (K, W)."""
        return canvas_KL[:, self.start : self.stop]

    def put(self, canvas_KL: Tensor, values_KW: Tensor) -> Tensor:
        """Return a copy of a tensor over the canvas, with `values` in the window's columns."""
        canvas_KL = canvas_KL.clone()
        canvas_KL[:, self.start : self.stop] = values_KW
        return canvas_KL

    def blocks(self, values_KW: Tensor, fill: float = 0.0) -> Tensor:
        """Reshape (K, W) to (K, N, P); positions beyond a short last block's end hold `fill`."""
        short = -self.width % self.block
        if short:
            values_KW = torch.nn.functional.pad(values_KW, (0, short), value=fill)
        return values_KW.reshape(values_KW.shape[0], -1, self.block)

    def flat(self, values_KNP: Tensor) -> Tensor:
        """Reshape (K, N, P) to (K, W), the inverse of `blocks`."""
        values_KX = values_KNP.reshape(values_KNP.shape[0], -1)
        return values_KX[:, : self.width] if values_KX.shape[1] > self.width else values_KX

    def forced(self, where_KW: Tensor, fallback_KW: Tensor) -> Tensor:
        """Return `fallback` in the blocks that must progress and have none of `where`, (K, W)."""
        chosen_KN1, fallback_KNP = self.blocks(where_KW).any(-1, True), self.blocks(fallback_KW)
        if self.must_KN is not None:
            fallback_KNP = fallback_KNP & self.must_KN[..., None]
        return self.flat(fallback_KNP > chosen_KN1)
