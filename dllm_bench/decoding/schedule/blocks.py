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

from dllm_bench.core.blocks import BlockGrid, BlockProgress
from dllm_bench.core.contracts import Schedule
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.schedule.window import check_divides
from dllm_bench.registry import register


@register("schedule.blocks")
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

    def grid(self, prompt_len: int, length: int) -> BlockGrid:
        origin = 0 if self.absolute else prompt_len
        return BlockGrid(origin, self.block or max(length - prompt_len, 1), prompt_len, length)

    def opened(self, branch: BlockProgress) -> int:
        """A closed branch goes on with a block that is begun, not with a fresh one."""
        done = branch.done
        more = done < branch.grid.blocks and (branch.begun(done) or not branch.closed)
        return done + more
