"""Keep the K/V of finished blocks; feed what is finished but not cached yet, and the open blocks.

Exact under block-causal attention (D2F): a finished block never sees later ones, so its K/V are
final when it is fed once more with its final tokens, in the same forward as the next denoising
step. Approximate under full attention (LoPA-Dist-NV): the cached positions were computed while
they saw the open blocks of that forward, and they are not renewed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.protocols import Attention, Cache, KVCache, Plan, Window
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import Kind


@dataclass(frozen=True)
class BlockCache(Cache):
    """`attention`: "block_causal" (exact) or "full" (approximate)."""

    attention: Attention = "block_causal"
    needs: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {("schedule", "blocks that finish in order")}
    )

    def plan(self, branches: DecodeState, window: Window, kv: KVCache) -> Plan:
        return Plan(
            kind=Kind.DENOISE if kv.length else Kind.PREFILL,
            feed=(kv.length, window.visible),
            rows=(window.start, window.stop),
            store=(kv.length, window.retired),
            attention=self.attention,
            block=window.block,
            origin=window.origin,
            visible_K=window.visible_K,
        )
