"""`WorkerGroup`: the processes that decode one request, as the masked loop uses them.

The loop asks the group which branches of a round this process computes, and for the state and
scores of the winning branch. `ONE_WORKER` computes everything itself; the group of several
processes is in `parallel/branch`.
"""

from __future__ import annotations

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.scores import Scores
from dllm_bench.core.state import DecodeState


class WorkerGroup:
    """The processes that decode a request; this class is the group of one process.

    A group divides the branches of a round among its workers. Every worker holds the same state and
    takes every decision itself from the same values: the ratings of all branches, and state and
    scores of the winner. Only what depends on logits (scores, and what a score remembers) is sent
    from the worker that computed it; logits are never sent.
    """

    def divide(
        self, branches: DecodeState, window: Window, plan: ForwardPlan
    ) -> tuple[DecodeState, Window, ForwardPlan]:
        """The branches of a round that this worker feeds and scores."""
        return branches, window, plan

    def gather(self, rating_K: Tensor) -> Tensor:
        """Ratings of all branches of the round, in order, from those of this worker's branches."""
        return rating_K

    def keep(self, kv: KVCache, plan: ForwardPlan, winner: Tensor) -> None:
        """Store the winner's K/V of `plan.store` (as divided) in the cache of every worker."""
        kv.keep(plan, winner)

    def collect_winner(
        self,
        winner: Tensor,
        branches: DecodeState,
        own: DecodeState,
        scores: tuple[Scores, ...],
    ) -> tuple[DecodeState, tuple[Scores, ...]]:
        """State and scores of the winner; `own` are this worker's branches after scoring."""
        if branches.branches == 1:
            return own, scores
        return own.pick(winner), tuple(one.pick(winner) for one in scores)


ONE_WORKER = WorkerGroup()
