"""Sparse-dLLM (arXiv 2508.02558): each layer keeps the K/V that the open block attends to most.

The first two forwards of a block feed everything. In the second one, every layer rates each
position outside of the block: its key times the block's mean query, averaged over heads, then the
maximum over `kernel` neighbours (the prefix's last position and the suffix's first are neighbours).
The layer keeps the share `keep` of the positions with the highest ratings. Later forwards feed the
block and read what each layer kept. The maximum produces equal ratings: the lower position is kept
or, with `released_ties`, the first in the order of `torch.topk`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from dllm_bench.core.contracts import Cache, Round
from dllm_bench.core.declared import Positive, Proportion
from dllm_bench.core.decoder import ONE_BRANCH, ONE_OPEN_BLOCK, Condition, needing
from dllm_bench.core.denoiser import ForwardPlan, PositionSets
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant
from dllm_bench.decoding.numerics import stable_top
from dllm_bench.methods.caches import NoCache, step_of_block
from dllm_bench.registry import register


@dataclass(frozen=True)
class MostAttended:
    """Chooses the positions a layer keeps; implements `core.denoiser.AttentionProbe`."""

    block: tuple[int, int]  # the open block
    keep: float
    kernel: int
    released_ties: bool

    def __call__(self, query_AXE: Tensor, key_GXE: Tensor, *rest: object) -> Tensor:
        start, stop = self.block
        mean_GQE = query_AXE[:, start:stop].mean(1).unflatten(0, (len(key_GXE), -1))
        rating_X = (mean_GQE @ key_GXE.transpose(1, 2)).mean((0, 1))
        position_X = torch.arange(len(rating_X), device=rating_X.device)
        outside_O = torch.cat([position_X[:start], position_X[stop:]])
        if not len(outside_O):
            return outside_O
        pooled_1O = max_pool1d(rating_X[outside_O][None], self.kernel, 1, self.kernel // 2)
        number = int(len(outside_O) * self.keep)
        if self.released_ties:
            best_C = pooled_1O[0].topk(number).indices
        else:
            best_C = stable_top(pooled_1O, number)[0]
        return outside_O[best_C].sort().values


@register("cache.sparse")
@dataclass(frozen=True)
class SparseCache(Cache):
    """Caches, in each layer, the positions that the block attends to most."""

    keep: Proportion = 0.5  # share of the positions outside of the block
    kernel: Positive = 3  # width of the maximum over neighbours, an odd number
    released_ties: bool = False  # equal ratings in the order of `torch.topk`, as released
    gives = frozenset({Condition.FED_WINDOW, Condition.FULL_ATTENTION})
    needs = needing(ONE_BRANCH, ONE_OPEN_BLOCK)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise DllmBenchError(
                f"SparseCache has kernel {self.kernel}; give an odd number of positions."
            )

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        step, plan = step_of_block(branches, window), NoCache().plan(round)
        span, device = (0, window.visible), branches.born_KL.device
        everything_X = constant(range(*span), device)
        nothing_X = everything_X[:0]
        if step == 0:
            return plan
        if step == 1:
            sets = PositionSets(everything_X, nothing_X, everything_X)
            rule = MostAttended(plan.rows, self.keep, self.kernel, self.released_ties)
            kind = ForwardKind.REFRESH if kv.kept else ForwardKind.PREFILL
            return replace(plan, kind=kind, store=span, sets=sets, probe=rule)
        assert kv.probed is not None
        sets = PositionSets(everything_X[slice(*plan.rows)], kv.probed, nothing_X)
        return replace(plan, feed=plan.rows, sets=sets)
