"""One read of the logits by the Triton kernel, beside torch's own passes, on a CUDA device.

bfloat16 logits of 152,064 tokens, with entropy, as a score of a 7B model asks. Several tensors take
turns, more than the second-level cache holds, so that they are read from memory. The floor is their
bytes over the bandwidth of a large copy in the same call. `--dry` reads a few rows on the CPU,
where both are torch's passes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch

from dllm_bench.decoding import fused
from dllm_bench.decoding.numerics import read_logits
from scripts.perf.device import copied_per_s, seconds

ROWS = (32, 128, 256)  # a window, and a window's branches
VOCAB = 152_064
CACHE_BYTES = 2**28  # more than any device's second-level cache
DRY_ROWS = (2,)


def reads(dry: bool) -> list[dict[str, Any]]:
    """One row per number of rows; none without a CUDA device and Triton."""
    if dry:
        copied = copied_per_s("cpu")
        return [_compared(rows, copied, "cpu") for rows in DRY_ROWS]
    if not torch.cuda.is_available() or not fused.works():
        return []
    copied = copied_per_s("cuda")
    return [_compared(rows, copied, "cuda") for rows in ROWS]


def _compared(rows: int, copied: float, device: str) -> dict[str, Any]:
    """Milliseconds of both, their distance from the floor, and whether they find the same ids."""
    one, cuda = rows * VOCAB * torch.bfloat16.itemsize, device == "cuda"
    several = -(-CACHE_BYTES // one) + 1 if cuda else 1
    asked = [
        torch.randn(1, rows, VOCAB, dtype=torch.bfloat16, device=device) for _ in range(several)
    ]
    kernel, kernel_s = read_logits(asked[0], entropy=True), seconds(_in_turn(asked), cuda)
    with patch.object(fused, "available", lambda _: False):
        passes, passes_s = read_logits(asked[0], entropy=True), seconds(_in_turn(asked), cuda)
    return {
        "rows": rows,
        "kernel ms": 1000 * kernel_s,
        "passes ms": 1000 * passes_s,
        "ratio": passes_s / kernel_s,
        "of bandwidth, %": 100 * one / copied / kernel_s,
        "same ids": kernel.ids_KW.equal(passes.ids_KW),
    }


def _in_turn(tensors: list[torch.Tensor]) -> Callable[[], object]:
    turns = cycle(tensors)
    return lambda: read_logits(next(turns), entropy=True)
