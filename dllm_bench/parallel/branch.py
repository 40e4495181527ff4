"""Branch parallelism (LoPA, arXiv 2512.16229, §3.3): the branches of a round on several workers.

Branch k goes to worker k mod size. There are two exchanges a round: the ratings of all branches
(a number each), and the winner's scores (token, probability and confidence per window position)
with what a score remembers. From these every worker makes the same next branches. K/V are kept by
one of two protocols: "winner" stores the own branch's first and then overwrites it with the
winner's, by one all-reduce; "none" relies on block-causal attention, under which the K/V that are
kept are the same in all branches. Left out: overlap of an exchange with the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.round import WorkerGroup
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.models.kv import PositionCache

EXCHANGE, COMMIT = "branch exchange", "branch commit"  # names in a profile


@dataclass
class TrafficLog:
    """Bytes that a worker received, one number per round."""

    exchanged: list[int] = field(default_factory=list)  # ratings, scores and memo
    committed: list[int] = field(default_factory=list)  # K/V

    def open_round(self) -> None:
        """Begin the count of a round."""
        self.exchanged.append(0)
        self.committed.append(0)


class BranchWorkerGroup(WorkerGroup):
    """The workers of a process group, `size` of them; this one is `rank`.

    commits: whether the winner's K/V are sent (the protocol "winner").
    """

    def __init__(self, group: dist.ProcessGroup, commits: bool) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.commits = commits
        if not commits:  # every worker keeps K/V of its own branch
            self.needs = {"hardware.commit=none": frozenset({Need("cache", Condition.FINAL_KV)})}
        self.traffic = TrafficLog()
        self._branches = 1
        self._before: dict[MemoKey[Tensor], Tensor] = {}  # memo before this worker's scores

    def divide(
        self, branches: DecodeState, window: Window, plan: ForwardPlan
    ) -> tuple[DecodeState, Window, ForwardPlan]:
        """Every size-th branch. All workers get equally many; a branch may go to two of them."""
        self.traffic.open_round()
        self._branches = branches.branches
        turns = torch.arange(-(-self._branches // self.size), device=branches.tokens_KL.device)
        index = (self.rank + self.size * turns) % self._branches
        own = branches.take(index)
        self._before = own.memo.tensors()
        if plan.visible_K is not None:
            plan = replace(plan, visible_K=plan.visible_K.index_select(0, index))
        if plan.added_KFH is not None:
            plan = replace(plan, added_KFH=plan.added_KFH.index_select(0, index))
        return own, window.take(index), plan

    def gather(self, rating_K: Tensor) -> Tensor:
        if self._branches == 1:
            return rating_K
        rating_XX = rating_K.new_zeros(len(rating_K), self.size)  # branches of a worker, workers
        rating_XX[:, self.rank] = rating_K
        return self._sum(rating_XX.flatten()[: self._branches])

    def keep(self, kv: KVCache, plan: ForwardPlan, winner: Tensor) -> None:
        kv.keep(plan, winner // self.size)  # this worker's branch with the winner's index
        if not self.commits or self._branches == 1 or not plan.stores:
            return
        assert isinstance(kv, PositionCache)  # of the denoisers of this package
        with record_function(COMMIT):
            packed = self._winners(winner, kv.packed(plan))
            dist.all_reduce(packed.view(torch.uint8), group=self.group)
            kv.unpack(plan, packed)
        self.traffic.committed[-1] += packed.nbytes

    def collect_winner(
        self,
        winner: Tensor,
        branches: DecodeState,
        own: DecodeState,
        scores: tuple[Scores, ...],
    ) -> tuple[DecodeState, tuple[Scores, ...]]:
        if self._branches == 1:
            return own, scores
        memo = own.memo.tensors()
        learned = {key: v for key, v in memo.items() if self._before.get(key) is not v}
        values = [value for one in scores for value in one.tensors().values()]
        rows = iter(self._of_winner(winner, [*values, *learned.values()]))
        scores = tuple(one.map(lambda _: next(rows)) for one in scores)
        state = branches.pick(winner)
        for key, row in zip(learned, rows, strict=True):
            state.memo[key] = row
        for number, value in own.memo.numbers().items():
            state.memo[number] = value
        return state, scores

    def _of_winner(self, winner: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
        """The winner's row (1, …) of per-branch tensors, from the worker that computed it.

        A tensor that is given twice (a probability that is the confidence) is sent once.
        """
        turn = (winner // self.size).reshape(1)
        own = {id(value): shrunk(value.index_select(0, turn)) for value in values}
        packed = torch.cat([row.contiguous().flatten().view(torch.uint8) for row in own.values()])
        parts = self._sum(self._winners(winner, packed)).split([row.nbytes for row in own.values()])
        rows = {
            key: part.clone().view(row.dtype).view(row.shape)
            for (key, row), part in zip(own.items(), parts, strict=True)
        }
        return [rows[id(value)].to(value.dtype) for value in values]

    def _winners(self, winner: Tensor, packed: Tensor) -> Tensor:
        """The values (X,) on the worker that computed the winner, zeros on all others: their sum
        over the workers is the winner's, bit for bit, and the host need not know who that is.
        """
        packed.view(torch.uint8).mul_(winner % self.size == self.rank)
        return packed

    def _sum(self, values: Tensor) -> Tensor:
        """On every worker, the values of the only worker where they are not 0, bit for bit."""
        with record_function(EXCHANGE):
            dist.all_reduce(values.view(torch.uint8), group=self.group)
        self.traffic.exchanged[-1] += values.nbytes
        return values


def shrunk(values: Tensor) -> Tensor:
    """int64 as int32: token ids, positions and counters fit."""
    return values.int() if values.dtype == torch.int64 else values
