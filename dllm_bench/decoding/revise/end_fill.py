"""d3LLM's early stop (arXiv 2601.07568, hao-ai-lab/d3LLM): end tokens behind the first end token.

After a forward, everything behind the first end token becomes the end token, committed tokens too,
unless nothing is masked any more. As released, positions that were masked until then still compete
in the next forward, and what is committed there stays if decoding ends with it: text can follow the
end token. The rest is done by stop rule `eos` (scope "token", turn_end off) and by schedule
`multi_block` (opens_rest on), without which fewer positions compete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dllm_bench.core.contracts import Reads, Revise
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.round import Round
from dllm_bench.registry import register


@register("revise.end_fill")
@dataclass(frozen=True)
class EndFill(Revise):
    """Writes end tokens behind the first one."""

    reads_rows: ClassVar[Reads] = "masked"
    needs: ClassVar[frozenset[Need]] = frozenset(
        {Need("schedule", Condition.BLOCKS_IN_ORDER), Need("stop", Condition.END_OF_TEXT)}
    )

    def on_commit(self, round: Round) -> None:
        state = round.state
        tokens_KL, masked_KL = state.tokens_KL, state.masked_KL
        ends_KL = tokens_KL == state.special.eos
        new_KL = ends_KL.clone()
        new_KL[:, : state.prompt_len] = False
        behind_KL = new_KL.cumsum(1) > new_KL.long()
        open_KL = masked_KL & (tokens_KL == state.special.mask)
        behind_KL &= open_KL.any(1, keepdim=True)
        filled_KL = open_KL & behind_KL
        over_K1 = ~(open_KL & ~behind_KL).any(1, keepdim=True)
        shown_KL = masked_KL & ~open_KL  # since the last forward
        write_KL = (behind_KL & ~masked_KL & ~ends_KL) | shown_KL | (filled_KL & over_K1)
        end_KL = torch.full_like(tokens_KL, state.special.eos)
        parts = (torch.zeros_like(write_KL), write_KL, end_KL, filled_KL | shown_KL)
        round.revise(*(part[:, round.window.start :] for part in parts))
