"""Commit the surest positions in a fixed number of steps per block (LLaDA Algorithm 5).

A block entered with m masks and S steps commits floor(m / S) positions per step, one more in the
first m mod S steps. Without `steps`, S is the block length: one token per forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.protocols import Scores, Select, Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import stable_top

MEMO = "topk.block_total_step"


@dataclass(frozen=True)
class TopK(Select):
    """`steps` forwards per block (None: as many as the block has positions)."""

    steps: int | None = None
    needs: ClassVar[dict[str, str]] = {"schedule": "one open block at a time"}

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise DllmBenchError(f"TopK steps is {self.steps}; give at least 1 step per block.")

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        count_K = self._count(window, state)
        eligible_KW = window.eligible_KW
        confidence_KW = scores.confidence_KW.masked_fill(~eligible_KW, -torch.inf)
        order_KW = stable_top(confidence_KW, eligible_KW.shape[1])
        chosen_KW = torch.arange(eligible_KW.shape[1], device=count_K.device) < count_K[:, None]
        return torch.zeros_like(eligible_KW).scatter_(1, order_KW, chosen_KW) & eligible_KW

    def _count(self, window: Window, state: DecodeState) -> Tensor:
        """Positions due in this step, (K,); remembers (block, masks at entry, step) per branch."""
        masks_K = window.eligible_KW.sum(1)
        fresh_K3 = torch.stack(
            [torch.full_like(masks_K, window.start), masks_K, torch.zeros_like(masks_K)], dim=1
        )
        memo_K3 = state.memo.get(MEMO, fresh_K3)
        memo_K3 = torch.where(memo_K3[:, :1] == window.start, memo_K3, fresh_K3)
        _, total_K, step_K = memo_K3.unbind(1)
        steps = self.steps or window.block
        state.memo[MEMO] = torch.stack([memo_K3[:, 0], total_K, step_K + 1], dim=1)
        return total_K // steps + (step_K < total_K % steps)
