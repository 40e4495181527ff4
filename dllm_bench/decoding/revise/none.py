"""No revision: what is committed stays (every decoder but those that edit or re-mask)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Revise, Scores
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("revise.none")
@dataclass(frozen=True)
class NoRevision(Revise):
    """Changes nothing and reads nothing."""

    revises: ClassVar[bool] = False
    reads_committed: ClassVar[bool] = False
    by_position: ClassVar[bool] = False
    forwards_per_position: ClassVar[int] = 2

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> None:
        return None
