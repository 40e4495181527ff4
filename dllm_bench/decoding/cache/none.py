"""No cache: every forward feeds all positions the schedule lets the model see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.contracts import Cache
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.denoiser import Attention, ForwardPlan
from dllm_bench.core.round import Round
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import register


@register("cache.none")
@dataclass(frozen=True)
class NoCache(Cache):
    """Caches nothing."""

    attention: Attention = "full"  # bidirectional; or "block_causal" over the schedule's blocks
    by_position: ClassVar[bool] = False
    caches: ClassVar[bool] = False

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """What other pieces can rely on."""
        full = {Condition.FULL_ATTENTION} if self.attention == "full" else set()
        return frozenset({Condition.WHOLE_CANVAS, Condition.FED_WINDOW, *full})

    def plan(self, round: Round) -> ForwardPlan:
        window = round.window
        return ForwardPlan(
            kind=ForwardKind.DENOISE,
            feed=(0, window.visible),
            rows=(window.start, window.stop),
            store=(0, 0),
            attention=self.attention,
            block=window.block,
            origin=window.origin,
            visible_K=window.visible_K,
        )
