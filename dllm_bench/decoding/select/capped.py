"""Another selector, but at most a share of the masks in one forward (WINO, arXiv 2507.18578).

Of what `inner` chooses, the max(min(int(share m), most), least) most confident positions are
committed, m being the masks of the open block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.select.steps import most_confident
from dllm_bench.registry import register


@register("select.capped")
@dataclass(frozen=True)
class Capped(Select):
    """`inner` chooses among the most confident positions."""

    inner: Select
    share: float = 0.7  # of the masks
    least: int = 5  # the cap is at least this
    most: int = 20  # and at most this

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not 1 <= self.least <= self.most:
            raise DllmBenchError(
                f"Capped has share {self.share}, least {self.least}, most {self.most}; give a "
                "share above 0 and up to 1, and 1 <= least <= most."
            )

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        masks_K = window.eligible_KW.sum(1)
        cap_K = (masks_K.double() * self.share).long().clamp(self.least, self.most)
        return most_confident(scores, window, cap_K) & self.inner(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.inner.on_stall(scores, window, state)
