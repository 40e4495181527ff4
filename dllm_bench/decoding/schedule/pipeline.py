"""Pipelined blocks (D2F, arXiv 2508.09192, §4.3): several blocks are open at once.

Each round and branch: one more block opens when the last one is decoded to `tau_add`; a block has
to progress ("fully activated") once its predecessor is decoded to `tau_act`, before that it only
takes what passes the confidence threshold. The prompt counts as decoded, and only open blocks are
fed to the model. A closed branch (EOS found) opens nothing more but finishes what is open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_bench.core.protocols import Schedule, Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.schedule.canvas import (
    check_divides,
    leading,
    masks_per_block,
    open_window,
    survey,
)

OPENED = "pipeline.opened"


@dataclass(frozen=True)
class Pipeline(Schedule):
    """`block` positions per block; tau_add and tau_act are shares of a block's positions."""

    block: int
    tau_add: float
    tau_act: float

    def __post_init__(self) -> None:
        if not (0 <= self.tau_add <= 1 and 0 <= self.tau_act <= 1):
            raise DllmBenchError(
                f"Pipeline has tau_add {self.tau_add} and tau_act {self.tau_act}; "
                "both are shares of a block, from 0 to 1."
            )

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        """One open block at a time when a block opens only after the last one is complete."""
        single = {"one open block at a time"} if self.tau_add == 1 else set()
        return frozenset({"blocks that finish in order", f"blocks of {self.block}"} | single)

    def length(self, prompt_len: int, new: int) -> int:
        check_divides(self.block, new)
        return super().length(prompt_len, new)

    def _decoded(self, branches: DecodeState) -> Tensor:
        """Positions of every block that are not masked, int64 (K, N)."""
        return self.block - masks_per_block(branches, branches.prompt_len, self.block)

    def _due(self, tau: float) -> int:
        """Decoded positions from which a block counts as decoded to the share `tau`."""
        return math.ceil(tau * self.block - 1e-9)

    def open(self, branches: DecodeState, closed_K: Tensor) -> None:
        decoded_KN = self._decoded(branches)
        opened_K = branches.memo.get(OPENED, torch.zeros_like(decoded_KN[:, 0]))
        last_K = decoded_KN.gather(1, (opened_K - 1).clamp(min=0)[:, None])[:, 0]
        ready_K = (opened_K == 0) | (last_K >= self._due(self.tau_add))
        room_K = opened_K < decoded_KN.shape[1]
        branches.memo[OPENED] = opened_K + (ready_K & room_K & ~closed_K)

    def survey(self, branches: DecodeState, closed_K: Tensor) -> Tensor:
        masks_KN = masks_per_block(branches, branches.prompt_len, self.block)
        done_K = leading(masks_KN == 0)
        return survey(masks_KN, done_K, branches.memo[OPENED], branches.prompt_len, self.block)

    def window(self, branches: DecodeState, survey_K3: Tensor, rows: list[list[int]]) -> Window:
        prompt = branches.prompt_len
        window = open_window(branches, survey_K3, rows, prompt, self.block, sees_future=False)
        decoded_KN = self._decoded(branches)
        pushed_KN = torch.ones_like(decoded_KN, dtype=torch.bool)
        pushed_KN[:, 1:] = decoded_KN[:, :-1] >= self._due(self.tau_act)
        first = (window.start - prompt) // self.block
        last = first + window.must_KN.shape[1]
        return replace(window, must_KN=window.must_KN & pushed_KN[:, first:last])
