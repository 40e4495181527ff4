"""LocalLeap (arXiv 2510.07081): a lower threshold near confident positions.

A position whose candidate has at least probability `tau` is an anchor. The threshold is `relaxed`
for masked positions at most `radius` away from an anchor, and `tau` for all others. If a block must
progress but has no anchor, its most confident position is committed (the inherited stall rule).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import max_pool1d

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.declared import Count, Probability
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("select.local_leap")
@dataclass(frozen=True)
class LocalLeap(Select):
    """Commits by a threshold that is relaxed near anchors."""

    tau: Probability  # probability of an anchor
    relaxed: Probability  # threshold near an anchor
    radius: Count  # positions on either side of an anchor; 0: none

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        sure_KW = window.eligible_KW & (scores.probability_KW >= self.tau)
        near_KW = max_pool1d(sure_KW.float(), 2 * self.radius + 1, stride=1, padding=self.radius)
        return sure_KW | (near_KW > 0) & (scores.probability_KW >= self.relaxed)
