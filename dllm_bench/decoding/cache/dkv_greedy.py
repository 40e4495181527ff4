"""dKV-Cache "greedy" (arXiv 2505.15781): only what was just decoded and what comes next is fed.

For a selector whose order is known beforehand. A forward feeds the tokens that the forward before
has committed, the positions that this one commits, and of the masks around each of these the
`window` nearest, a left one before the right one at the same distance. Their K/V replace those of
the store, which holds every position; all others are read, masks as they were when last fed. Every
`every`-th forward of a block, the first one included, feeds everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from dllm_bench.core.contracts import Cache
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.denoiser import Attention, ForwardPlan, PositionSets
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.state import MASKED
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import to_device, true_indices
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.cache.steps import step_of_block
from dllm_bench.decoding.select.drawn import DUE
from dllm_bench.registry import register

Array = np.ndarray[Any, Any]
BORN = "dkv_greedy.born"  # host: the forward that committed each position


@register("cache.dkv_greedy")
@dataclass(frozen=True)
class DKVGreedyCache(Cache):
    """Feeds the next positions and their surroundings; worked out on the host."""

    every: int = 2  # forwards of a block between those that feed everything
    window: int = 4  # masks fed around each position that is committed next
    attention: Attention = field(default="full", init=False)
    over_spans: ClassVar[bool] = False
    leaves_masks_out: ClassVar[bool] = True
    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset({Condition.FULL_ATTENTION})
    needs: ClassVar[frozenset[Need]] = frozenset(
        {Need("explore", Condition.ONE_BRANCH), Need("select", Condition.KNOWN_ORDER)}
    )

    def __post_init__(self) -> None:
        if self.every < 1 or self.window < 0:
            raise DllmBenchError(
                f"DKVGreedyCache has every {self.every} and window {self.window}; feed everything "
                "again after 1 or more forwards, and 0 or more masks around a position."
            )

    def on_start(self, round: Round) -> None:
        round.ask(BORN, round.state.born_KL[-1])

    def plan(self, round: Round) -> ForwardPlan:
        return replace(NoCache().plan(round), store=(0, round.window.visible))

    def on_plan(self, round: Round) -> None:
        """Feed what is due and its surroundings; the selector, which acts first, knows what is."""
        branches, window, kv = round.state, round.window, round.kv
        born_L, device = round.on_host(BORN).numpy(), branches.born_KL.device
        due = [p for p in branches.memo[DUE][0].tolist() if born_L[window.start + p] == MASKED]
        if step_of_block(branches, window) % self.every == 0 or not due:
            kind = ForwardKind.REFRESH if kv.kept else ForwardKind.PREFILL
            round.plan = replace(round.plan, kind=kind)
            return
        due_L = np.zeros(len(born_L), dtype=bool)
        due_L[[window.start + place for place in due]] = True
        fed_L = torch.from_numpy(self._around(born_L, due, window.start, branches.forwards))
        fed_L = (fed_L | kv.predicting(torch.from_numpy(due_L)[None])[0])[: window.visible]
        feed_F, read_C = true_indices((fed_L, ~fed_L), device)
        sets = PositionSets(feed_F, read_C, feed_F)
        round.plan = replace(round.plan, sets=sets, scored_M=to_device(due, device))

    def _around(self, born_L: Array, due: Sequence[int], start: int, now: int) -> Array:
        """The last forward's tokens, the positions due, and masks around these, bool (L,)."""
        fed_L, position_L = born_L == now - 1, np.arange(len(born_L))
        fed_L[[start + place for place in due]] = True
        for place in due:
            far_L = 2 * np.abs(position_L - start - place) + (position_L > start + place)
            far_L[fed_L | (born_L != MASKED)] = 2 * len(far_L)
            nearest = far_L.argsort()[: self.window]
            fed_L[nearest[far_L[nearest] < 2 * len(far_L)]] = True
        return fed_L
