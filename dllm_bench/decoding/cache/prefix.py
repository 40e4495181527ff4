"""Approximate prefix cache (Fast-dLLM §3.1): keep the K/V of all positions before the open block.

A forward over the whole canvas at the start of every block renews them and decodes too; the
following forwards feed the open block and everything after it. `every` renews them more often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.protocols import Attention, Cache, KVCache, Plan, Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import Kind


@dataclass(frozen=True)
class PrefixCache(Cache):
    """`every`: forwards until a renewal within a block; None: renewed at its start only."""

    every: int | None = None
    attention: Attention = "full"
    needs: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {("schedule", "blocks that finish in order")}
    )

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise DllmBenchError(
                f"{type(self).__name__} every is {self.every}; renew after 1 or more forwards."
            )

    def plan(self, branches: DecodeState, window: Window, kv: KVCache) -> Plan:
        fresh = self._is_fresh(branches, window, kv)
        return Plan(
            kind=Kind.DENOISE if fresh else Kind.REFRESH if kv.length else Kind.PREFILL,
            feed=self._fed(window) if fresh else (0, window.visible),
            rows=(window.start, window.stop),
            store=(0, 0) if fresh else (0, self._kept(window)),
            attention=self.attention,
            block=window.block,
            origin=window.origin,
            visible_K=window.visible_K,
            forward=branches.forwards,
        )

    def _is_fresh(self, branches: DecodeState, window: Window, kv: KVCache) -> bool:
        """The cache was filled for this block, less than `every` forwards ago."""
        if kv.kept is None or kv.kept.rows[0] != window.start:
            return False
        return self.every is None or branches.forwards - kv.kept.forward < self.every

    def _fed(self, window: Window) -> tuple[int, int]:
        """What a forward with a fresh cache feeds: the open block and the rest of the canvas."""
        return window.start, window.visible

    def _kept(self, window: Window) -> int:
        """End of the positions whose K/V are kept."""
        return window.start
