"""Stop after a number of forwards, whatever is still masked (quality at a fixed cost).

A prompt costs as many forwards as it takes: positions left over stay masked and are not emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.protocols import Stop
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState


@dataclass(frozen=True)
class Budget(Stop):
    """At most `forwards` model calls per request."""

    forwards: int

    def __post_init__(self) -> None:
        if self.forwards < 1:
            raise DllmBenchError(f"Budget forwards is {self.forwards}; give 1 or more.")

    def finished(self, state: DecodeState) -> Tensor:
        spent = state.forwards >= self.forwards
        return torch.full((state.branches,), spent, device=state.tokens_KL.device)
