"""Commit in an order drawn before a block's first forward (LLaDA's `random` remasking).

A block entered with m masks and S steps commits floor(m / S) positions per step, one more in the
first m mod S steps, as `TopK` does. Which ones come next is known before a forward, so a cache can
feed these alone (dKV-Cache "greedy"). Drawing all of a block at once is drawing anew in every step:
what is left is in random order either way. Drawn on the host, so that nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.transfer import to_device
from dllm_bench.decoding.cache.steps import step_of_block
from dllm_bench.decoding.numerics import generator
from dllm_bench.decoding.select.steps import COUNTS_STEPS
from dllm_bench.registry import register

BLOCK = MemoKey[int]("drawn.block")  # position at which the block begins that was drawn for
DUE = MemoKey[Tensor]("drawn.due")
"""Places of the window that this forward commits, first to last, int64 (1, X), on the host; what is
committed already may be there too."""
ORDER = MemoKey[Tensor]("drawn.order")  # places of the window, int64 (1, X), on the host


@register("select.drawn")
@dataclass(frozen=True)
class Drawn(Select):
    """Commits an equal number of positions in each step, in random order."""

    steps: int | None = None  # S, forwards per block; None: as many as the block has masks
    by_position: ClassVar[bool] = True
    uses_seed: ClassVar[bool] = True
    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset({Condition.KNOWN_ORDER})
    needs: ClassVar[frozenset[Need]] = COUNTS_STEPS | {Need("explore", Condition.ONE_BRANCH)}

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise DllmBenchError(f"Drawn steps is {self.steps}; give at least 1 step per block.")

    @property
    def one_per_forward(self) -> bool:  # type: ignore[override]
        """If there are as many steps as positions."""
        return self.steps is None

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        due_1W = torch.zeros(1, window.width, dtype=torch.bool)
        due_1W[0, self.due(state, window)] = True
        return to_device(due_1W, window.eligible_KW.device)

    def on_plan(self, round: Round) -> None:
        """Let the cache know what this forward commits."""
        round.state.memo[DUE] = self.due(round.state, round.window)[None]

    def due(self, state: DecodeState, window: Window) -> Tensor:
        """Places of the window that this forward commits, whatever its scores are."""
        step = step_of_block(state, window) + 1
        if state.memo.get(BLOCK) != window.start:
            state.memo[BLOCK] = window.start
            state.memo[ORDER] = self.order(state, window)[None]
        order_X = state.memo[ORDER][0]
        share, rest = divmod(len(order_X), self.steps or len(order_X))
        return order_X[: step * share + min(step, rest)]

    def order(self, state: DecodeState, window: Window) -> Tensor:
        """Where in the window masks are committed, first to last, int64 (X,), on the host."""
        first = max(window.start, state.prompt_len) - window.start
        numbers = generator(state, "order", "cpu")
        return first + torch.randperm(window.width - first, generator=numbers)
