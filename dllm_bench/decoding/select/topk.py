"""Commit the most confident positions in a fixed number of steps per block (LLaDA Algorithm 5).

A block entered with m masks and S steps commits floor(m / S) positions per step, one more in the
first m mod S steps. Without `steps`, S is the block length: one token per forward.

`released` is the code of Learn2PD's authors, where a filter commits positions too: `torch.topk`
over the canvas takes as many positions as the step has, also when the block has fewer masks left.
The others have confidence -inf: committed positions, which stay, and masks behind the block, which
are committed to their candidates. Which ones is the order of `torch.topk`; the host waits for
their number.

Of equal confidences the lower positions count, or, with `ties`, those that `torch.topk` takes, as
published.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Reads, Scores, Select
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.select.steps import (
    COUNTS_STEPS,
    Ties,
    most_confident_by,
    step_in_block,
    taken_by_topk,
    ties_needs,
)
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

BEYOND = MemoKey[Tensor]("topk.beyond")  # positions behind the open block, bool (K, W)


@register("select.topk")
@dataclass(frozen=True)
class TopK(Select):
    """Commits an equal number of positions in each step."""

    steps: int | None = None  # S, forwards per block; None: as many as the block has positions
    released: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)  # see the head of this file
    ties: Ties = field(default="lower", metadata=DEFAULT_LEFT_OUT)  # see `steps.Ties`
    never_stalls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self, "ties", self.ties, Ties)
        if self.steps is not None and self.steps < 1:
            raise DllmBenchError(f"TopK steps is {self.steps}; give at least 1 step per block.")

    @property
    def _reaches_beyond(self) -> bool:
        """If it is the released code; one position per step never exceeds the masks."""
        return self.released and self.steps is not None

    @property
    def spans(self) -> tuple[bool, bool]:  # type: ignore[override]
        """To the last block, if it commits behind the open one."""
        return False, self._reaches_beyond

    @property
    def reads_rows(self) -> Reads:  # type: ignore[override]
        """The whole window, if it commits candidates behind the open block."""
        return "window" if self._reaches_beyond else "masked"

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        """Step counts, and rows of the whole canvas where it commits beyond the block."""
        canvas = {Need("cache", Condition.WHOLE_CANVAS), Need("explore", Condition.ONE_BRANCH)}
        always = COUNTS_STEPS | ties_needs(self.ties)
        return always | canvas if self._reaches_beyond else always

    @property
    def one_per_forward(self) -> bool:  # type: ignore[override]
        """If there are as many steps as positions."""
        return self.steps is None

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        if self.steps is None:
            return most_confident_by(self.ties, scores, window, None, state.length)
        step_K, total_K = step_in_block(state, window)
        count_K = total_K // self.steps + (step_K < total_K % self.steps)
        if not self.released:
            return most_confident_by(self.ties, scores, window, count_K, state.length)
        where_KW = taken_by_topk(scores, window, int(count_K), state.length)
        state.memo[BEYOND] = where_KW & ~window.eligible_KW
        return where_KW & window.eligible_KW

    def on_commit(self, round: Round) -> None:
        """Commit what lies behind the open block."""
        beyond_KW = round.state.memo.get(BEYOND)
        if beyond_KW is not None:
            round.state.commit(beyond_KW, round.scores.ids_KW, round.window.start)
