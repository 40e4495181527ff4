"""Semi-autoregressive blocks: one block is decoded until it has no mask, then the next opens.

(LLaDA §2.4, Fast-dLLM.) With `block: null` the whole generation is one block (Dream's full
schedule). The model sees the masks of future blocks unless `sees_future` is off, as for models
trained block by block. Blocks are prompt-relative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.protocols import Schedule, Window
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.schedule.canvas import decoded_per_block, leading, open_window, survey


@dataclass(frozen=True)
class Blocks(Schedule):
    """`block` positions per block; None: one block of the whole generation length."""

    block: int | None
    sees_future: bool = True
    gives: ClassVar[frozenset[str]] = frozenset(
        {"one open block at a time", "blocks that finish in order"}
    )

    def _size(self, branches: DecodeState) -> int:
        return self.block or branches.length - branches.prompt_len

    def open(self, branches: DecodeState, closed_K: Tensor) -> None:
        """Nothing to remember: the open block follows from the tokens."""

    def survey(self, branches: DecodeState, closed_K: Tensor) -> Tensor:
        """A closed branch goes on with a block that is begun, not with a fresh one."""
        block = self._size(branches)
        decoded_KN = decoded_per_block(branches, block)
        blocks = decoded_KN.shape[1]
        done_K = leading(decoded_KN == block)
        current_K1 = done_K.clamp(max=blocks - 1)[:, None]
        begun_K = decoded_KN.gather(1, current_K1)[:, 0] > 0
        more_K = (done_K < blocks) & (begun_K | ~closed_K)
        return survey(branches, decoded_KN, done_K + more_K, block)

    def window(self, branches: DecodeState, survey_K3: Tensor, rows: list[list[int]]) -> Window:
        return open_window(branches, survey_K3, rows, self._size(branches), self.sees_future)
