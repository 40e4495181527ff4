"""`WorkerGroup`: the processes that decode one request together, as the loop sees them.

The masked loop asks the group which branches of a round this process computes, and for the state
and scores of the winning branch. `ONE_WORKER` computes everything itself; groups of several
processes are in `parallel/branch`.
"""

from __future__ import annotations

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.state import DecodeState


class WorkerGroup:
    """The processes that decode a request together, and what a process does that is alone.

    A crew shares out the branches of a round. Every process holds the same state and takes every
    decision itself, from the same facts: the ratings of all branches and what was found in the
    winner. Only what follows from logits (scores, and what a score remembers) has to be brought
    from where they were computed; logits never travel.
    """

    def deal(
        self, branches: DecodeState, window: Window, plan: ForwardPlan
    ) -> tuple[DecodeState, Window, ForwardPlan]:
        """The branches of a round that are fed and scored here."""
        return branches, window, plan

    def gather(self, rating_K: Tensor) -> Tensor:
        """Ratings of all branches of the round, in order, from those of the branches here."""
        return rating_K

    def keep(self, kv: KVCache, plan: ForwardPlan, winner: Tensor) -> None:
        """Have the winner's K/V of `plan.store` (as dealt here) in the cache of every process."""
        kv.keep(plan, winner)

    def settle(
        self, winner: Tensor, branches: DecodeState, here: DecodeState, found: tuple[Scores, ...]
    ) -> tuple[DecodeState, tuple[Scores, ...]]:
        """The winner's state and scores; `here` are the dealt branches after they were scored."""
        if branches.branches == 1:
            return here, found
        return here.pick(winner), tuple(scores.pick(winner) for scores in found)


ONE_WORKER = WorkerGroup()
