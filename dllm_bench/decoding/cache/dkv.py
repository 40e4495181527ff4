"""dKV-Cache (arXiv 2505.15781): a decoded token's K/V are kept, one forward after it was decoded.

A forward feeds the rows that predict masks and those of the tokens that the forward before has
committed, so that each token is fed once as itself; all other K/V are read from the cache. Every
`every`-th forward of a block feeds everything, and so do the block's first ones. With
`keeps_prompt` the prompt's K/V are those of the request's first forward ("pd" in the released code;
with `every` 1 it is its "prefill"). Where logits are shifted, a row is kept with the token that it
predicts: the released variant "un" keeps it even if its own token is still masked (`early`),
"un_right" does not. The variant "right" is left out: it keeps rows whose logits are still needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.contracts import Cache
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.denoiser import Attention, ForwardPlan, KVCache, PositionSets
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.state import MASKED
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import true_indices
from dllm_bench.decoding.cache.steps import step_of_block
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

BORN = "dkv.born"  # host: the forward that committed each position


@register("cache.dkv")
@dataclass(frozen=True)
class DKVCache(Cache):
    """Caches decoded tokens; which positions it feeds is worked out on the host."""

    every: int = 8  # forwards of a block between those that feed everything
    first: int = 2  # forwards at the start of a block that feed everything
    keeps_prompt: bool = False  # whether the prompt is fed by the request's first forward only
    early: bool = False  # whether a row is kept as soon as it predicts no mask, itself still masked
    released_end: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)  # whether a row that
    # predicts nothing, the last one where logits are shifted, is kept with its left neighbour only
    attention: Attention = field(default="full", init=False)
    over_spans: ClassVar[bool] = False
    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset({Condition.FULL_ATTENTION})
    needs: ClassVar[frozenset[Need]] = frozenset({Need("explore", Condition.ONE_BRANCH)})

    def __post_init__(self) -> None:
        if min(self.every, self.first) < 1:
            raise DllmBenchError(
                f"DKVCache has every {self.every} and first {self.first}; feed everything in 1 or "
                "more forwards of a block, and again after 1 or more."
            )

    def on_start(self, round: Round) -> None:
        round.ask(BORN, round.state.born_KL[-1])

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        step, now, span = step_of_block(branches, window), branches.forwards, window.visible
        feeds_all = step < self.first or step % self.every == 0
        born_KL = round.on_host(BORN)[None]
        if not feeds_all:
            feed_KL = self._pending(born_KL, kv, now - 1)
        elif self.keeps_prompt and now:
            feed_KL = self._generated(born_KL, branches.prompt_len, kv)
        else:
            feed_KL = torch.ones_like(born_KL, dtype=torch.bool)
        feed_L, pending_L = feed_KL[0, :span], self._pending(born_KL, kv, now)[0, :span]
        masks_L = feed_L, ~feed_L, feed_L > pending_L
        sets = PositionSets(*true_indices(masks_L, branches.born_KL.device))
        everything = ForwardKind.REFRESH if now else ForwardKind.PREFILL
        return ForwardPlan(
            kind=everything if feeds_all else ForwardKind.DENOISE,
            feed=(0, span),
            rows=(window.start, window.stop),
            store=(0, span),
            visible_K=window.visible_K,
            sets=sets,
        )

    def _pending(self, born_KL: Tensor, kv: KVCache, forward: int) -> Tensor:
        """Rows whose K/V the forward `forward` did not keep, bool (K, L).

        The request's first one keeps no row before its token is decoded.
        """
        undecided_KL = (born_KL == MASKED) | (born_KL >= forward)
        rows_KL = kv.predicting(undecided_KL)
        if self.early and forward > 0:
            return rows_KL
        pending_KL = rows_KL | undecided_KL
        if self.released_end:
            predicts_KL = kv.predicting(torch.ones_like(rows_KL))
            pending_KL = pending_KL | (pending_KL.roll(1, 1) & ~predicts_KL)
        return pending_KL

    def _generated(self, born_KL: Tensor, prompt_len: int, kv: KVCache) -> Tensor:
        """Rows behind the prompt, and those of it that predict a new token, bool (K, L)."""
        new_KL = torch.zeros_like(born_KL, dtype=torch.bool)
        new_KL[:, prompt_len:] = True
        return new_KL | kv.predicting(new_KL)
