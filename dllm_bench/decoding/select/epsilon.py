"""Dream's time schedule: t runs evenly from 1 to eps in S steps (`diffusion_generate`).

Step i commits the n = int(m (1 - t[i+1] / t[i])) most confident of the m masks left, the last step
all of them. m counts the open block, which for Dream is the whole generation (schedule `full`).
Early steps are empty when S is close to m; the published sampler spends these forwards, and so does
`idle`. Without it every forward commits at least the most confident position. With `alg_temp` the n
positions are drawn without replacement from softmax(confidence / alg_temp).

Equal confidences are common after a top-p cut, where one token is left at many positions. Of them
the lower positions count, or, with `ties`, those that `torch.topk` takes, as published.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import add_gumbel, generator
from dllm_bench.decoding.select.steps import (
    COUNTS_STEPS,
    Ties,
    most_confident_by,
    step_in_block,
    ties_needs,
)
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("select.epsilon")
@dataclass(frozen=True)
class Epsilon(Select):
    """Commits the share of the masks that Dream's time schedule gives to a step."""

    steps: int | None = None  # S, forwards per block; None: as many as it has positions
    eps: float = 1e-3  # the last time
    idle: bool = False  # whether steps may commit nothing, as published
    alg_temp: float | None = None  # temperature of the positions; None: the most confident ones
    ties: Ties = field(default="lower", metadata=DEFAULT_LEFT_OUT)  # see `steps.Ties`

    def __post_init__(self) -> None:
        check_choice(self, "ties", self.ties, Ties)
        if (self.steps is not None and self.steps < 1) or not 0 < self.eps < 1:
            raise DllmBenchError(
                f"{type(self).__name__} has steps {self.steps} and eps {self.eps}; "
                "give at least 1 step and an eps between 0 and 1."
            )
        if self.alg_temp is not None and self.alg_temp <= 0:
            raise DllmBenchError(
                f"{type(self).__name__} has alg_temp {self.alg_temp}; give a temperature above 0, "
                "or null for the most confident positions."
            )

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        """Step counts, and what `ties` needs."""
        return COUNTS_STEPS | ties_needs(self.ties)

    @property
    def one_per_forward(self) -> bool:  # type: ignore[override]
        """If there are as many steps as positions."""
        return self.steps is None

    @property
    def for_drawn_tokens(self) -> bool:  # type: ignore[override]
        """Dream evaluates its sampler above temperature 0."""
        return True

    @property
    def uses_seed(self) -> bool:  # type: ignore[override]
        """If positions are drawn."""
        return self.alg_temp is not None

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step_K, _ = step_in_block(state, window)
        masks_K = window.eligible_KW.sum(1)
        if self.alg_temp is not None:
            numbers = generator(state, "positions")
            drawn_KW = add_gumbel(scores.confidence_KW, self.alg_temp, numbers, window)
            scores = replace(scores, confidence_KW=drawn_KW)
        count_K = (masks_K * self._share(step_K, window)).long()
        return most_confident_by(self.ties, scores, window, count_K, state.length)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = super().on_stall(scores, window, state)
        return where_KW & (not self.idle), ids_KW

    def _share(self, step_K: Tensor, window: Window) -> Tensor:
        """Share of the masks left that each branch commits in its step, (K,)."""
        share_X = shares(self._steps(window), self.eps, step_K.device)
        return share_X[step_K.clamp(max=len(share_X) - 1)]

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
    """1 - t[i+1] / t[i] of Dream's time schedule, 1 in the last step, (steps,)."""
    time = torch.linspace(1, eps, steps + 1, device=device)
    share_X = 1 - time[1:] / time[:-1]
    share_X[-1] = 1
    return share_X
