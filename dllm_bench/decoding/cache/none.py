"""No cache: every forward feeds all positions the schedule lets the model see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.contracts import Attention, Cache, KVCache, Plan, Window
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import Kind
from dllm_bench.decoding.guidance import WHOLE


@dataclass(frozen=True)
class NoCache(Cache):
    """`attention`: "full" (bidirectional) or "block_causal" over the schedule's blocks."""

    attention: Attention = "full"
    gives: ClassVar[frozenset[str]] = frozenset({WHOLE})

    def plan(self, branches: DecodeState, window: Window, kv: KVCache) -> Plan:
        return Plan(
            kind=Kind.DENOISE,
            feed=(0, window.visible),
            rows=(window.start, window.stop),
            store=(0, 0),
            attention=self.attention,
            block=window.block,
            origin=window.origin,
            visible_K=window.visible_K,
        )
