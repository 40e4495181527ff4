"""Stop after a number of forwards, whatever is still masked (quality at a fixed cost).

Positions that are left over stay masked and are not emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm_bench.core.contracts import Stop, StopFlags
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("stop.budget")
@dataclass(frozen=True)
class Budget(Stop):
    """Finishes a request after a number of forwards."""

    forwards: int  # per request

    def __post_init__(self) -> None:
        if self.forwards < 1:
            raise DllmBenchError(f"Budget forwards is {self.forwards}; give 1 or more.")

    def ended(self, branches: DecodeState) -> StopFlags:
        spent = branches.forwards >= self.forwards
        device = branches.tokens_KL.device
        return StopFlags(finished_K=torch.full((branches.branches,), spent, device=device))
