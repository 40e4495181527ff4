"""dInfer (arXiv 2510.08666): hierarchical decoding and the vicinity cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Round, Scores, Select
from dllm_bench.core.declared import Amount, Count, Probability
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.state import DecodeState
from dllm_bench.methods.caches import DualCache, NoCache
from dllm_bench.methods.common import falling
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("select.hierarchy")
@dataclass(frozen=True)
class Hierarchy(Select):
    """Divides and conquers runs of adjacent masks (dInfer's hierarchical decoding).

    In every run of adjacent masks of a block, the most probable position is committed if its
    probability is above `low`, so that each forward splits the runs. Every position above `tau` is
    committed too. Both comparisons are strict. If a block must progress but no position passes, its
    most confident position is committed. With `fall`, tau begins at 1 and falls (`iter_threshold`
    of dInfer's HierarchyDecoder).
    """

    tau: Probability  # 1: off
    low: Probability = 0.4  # 0: always
    fall: Amount | None = field(default=None, metadata=DEFAULT_LEFT_OUT)  # of tau, see `falling`

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        probability_KNP = window.blocks(scores.probability_KW)
        masked_KNP = window.blocks(window.eligible_KW)
        run_KNP = (~masked_KNP).cumsum(2)  # equal for all positions of a run
        open_KNP = probability_KNP.masked_fill(~masked_KNP, -1.0)
        best_KNX = torch.full_like(torch.nn.functional.pad(open_KNP, (0, 1)), -1.0)
        best_KNX = best_KNX.scatter_reduce(2, run_KNP, open_KNP, "amax")
        best_KNP = (open_KNP == best_KNX.gather(2, run_KNP)) & (open_KNP > self.low)
        tau = falling(self.tau, self.fall, state)
        return window.flat((best_KNP | (open_KNP > tau)) & masked_KNP)


@register("cache.vicinity")
@dataclass(frozen=True)
class VicinityCache(DualCache):
    """Dual cache that also feeds positions near the open block (dInfer's vicinity cache).

    A forward between renewals feeds the block, `before` positions before it and `after` positions
    after it, so that the K/V of these are computed with the block's newest tokens; these K/V are
    not kept. The first `warmup` forwards of a request feed the whole canvas and cache nothing.
    """

    before: Count = 16  # positions fed before the block
    after: Count = 16  # positions fed after the block
    warmup: Count = 4  # forwards before anything is cached
    renews_twice: bool = False  # as released: if warm-up outlasts the first block, renew again
    # two forwards after the first renewal, in the same block

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
