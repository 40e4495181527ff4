"""d3LLM's approximate cache (arXiv 2601.07568): finished blocks are kept after a delay.

A block's K/V are stored `delay` rounds after the first forward that found it finished, the prompt's
in round `delay`. Forwards between feed what is not stored. While a finished block
waits, and in every `every`-th round, the whole canvas is fed and the stored K/V are renewed. In the
released code they grow too when several blocks wait, so that later forwards read them twice; here
they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.denoiser import Attention, ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import register


@register("cache.delayed")
@dataclass(frozen=True)
class DelayedCache(Cache):
    """Caches finished blocks once they have waited."""

    delay: int = 1  # rounds that a finished block waits
    every: int | None = None  # rounds between renewals; None: only while a block waits
    attention: Attention = "full"
    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset({Condition.FED_WINDOW})
    needs: ClassVar[frozenset[Need]] = frozenset(
        {Need("schedule", Condition.BLOCKS_IN_ORDER), Need("schedule", Condition.EQUAL_BLOCKS)}
    )

    def __post_init__(self) -> None:
        if self.delay < 0 or (self.every is not None and self.every < 1):
            raise DllmBenchError(
                f"DelayedCache has delay {self.delay} and every {self.every}; give 0 or more "
                "rounds of delay, and renew after 1 or more."
            )

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        held, turn = kv.length, branches.forwards + 1
        ready, waits = self._ready(branches, window, held)
        renews = held and ready == held and (waits or (self.every and turn % self.every == 0))
        feed = 0 if renews else held
        stored = (feed, ready if ready > held or renews else feed)
        kinds = (ForwardKind.DENOISE, ForwardKind.REFRESH if held else ForwardKind.PREFILL)
        return ForwardPlan(
            kind=kinds[stored[1] > stored[0]],
            feed=(feed, window.visible),
            rows=(window.start, window.stop),
            store=stored,
            attention=self.attention,
            block=window.block,
            origin=window.origin,
            visible_K=window.visible_K,
        )

    def _ready(self, branches: DecodeState, window: Window, held: int) -> tuple[int, bool]:
        """Up to where K/V can be stored now, and whether a finished block behind has to wait."""
        ready = held
        for end in range(window.origin, window.retired + 1, window.block):
            if end <= held:
                continue
            seen = MemoKey[int](f"delayed.seen_{end}")  # first forward that found it finished
            if seen not in branches.memo:  # the prompt was finished before there was any
                branches.memo[seen] = branches.forwards or -1
            if branches.forwards - branches.memo[seen] < self.delay:
                return ready, True
            ready = end
        return ready, False
