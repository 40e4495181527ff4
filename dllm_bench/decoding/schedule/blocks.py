"""Semi-autoregressive blocks: one block is decoded until it has no mask, then the next one opens.

(LLaDA §2.4, Fast-dLLM.) With `block: null` the whole generation is one block (Dream's full
schedule). The model sees the masks of future blocks unless `sees_future` is off, as for models that
were trained block by block. Blocks begin behind the prompt; `absolute` ones lie at multiples of
`block`, so that the first may overlap the prompt and the last may be short (dInfer's
`start_block_align`; block diffusion: SDAR, LLaDA2). `whole` rounds the canvas up to whole absolute
blocks, as the block-diffusion samplers do; the text is then cut to the length asked for. With
`short` blocks behind the prompt need not divide the generation: the last one is short (dInfer
without `start_block_align`; LLaDA and Fast-dLLM refuse such lengths). A generation shorter than a
block is one short block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dllm_bench.core.blocks import BlockGrid, BlockProgress
from dllm_bench.core.contracts import Schedule
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

LONGEST = 4096  # positions of a block that may be longer than the generation; more is a mistake


@register("schedule.blocks")
@dataclass(frozen=True)
class Blocks(Schedule):
    """One open block at a time."""

    block: int | None  # positions of a block; None: the whole generation is one block
    sees_future: bool = True  # whether the model sees the masks behind the open block
    absolute: bool = False  # blocks at multiples of `block` instead of from the prompt's end
    whole: bool = False  # round the canvas up to whole blocks
    short: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Whether the last block behind the prompt may be short."""
    sees_rest: bool = field(default=True, metadata=DEFAULT_LEFT_OUT)
    """Whether the model sees what the canvas was rounded up by; diffusers hides it, decodes it and
    leaves it out of the text."""

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise DllmBenchError(f"Blocks has a block of {self.block}; give 1 or more positions.")
        if (self.absolute and self.block is None) or (self.whole and not self.absolute):
            raise DllmBenchError(
                f"Blocks has block {self.block}, absolute {self.absolute}, whole {self.whole}; "
                "absolute blocks need a length, and only absolute blocks can be whole."
            )

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """What other pieces can rely on."""
        gives: set[Condition | BlockLength]
        gives = {Condition.ONE_OPEN_BLOCK, Condition.BLOCKS_IN_ORDER, Condition.HELD_BLOCKS}
        gives |= {Condition.EQUAL_BLOCKS, Condition.FIXED_CANVAS}
        gives |= {BlockLength(self.block) if self.block else Condition.WHOLE_GENERATION}
        return frozenset(gives | ({Condition.ABSOLUTE_BLOCKS} if self.absolute else set()))

    def length(self, prompt_len: int, new: int) -> int:
        one_short = self.block and new < self.block <= LONGEST
        if self.block and not (self.absolute or self.short or one_short):
            check_divides(self.block, new, "schedule.short=true, which lets the last one be short")
        short = -(prompt_len + new) % self.block if self.whole and self.block else 0
        return prompt_len + new + short

    def on_plan(self, round: Round) -> None:
        if not self.sees_rest:
            round.plan = replace(round.plan, alone=round.state.wanted)

    def grid(self, prompt_len: int, length: int) -> BlockGrid:
        origin = 0 if self.absolute else prompt_len
        return BlockGrid(origin, self.block or max(length - prompt_len, 1), prompt_len, length)

    def opened(self, branch: BlockProgress) -> int:
        """A closed branch finishes a block that it has begun and opens no other.

        A block that was masked again stays open.
        """
        n = branch.finished
        opens = n < branch.grid.blocks and (branch.begun(n) or not branch.closed)
        return max(n + opens, branch.opened)


def check_divides(block: int, new: int, other: str) -> None:
    """Blocks that begin behind the prompt have to fill the generation exactly.

    other: a setting that makes this length possible; empty if none does.
    """
    if new % block:
        also = f"decoder.{other}, " if other else ""
        raise DllmBenchError(
            f"A block of {block} does not divide the generation length {new}; set "
            f"decoder.schedule.block to a divisor of {new}, {also}or max_new_tokens (not for masks "
            f"within a prompt) to a multiple of {block}."
        )
