"""Hierarchical cache of Fast-dLLM v2 (arXiv 2509.26328): finished blocks, and the open one.

A finished block is fed once more, and its last row gives the first token of the next block: its K/V
are final then, under block-causal attention. While a block is decoded, forwards feed all of it.
With `inside` they feed the open sub-block alone and overwrite its K/V; those of the block's other
positions were stored by the last forward that fed all of it: the first one of the sub-block, and
every one as long as the sub-block's first position is masked. Later sub-blocks are read with their
K/V of that forward (as released).

As long as nothing is cached, the prompt's whole blocks are fed with the first forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dllm_bench.core.contracts import Cache
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.denoiser import Attention, ForwardPlan
from dllm_bench.core.round import Round
from dllm_bench.core.state import MASKED
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import register

Span = tuple[int, int]
BORN = "hierarchical.born"  # host: the forward that committed each position


@register("cache.hierarchical")
@dataclass(frozen=True)
class HierarchicalCache(Cache):
    """Caches finished blocks and, with `inside`, the open block's other sub-blocks."""

    inside: bool = False  # whether forwards may feed the open sub-block alone
    attention: Attention = field(default="block_causal", init=False)
    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset()
    needs: ClassVar[frozenset[Need]] = frozenset({Need("schedule", Condition.SUB_BLOCKS)})

    def on_start(self, round: Round) -> None:
        if self.inside:
            round.ask(BORN, round.state.born_KL[-1])

    def plan(self, round: Round) -> ForwardPlan:
        window, kv = round.window, round.kv
        feed, store = self._spans(round)
        stored = ForwardKind.REFRESH if feed[0] < kv.length else ForwardKind.DENOISE
        return ForwardPlan(
            kind=stored if kv.kept else ForwardKind.PREFILL,
            feed=feed,
            rows=(window.start, window.stop),
            store=store,
            attention=self.attention,
            block=window.block,
            origin=window.origin,
        )

    def _spans(self, round: Round) -> tuple[Span, Span]:
        """What is fed, and what is stored of it."""
        window, kv = round.window, round.kv
        start = window.start - window.start % window.block
        if window.start == start:
            finished = (min(kv.length, start - window.block), start)
            return finished, finished
        held, end = min(kv.length, start), min(start + window.block, window.visible)
        if not self.inside:
            return (held, end), (held, start)
        first = start if window.start == start + 1 else window.start
        if self._fills(round, first):
            return (held, end), (held, end)
        return (first, window.stop), (first, window.stop)

    def _fills(self, round: Round, first: int) -> bool:
        """Whether the forward feeds the whole block; `first`: where the sub-block begins."""
        last = round.kv.kept
        if last is None or last.rows[0] != round.window.start:
            return True
        return round.host[BORN][first] == MASKED
