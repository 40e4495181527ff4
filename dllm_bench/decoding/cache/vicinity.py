"""Vicinity cache (dInfer): like the dual cache, but positions near the open block are fed too.

A forward between renewals feeds `before` positions before the block, the block and `after`
positions behind it, so that their K/V are computed with the block's newest tokens; these K/V are
not kept. The first `warmup` forwards of a request feed the whole canvas and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.core.blocks import Window
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.cache.dual import DualCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.registry import register


@register("cache.vicinity")
@dataclass(frozen=True)
class VicinityCache(DualCache):
    """Caches what is not near the open block; see `PrefixCache` for `every` and `clock`."""

    before: int = 16  # positions fed before the block
    after: int = 16  # positions fed behind the block
    warmup: int = 4  # forwards before anything is cached
    renews_twice: bool = False  # as released: if the warm-up outlasts the first block, renew again
    # two forwards after the first renewal, in the same block

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.before, self.after, self.warmup) < 0:
            raise DllmBenchError(
                f"VicinityCache has before {self.before}, after {self.after}, warmup "
                f"{self.warmup}; none of them may be negative."
            )

    def plan(self, round: Round) -> ForwardPlan:
        branches = round.state
        if branches.forwards < self.warmup:
            return NoCache(self.attention).plan(round)
        return super().plan(round)

    def _renews(self, branches: DecodeState, window: Window, last: ForwardPlan | None) -> bool:
        if super()._renews(branches, window, last):
            return True
        if last is None or not self.renews_twice or last.rows[0] <= branches.prompt_len:
            return False
        return last.forward == self.warmup == branches.forwards - 2

    def _fed(self, window: Window) -> tuple[int, int]:
        return max(0, window.start - self.before), min(window.visible, window.stop + self.after)
