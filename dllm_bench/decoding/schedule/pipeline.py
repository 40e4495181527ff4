"""Pipelined blocks (D2F, arXiv 2508.09192, §4.3): several blocks are open at once.

Each round and branch: one more block opens when the last one is decoded to `tau_add`; a block has
to progress ("fully activated") once its predecessor is decoded to `tau_act`, before that it only
takes what passes the confidence threshold. The prompt counts as decoded, and only open blocks are
fed to the model. A closed branch (EOS found) opens nothing more but finishes what is open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dllm_bench.core.blocks import BlockGrid, BlockProgress
from dllm_bench.core.contracts import Schedule
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.schedule.window import check_divides
from dllm_bench.registry import register


@register("schedule.pipeline")
@dataclass(frozen=True)
class Pipeline(Schedule):
    """`block` positions per block; tau_add and tau_act are shares of a block's positions."""

    block: int
    tau_add: float
    tau_act: float
    sees_future = False

    def __post_init__(self) -> None:
        if not (0 <= self.tau_add <= 1 and 0 <= self.tau_act <= 1):
            raise DllmBenchError(
                f"Pipeline has tau_add {self.tau_add} and tau_act {self.tau_act}; "
                "both are shares of a block, from 0 to 1."
            )

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        """One open block at a time when a block opens only after the last one is complete."""
        single = {"one open block at a time"} if self.tau_add == 1 else set()
        return frozenset({"blocks that finish in order", f"blocks of {self.block}"} | single)

    def length(self, prompt_len: int, new: int) -> int:
        check_divides(self.block, new)
        return super().length(prompt_len, new)

    def grid(self, prompt_len: int, length: int) -> BlockGrid:
        return BlockGrid(prompt_len, self.block, prompt_len, length)

    def opened(self, branch: BlockProgress) -> int:
        last = branch.opened - 1
        full = branch.opened >= branch.grid.blocks
        due = last < 0 or self._reaches(branch, last, self.tau_add)
        return branch.opened + (due and not full and not branch.closed)

    def pushes(self, branch: BlockProgress, n: int) -> bool:
        return n == 0 or self._reaches(branch, n - 1, self.tau_act)

    def _reaches(self, branch: BlockProgress, n: int, share: float) -> bool:
        """Whether block `n` is decoded to a share of its positions."""
        return self.block - branch.left(n) >= math.ceil(share * self.block - 1e-9)
