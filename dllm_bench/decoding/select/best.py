"""Commit a fixed number of positions in every forward, the most confident ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.select.steps import most_confident
from dllm_bench.registry import register


@register("select.best")
@dataclass(frozen=True)
class Best(Select):
    """Commits the `number` most confident positions; all if fewer are masked."""

    number: int
    refills: bool = False  # as many as the revision before masked again, if it masked any (ReMDM)
    never_stalls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.number < 1:
            raise DllmBenchError(f"Best number is {self.number}; give 1 or more positions.")

    @property
    def one_per_forward(self) -> bool:  # type: ignore[override]
        """If the number is 1."""
        return self.number == 1 and not self.refills

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        if self.one_per_forward:
            return most_confident(scores, window)
        count_K = torch.full_like(window.eligible_KW[:, 0], self.number, dtype=torch.long)
        if self.refills and state.remasked_K is not None:
            count_K = torch.where(state.remasked_K > 0, state.remasked_K, count_K)
        return most_confident(scores, window, count_K)
