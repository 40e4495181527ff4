"""Sub-blocks (Fast-dLLM v2, arXiv 2509.26328): a block is decoded in parts, one after the other.

Blocks lie at multiples of `block`. The first position of a block is a part of its own, which any
forward fills: a model with shifted logits predicts it from the finished block before. The others
are decoded in parts that end at multiples of `small`. A closed branch finishes the block it has
begun, all parts of it. The model sees the masks of later parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.blocks import BlockGrid, BlockProgress
from dllm_bench.core.contracts import Schedule
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import register


@dataclass(frozen=True)
class SubBlockGrid(BlockGrid):
    """Where the parts of the blocks lie. Block `n` of the base class is part `n` here."""

    small: int = 1

    @property
    def parts(self) -> int:
        """Parts of a block, its first position included."""
        return self.block // self.small + 1

    @property
    def blocks(self) -> int:
        whole, rest = divmod(self.length, self.block)
        begun = 1 + (rest > 1) + (rest - 1) // self.small if rest else 0
        return whole * self.parts + begun

    def start(self, n: int) -> int:
        block, part = divmod(n, self.parts)
        offset = part if part < 2 else (part - 1) * self.small
        return min(block * self.block + offset, self.length)


@register("schedule.sub_blocks")
@dataclass(frozen=True)
class SubBlocks(Schedule):
    """One part of one block is open at a time."""

    block: int  # positions of a block
    small: int  # positions of its parts; the first part has one less
    whole: bool = True  # round the canvas up to whole blocks
    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset(
        {Condition.ONE_OPEN_BLOCK, Condition.SUB_BLOCKS, Condition.FIXED_CANVAS}
    )
    needs: ClassVar[frozenset[Need]] = frozenset({Need("explore", Condition.ONE_BRANCH)})

    def __post_init__(self) -> None:
        if self.small < 1 or self.block < 1 or self.block % self.small:
            raise DllmBenchError(
                f"SubBlocks has a block of {self.block} and small {self.small}; give 1 or more "
                "positions, of which small divides the block."
            )

    def length(self, prompt_len: int, new: int) -> int:
        wanted = prompt_len + new
        return wanted + (-wanted % self.block if self.whole else 0)

    def grid(self, prompt_len: int, length: int) -> SubBlockGrid:
        return SubBlockGrid(0, self.block, prompt_len, length, small=self.small)

    def opened(self, branch: BlockProgress) -> int:
        n, grid = branch.finished, branch.grid
        inside = grid.start(n) % self.block > 0
        opens = n < grid.blocks and (inside or branch.begun(n) or not branch.closed)
        return max(n + opens, branch.opened)
