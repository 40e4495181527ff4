"""Semi-autoregressive blocks: one block is decoded until it has no mask, then the next opens.

(LLaDA §2.4, Fast-dLLM.) With `block: null` the whole generation is one block (Dream's full
schedule). The model sees the masks of future blocks unless `sees_future` is off, as for models
trained block by block. Blocks are prompt-relative; `absolute` ones lie at multiples of `block`, so
that the first may overlap the prompt and the last may be short (dInfer's `start_block_align`;
block diffusion: SDAR, LLaDA2). `whole` rounds the canvas up to whole absolute blocks, as the
block-diffusion samplers do; the text is then cut to the length asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.protocols import Schedule, Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.schedule.canvas import (
    check_divides,
    decoded_per_block,
    leading,
    masks_per_block,
    open_window,
    survey,
)


@dataclass(frozen=True)
class Blocks(Schedule):
    """`block` positions per block; None: one block of the whole generation length."""

    block: int | None
    sees_future: bool = True
    absolute: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise DllmBenchError(f"Blocks has a block of {self.block}; give 1 or more positions.")
        if (self.absolute and self.block is None) or (self.whole and not self.absolute):
            raise DllmBenchError(
                f"Blocks has block {self.block}, absolute {self.absolute}, whole {self.whole}; "
                "absolute blocks need a length and only absolute blocks are filled up."
            )

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        """What other pieces may rely on."""
        order = {"one open block at a time", "blocks that finish in order"}
        named = {f"blocks of {self.block}"} if self.block else set()
        return frozenset(order | named | ({"absolute blocks"} if self.absolute else set()))

    def length(self, prompt_len: int, new: int) -> int:
        if self.block and not self.absolute:
            check_divides(self.block, new)
        short = -(prompt_len + new) % self.block if self.whole and self.block else 0
        return prompt_len + new + short

    def _frame(self, branches: DecodeState) -> tuple[int, int]:
        """Origin and size of the blocks."""
        origin = 0 if self.absolute else branches.prompt_len
        return origin, self.block or branches.length - branches.prompt_len

    def open(self, branches: DecodeState, closed_K: Tensor) -> None:
        """Nothing to remember: the open block follows from the tokens."""

    def survey(self, branches: DecodeState, closed_K: Tensor) -> Tensor:
        """A closed branch goes on with a block that is begun, not with a fresh one."""
        origin, block = self._frame(branches)
        masks_KN = masks_per_block(branches, origin, block)
        blocks = masks_KN.shape[1]
        done_K = leading(masks_KN == 0)
        current_K1 = done_K.clamp(max=blocks - 1)[:, None]
        begun_K = decoded_per_block(branches, origin, block).gather(1, current_K1)[:, 0] > 0
        more_K = (done_K < blocks) & (begun_K | ~closed_K)
        return survey(masks_KN, done_K, done_K + more_K, origin, block)

    def window(self, branches: DecodeState, survey_K3: Tensor, rows: list[list[int]]) -> Window:
        origin, block = self._frame(branches)
        return open_window(branches, survey_K3, rows, origin, block, self.sees_future)
