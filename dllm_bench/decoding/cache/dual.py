"""Approximate dual cache (Fast-dLLM §3.1): keep the K/V of everything around the open block.

Like the prefix cache, but the masks behind the block are cached as well, so that a forward between
renewals feeds the open block only.
"""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.core.blocks import Window
from dllm_bench.decoding.cache.prefix import PrefixCache
from dllm_bench.registry import register


@register("cache.dual")
@dataclass(frozen=True)
class DualCache(PrefixCache):
    """Caches prefix and suffix; see `PrefixCache` for `every` and `clock`."""

    def _fed(self, window: Window) -> tuple[int, int]:
        return window.start, window.stop

    def _kept(self, window: Window) -> int:
        return window.visible
