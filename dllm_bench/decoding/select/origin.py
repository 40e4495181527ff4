"""Dream's `origin`: every mask is committed with the same chance, whatever its confidence.

The chance is the share of Dream's time schedule, 1 - t[i+1] / t[i], and 1 in the last step; tokens
are the candidates. Each mask gets one uniform number per step, in the order of the positions, from
a generator that is seeded for each request: the stream of `torch.manual_seed(seed)` on the CPU.
All numbers are drawn when the first block is entered. That gives the same stream without a copy to
the host of how many masks are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.select.epsilon import Epsilon
from dllm_bench.decoding.select.steps import step_in_block
from dllm_bench.registry import register

NUMBERS = MemoKey[Tensor]("origin.numbers")  # the request's uniform numbers, (K, X)
USED = MemoKey[Tensor]("origin.used")  # how many of them are used, (K,)


@register("select.origin")
@dataclass(frozen=True)
class Origin(Epsilon):
    """Commits masks at random; steps, eps and idle as in `Epsilon`."""

    seed: int = 0  # of the stream

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alg_temp is not None or self.ties != "lower":
            raise DllmBenchError(
                f"Origin has alg_temp {self.alg_temp} and ties {self.ties}, but its chance is the "
                "same at every mask; use null and lower."
            )

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step_K, _ = step_in_block(state, window)
        share_K = self._share(step_K, window)
        return window.eligible_KW & (self._draw(window, state) < share_K[:, None])

    def _draw(self, window: Window, state: DecodeState) -> Tensor:
        """The next number of the stream at every mask, (K, W)."""
        numbers_KX, used_K = self._stream(window, state)
        rank_KW = window.eligible_KW.cumsum(1) - 1
        state.memo[USED] = used_K + window.eligible_KW.sum(1)
        at_KW = (used_K[:, None] + rank_KW).clamp(min=0, max=numbers_KX.shape[1] - 1)
        return numbers_KX.gather(1, at_KW)

    def _stream(self, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """The request's numbers, enough for all steps, and how many of them are used."""
        if NUMBERS not in state.memo:
            count = self._steps(window) * (state.length - state.prompt_len)
            numbers = torch.rand(count, generator=torch.Generator().manual_seed(self.seed))
            device, branches = state.tokens_KL.device, state.branches
            state.memo[NUMBERS] = numbers.to(device).expand(branches, -1)
            state.memo[USED] = torch.zeros(branches, dtype=torch.long, device=device)
        return state.memo[NUMBERS], state.memo[USED]
