"""Several stop rules at once: closed or finished as soon as one of them says so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dllm_bench.core.protocols import Scores, Stop, Window
from dllm_bench.core.state import DecodeState


@dataclass(frozen=True)
class AnyOf(Stop):
    """`rules` are asked in order; the shortest canvas wins."""

    rules: tuple[Stop, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    def closed(self, branches: DecodeState) -> Tensor:
        return reduce(torch.logical_or, (rule.closed(branches) for rule in self.rules))

    def finished(self, state: DecodeState) -> Tensor:
        return reduce(torch.logical_or, (rule.finished(state) for rule in self.rules))

    def shorten(self, state: DecodeState, scores: Scores, window: Window) -> int | None:
        lengths = [rule.shorten(state, scores, window) for rule in self.rules]
        return min((length for length in lengths if length is not None), default=None)
