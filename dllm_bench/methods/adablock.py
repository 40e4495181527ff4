"""AdaBlock (arXiv 2509.26432): a block ends at the delimiter that its first forward predicts.

The candidates in the next `share` of the generation are searched for `delimiters`. If the most
probable delimiter reaches `tau`, the block ends with it; otherwise it has `block` positions. The
same forward also commits positions before that end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm_bench.core.blocks import BlockGrid
from dllm_bench.core.contracts import Round
from dllm_bench.core.declared import Positive, PositiveProportion, Probability
from dllm_bench.core.decoder import ONE_BRANCH, Condition, needing
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.methods.common import InTurn
from dllm_bench.registry import register


@register("schedule.adablock")
@dataclass(frozen=True)
class AdaBlock(InTurn):
    """One open block at a time, whose length follows from its first scores."""

    block: Positive  # block length without a delimiter
    delimiters: tuple[int, ...] = (198,)  # token ids; 198 is the line feed of LLaDA and Dream
    tau: Probability = 0.3  # minimum probability for a delimiter to end a block
    share: PositiveProportion = 0.25  # part of the generation that is searched
    gives = frozenset({Condition.ONE_OPEN_BLOCK, Condition.BLOCKS_IN_ORDER, Condition.FIXED_CANVAS})
    needs = needing(
        ONE_BRANCH, {"score": Condition.RAW_CONFIDENCE, "cache": Condition.FULL_ATTENTION}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delimiters:
            raise DllmBenchError("AdaBlock has no delimiters; give one token id or more.")

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        longest = max(self.block, self._searched(new))
        return BlockGrid(prompt_len, longest, prompt_len, prompt_len + new)

    def on_scores(self, round: Round) -> None:
        """End the block according to the scores of its first forward."""
        scores, window, state = round.scores, round.window, round.state
        if window.end_known:
            return
        searched = self._searched(state.length - state.prompt_len)
        ids_X, probability_X = scores.ids_KW[0, :searched], scores.probability_KW[0, :searched]
        ends_X = torch.stack([ids_X == token for token in self.delimiters]).any(0)
        best, index = probability_X.masked_fill(~ends_X, -1).max(0)
        usual = min(window.start + self.block, window.stop)
        round.end_block(torch.where(best >= self.tau, window.start + index + 1, usual))

    def _searched(self, new: int) -> int:
        """Return the number of searched positions for a generation of `new` positions."""
        return max(int(self.share * new), 1)
