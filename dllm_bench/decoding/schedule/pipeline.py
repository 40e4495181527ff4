"""Pipelined blocks (D2F, arXiv 2508.09192, §4.3): several blocks are open at once.

In each round a branch opens one more block when a share `tau_add` of the last open block is
committed. A block must progress ("fully activated") once a share `tau_act` of the block before it
is committed; until then it commits only what passes the confidence threshold. The prompt counts as
committed, and only open blocks are fed to the model. A closed branch (with a committed end token)
opens no further block but finishes the open ones. Blocks have to divide the generation; the
released code makes as many whole blocks as fit instead (`floor`: 240 tokens of 256 in blocks of
48).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dllm_bench.core.blocks import BlockGrid, BlockProgress
from dllm_bench.core.contracts import Schedule
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.schedule.blocks import check_divides
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("schedule.pipeline")
@dataclass(frozen=True)
class Pipeline(Schedule):
    """Several open blocks; the thresholds are shares of a block's positions."""

    block: int  # positions of a block
    tau_add: float  # committed share of the last open block at which the next one opens
    tau_act: float  # committed share of the block before at which a block must progress
    floor: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Generate as many whole blocks as fit into the length asked for."""
    sees_future = False

    def __post_init__(self) -> None:
        if not (0 <= self.tau_add <= 1 and 0 <= self.tau_act <= 1):
            raise DllmBenchError(
                f"Pipeline has tau_add {self.tau_add} and tau_act {self.tau_act}; "
                "both are shares of a block, from 0 to 1."
            )

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """One open block at a time if a block opens only when the last one is finished."""
        single = {Condition.ONE_OPEN_BLOCK} if self.tau_add == 1 else set()
        always = {Condition.BLOCKS_IN_ORDER, Condition.EQUAL_BLOCKS, Condition.FIXED_CANVAS}
        return frozenset({*always, BlockLength(self.block), *single})

    def length(self, prompt_len: int, new: int) -> int:
        if self.floor and new >= self.block:
            new -= new % self.block
        fits = "schedule.floor=true, which makes as many as fit" if new > self.block else ""
        check_divides(self.block, new, fits)
        return super().length(prompt_len, new)

    def grid(self, prompt_len: int, length: int) -> BlockGrid:
        return BlockGrid(prompt_len, self.block, prompt_len, length)

    def opened(self, branch: BlockProgress) -> int:
        last = branch.opened - 1
        full = branch.opened >= branch.grid.blocks
        due = last < 0 or self._reaches(branch, last, self.tau_add)
        return branch.opened + (due and not full and not branch.closed)

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        return n == 0 or self._reaches(branch, n - 1, self.tau_act)

    def _reaches(self, branch: BlockProgress, n: int, share: float) -> bool:
        """Whether a share of block `n` is committed."""
        return self.block - branch.masks_left(n) >= math.ceil(share * self.block - 1e-9)
