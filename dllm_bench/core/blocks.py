"""Where the blocks of a canvas lie, and how far a branch is with them, as the host knows it.

Blocks are counted from an origin: the prompt's end (LLaDA, D2F) or the canvas's beginning (block
diffusion, dInfer), where the first one to decode may overlap the prompt. A round tells the host how
many masks are left in the blocks of its window; all else follows, because blocks before the window
are finished and those behind it are untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


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
class Progress:
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
