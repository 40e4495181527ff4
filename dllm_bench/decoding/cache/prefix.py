"""Approximate prefix cache (Fast-dLLM §3.1): keep the K/V of all positions before the open block.

The first forward of every block feeds the whole canvas, which renews these K/V and decodes as well.
The following forwards feed the open block and everything behind it. `every` renews more often, by
one of two clocks: "block" counts the forwards since the last renewal; "request" counts rounds from
the start of the request, whatever block they belong to, where a renewal and the forward after it
are one round (dInfer's `cache_update_freq`; its unrolled rounds over a full block, which are not
made here, do not count).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Cache
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.denoiser import Attention, ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import register

Clock = Literal["block", "request"]


@register("cache.prefix")
@dataclass(frozen=True)
class PrefixCache(Cache):
    """Caches what lies before the open block."""

    every: int | None = None  # ticks of `clock` between renewals; None: only at a block's start
    attention: Attention = "full"
    clock: Clock = "block"  # what a tick is: a forward of the block, or a round of the request
    needs: ClassVar[frozenset[Need]] = frozenset({Need("schedule", Condition.BLOCKS_IN_ORDER)})

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise DllmBenchError(
                f"{type(self).__name__} every is {self.every}; renew after 1 or more forwards."
            )
        check_choice(self, "clock", self.clock, Clock)

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """Full attention only if set so."""
        full = {Condition.FULL_ATTENTION} if self.attention == "full" else set()
        return frozenset({Condition.FED_WINDOW, *full})

    @property
    def renewal_rounds(self) -> int | None:
        """`every`, if it counts rounds of the request."""
        return self.every if self.clock == "request" else None

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        renews = self._renews(branches, window, kv.kept)
        return ForwardPlan(
            kind=(ForwardKind.REFRESH if kv.length else ForwardKind.PREFILL)
            if renews
            else ForwardKind.DENOISE,
            feed=(0, window.visible) if renews else self._fed(window),
            rows=(window.start, window.stop),
            store=(0, self._kept(window)) if renews else (0, 0),
            attention=self.attention,
            block=window.block,
            origin=window.origin,
            visible_K=window.visible_K,
            forward=branches.forwards,
            clock=self._round(branches, window, kv.kept),
        )

    def _renews(self, branches: DecodeState, window: Window, last: ForwardPlan | None) -> bool:
        """Whether to renew: at a block's start and by the clock. `last` is the last renewal."""
        if last is None or last.rows[0] != window.start:
            return True
        if self.every is None:
            return False
        if self.clock == "request":
            now = self._round(branches, window, last)
            return now > last.clock and now % self.every == 0
        return branches.forwards - last.forward >= self.every

    def _round(self, branches: DecodeState, window: Window, last: ForwardPlan | None) -> int:
        """Index of this forward's round in the request; a new block begins a new round."""
        if last is None:
            return 0
        since = branches.forwards - last.forward - 1
        return last.clock + max(since, int(last.rows[0] != window.start))

    def _fed(self, window: Window) -> tuple[int, int]:
        """What a forward between renewals feeds: the open block and the rest of the canvas."""
        return window.start, window.visible

    def _kept(self, window: Window) -> int:
        """End of the positions whose K/V are kept."""
        return window.start
