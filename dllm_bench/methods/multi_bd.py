"""MultiBD (MBD-LMs): D2F's pipeline over a buffer of a few absolute blocks.

Released code: SJTU-DENG-Lab/Diffulex@184ba97, strategy/multi_bd (SJTU-DENG-Lab/mbd-lms). A finished
block keeps its place in the buffer for the forward in which its K/V are stored. Forwards that do
nothing else are not made here. Left out: the serving guards, which end a request while blocks are
open, and editing in several open blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.core.blocks import BlockGrid, BlockProgress
from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import Condition, Conditions
from dllm_bench.methods.common import Pipeline
from dllm_bench.registry import register


@register("schedule.buffer")
@dataclass(frozen=True, kw_only=True)
class BlockBuffer(Pipeline):
    """At most `size` blocks that are open or finished in the last forward.

    Blocks lie at multiples of `block`; the canvas is rounded up to whole ones, or down with
    `floor`. The prompt's rest counts as committed. A block opens as in a pipeline if there is room
    in the buffer, and in any case once all open ones are finished.
    """

    size: Positive  # blocks of the buffer

    @property
    def gives(self) -> Conditions:  # type: ignore[override]
        """As a pipeline; one open block if the buffer has one."""
        single = {Condition.ONE_OPEN_BLOCK} if self.size == 1 else set()
        return super().gives | {Condition.ABSOLUTE_BLOCKS} | single

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        length = prompt_len + new
        down = length - length % self.block
        if not self.floor or down <= prompt_len:
            down += self.block * (length > down)
        return BlockGrid(0, self.block, prompt_len, down, sees_future=self.sees_future)

    def opened(self, branch: BlockProgress) -> int:
        prompt = branch.grid.prompt_len // self.block
        opened = branch.opened or -(-branch.grid.prompt_len // self.block)
        if branch.closed or opened >= branch.grid.blocks:
            return opened
        has_room = opened - max(branch.first, prompt) < self.size
        due = has_room and self._reaches(branch, opened - 1, self.tau_add)
        return opened + (due or branch.finished >= opened)
