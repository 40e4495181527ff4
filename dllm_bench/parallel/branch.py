"""Branch parallelism (LoPA, arXiv 2512.16229, §3.3): the branches of a round on several processes.

Branches are dealt like cards. Two exchanges a round: the ratings of all branches (a number each),
and what was found in the winner (token, probability and confidence per window position, and what a
score remembers). From these every process derives the same next branches. K/V come by one of two
protocols: "winner" writes the own branch's first and then the winner's over it, by one broadcast;
"none" relies on block-causal attention, under which what is kept is the same in all branches.
Left out: overlap of an exchange with the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.core.workers import WorkerGroup
from dllm_bench.models.kv import PositionCache

EXCHANGE, COMMIT = "branch exchange", "branch commit"  # names in a profile


@dataclass
class TrafficLog:
    """Bytes that reached a process in each round: facts of the branches, and K/V."""

    exchanged: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def open_round(self) -> None:
        self.exchanged.append(0)
        self.committed.append(0)


class BranchWorkerGroup(WorkerGroup):
    """`size` processes of a group; this one is `rank` of them. commits: the protocol "winner"."""

    def __init__(self, group: dist.ProcessGroup, commits: bool) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.commits = commits
        self.traffic = TrafficLog()
        self._branches = 1
        self._dealt: dict[str, Tensor] = {}

    def deal(
        self, branches: DecodeState, window: Window, plan: ForwardPlan
    ) -> tuple[DecodeState, Window, ForwardPlan]:
        """Every size-th branch. All processes get equally many: some of them twice if need be."""
        if not self.commits:
            check_final(plan, window)
        self.traffic.open_round()
        self._branches = branches.branches
        turns = torch.arange(-(-self._branches // self.size), device=branches.tokens_KL.device)
        index = (self.rank + self.size * turns) % self._branches
        here = branches.take(index)
        self._dealt = dict(here.memo)
        if plan.visible_K is not None:
            plan = replace(plan, visible_K=plan.visible_K.index_select(0, index))
        return here, window.take(index), plan

    def gather(self, rating_K: Tensor) -> Tensor:
        if self._branches == 1:
            return rating_K
        rating_TP = rating_K.new_zeros(len(rating_K), self.size)  # turns, processes
        rating_TP[:, self.rank] = rating_K
        return self._sum(rating_TP.flatten()[: self._branches])

    def keep(self, kv: KVCache, plan: ForwardPlan, winner: Tensor) -> None:
        kv.keep(plan, winner // self.size)  # of the branch evaluated here in the winner's turn
        if not self.commits or self._branches == 1 or plan.store[0] >= plan.store[1]:
            return
        assert isinstance(kv, PositionCache)  # the cache of this package's own denoisers
        with record_function(COMMIT):
            packed = kv.packed(plan)
            owner = int(winner) % self.size
            dist.broadcast(packed, group=self.group, group_src=owner)
            if owner != self.rank:
                kv.unpack(plan, packed)
        self.traffic.committed[-1] += packed.nbytes

    def settle(
        self, winner: Tensor, branches: DecodeState, here: DecodeState, found: tuple[Scores, ...]
    ) -> tuple[DecodeState, tuple[Scores, ...]]:
        if self._branches == 1:
            return here, found
        learned = {k: v for k, v in here.memo.items() if self._dealt.get(k) is not v}
        known = {k: branches.memo[k] for k in here.memo if k not in learned}
        values = [value for scores in found for value in present(scores).values()]
        rows = iter(self._of_winner(winner, [*values, *learned.values()]))
        scores = tuple(replace(s, **{name: next(rows) for name in present(s)}) for s in found)
        state = replace(branches, memo=known).pick(winner)
        state.memo |= dict(zip(learned, rows, strict=True))
        return state, scores

    def _of_winner(self, winner: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
        """The winner's row (1, …) of per-branch tensors, from the process that evaluated it.

        All others add zeros to it, so the host need not know who won. What is given twice (a
        probability that is the confidence) travels once.
        """
        turn = (winner // self.size).reshape(1)
        own = {id(value): shrunk(value.index_select(0, turn)) for value in values}
        packed = torch.cat([row.contiguous().flatten().view(torch.uint8) for row in own.values()])
        packed *= winner % self.size == self.rank
        parts = self._sum(packed).split([row.nbytes for row in own.values()])
        rows = {
            key: part.clone().view(row.dtype).view(row.shape)
            for (key, row), part in zip(own.items(), parts, strict=True)
        }
        return [rows[id(value)].to(value.dtype) for value in values]

    def _sum(self, values: Tensor) -> Tensor:
        """The values of the one process where they are not 0, bit for bit, on every process."""
        with record_function(EXCHANGE):
            dist.all_reduce(values.view(torch.uint8), group=self.group)
        self.traffic.exchanged[-1] += values.nbytes
        return values


def present(scores: Scores) -> dict[str, Tensor]:
    """The tensors of scores by name."""
    values = {part.name: getattr(scores, part.name) for part in fields(scores)}
    return {name: value for name, value in values.items() if value is not None}


def shrunk(values: Tensor) -> Tensor:
    """Token ids, positions and counters fit into 32 bits."""
    return values.int() if values.dtype == torch.int64 else values


def check_final(plan: ForwardPlan, window: Window) -> None:
    """Without a commit only K/V may be kept that are the same in every branch."""
    kept = plan.store[0] < plan.store[1]
    if kept and (plan.attention != "block_causal" or plan.store[1] > window.retired):
        raise DllmBenchError(
            "hardware.commit=none keeps K/V that every branch computes alike, which needs "
            f"block-causal attention and finished blocks; the decoder's cache has {plan.attention} "
            "attention. Set decoder.cache.attention=block_causal (with cache=block), or "
            "hardware.commit=winner."
        )
