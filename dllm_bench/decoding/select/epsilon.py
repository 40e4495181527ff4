"""Dream's time schedule: t runs evenly from 1 to eps in S steps (`diffusion_generate`).

Step i commits the n = int(m (1 - t[i+1] / t[i])) surest of the m masks left, the last step all of
them; m is counted over the open block, for Dream the whole generation (schedule `full`). The
integer part makes early steps empty when S is close to m; the published sampler spends these
forwards and `idle` does too, without it every forward commits at least the surest position.
With `alg_temp` these n are drawn one after the other from softmax(confidence / alg_temp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import generator, shaken
from dllm_bench.decoding.select.steps import COUNTS_STEPS, most_confident, step_in_block
from dllm_bench.registry import register


@register("select.epsilon")
@dataclass(frozen=True)
class Epsilon(Select):
    """`steps` forwards per block (None: as many as it has positions), `eps` the last time.

    alg_temp: Dream's temperature of the positions, None for the surest.
    """

    steps: int | None = None
    eps: float = 1e-3
    idle: bool = False
    alg_temp: float | None = None
    needs: ClassVar[frozenset[tuple[str, str]]] = COUNTS_STEPS

    def __post_init__(self) -> None:
        if (self.steps is not None and self.steps < 1) or not 0 < self.eps < 1:
            raise DllmBenchError(
                f"{type(self).__name__} has steps {self.steps} and eps {self.eps}; "
                "give at least 1 step and an eps between 0 and 1."
            )
        if self.alg_temp is not None and self.alg_temp <= 0:
            raise DllmBenchError(
                f"{type(self).__name__} has alg_temp {self.alg_temp}; give a temperature above 0, "
                "or null for the surest positions."
            )

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step_K, _ = step_in_block(state, window)
        masks_K = window.eligible_KW.sum(1)
        if self.alg_temp is not None:
            numbers = generator(state, "positions")
            drawn_KW = shaken(scores.confidence_KW, self.alg_temp, numbers, window)
            scores = replace(scores, confidence_KW=drawn_KW)
        return most_confident(scores, window, (masks_K * self._share(step_K, window)).long())

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = super().on_stall(scores, window, state)
        return where_KW & (not self.idle), ids_KW

    def _share(self, step_K: Tensor, window: Window) -> Tensor:
        """Share of the masks left that step `step` commits, (K,)."""
        share_S = shares(self._steps(window), self.eps, step_K.device)
        return share_S[step_K.clamp(max=len(share_S) - 1)]

    def _steps(self, window: Window) -> int:
        size = min(window.block, window.width)
        if self.steps is not None and self.steps > 2 * size:
            raise DllmBenchError(
                f"{type(self).__name__} has {self.steps} steps for {size} positions, most of which "
                f"would commit nothing; set steps to {size} or less (null: one per position)."
            )
        return self.steps or size


@cache
def shares(steps: int, eps: float, device: torch.device) -> Tensor:
    """1 - t[i+1] / t[i] of Dream's time schedule, 1 in the last step; (steps,)."""
    time = torch.linspace(1, eps, steps + 1, device=device)
    share_S = 1 - time[1:] / time[:-1]
    share_S[-1] = 1
    return share_S
