"""d3LLM's multi-block decoding (arXiv 2601.07568): several open blocks, the whole canvas in view.

A block opens as in the pipeline of D2F, one per round, once a share `tau_add` of the last open
block is committed. Only the first unfinished block has to progress. The released
`decoded_token_threshold` marks blocks as active, which changes nothing: eligible are all open
blocks, and the first unfinished one is always active.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dllm_bench.core.blocks import BlockProgress
from dllm_bench.decoding.schedule.pipeline import Pipeline
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("schedule.multi_block")
@dataclass(frozen=True)
class MultiBlock(Pipeline):
    """Several open blocks, of which the first unfinished one must progress."""

    tau_act: float = field(default=1.0, init=False)
    opens_rest: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Open all blocks of a closed branch, as the released early stop does."""
    sees_future = True

    def opened(self, branch: BlockProgress) -> int:
        return branch.grid.blocks if self.opens_rest and branch.closed else super().opened(branch)

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        return n == branch.finished
