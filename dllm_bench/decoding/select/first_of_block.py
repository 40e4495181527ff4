"""Another selector, but the first forward of a block commits the block's first mask only.

As in Fast-dLLM's caches for Dream: the hidden state that predicts a block's first position lies
before the block, so only the forward over the whole canvas can decode this position, and it decodes
nothing else. The inner selector counts that forward as its own step 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import Need
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.select.steps import COUNTS_STEPS, step_in_block
from dllm_bench.registry import register


@register("select.first_of_block")
@dataclass(frozen=True)
class FirstOfBlock(Select):
    """The first mask of a block in its first forward; `inner` decides everything else."""

    inner: Select
    needs: ClassVar[frozenset[Need]] = COUNTS_STEPS

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step_K, _ = step_in_block(state, window)
        first_KW = window.eligible_KW & (window.eligible_KW.cumsum(1) == 1)
        return torch.where((step_K == 0)[:, None], first_KW, self.inner(scores, window, state))

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.inner.on_stall(scores, window, state)
