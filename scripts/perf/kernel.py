"""The Triton kernel that reads the logits once, compared with torch's several passes, on CUDA.

bfloat16 logits of 152,064 tokens, with entropy, as a score of a 7B model needs them. Several
tensors are read in turn, more than the second-level cache holds, so that they come from memory.
Times of the device are those of a recorded graph; what a single call takes when the host starts its
kernels is a time of its own. The shortest possible time is the bytes over the bandwidth of a large
copy in the same call. `--dry` reads a few rows on the CPU, where both ways are torch's.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch

from dllm_bench.api.random_model import copied_per_s, recorded, seconds
from dllm_bench.decoding import fused
from dllm_bench.decoding.numerics import read_logits

ROWS = (32, 128, 256)  # one window, and several branches of a window
VOCAB = 152_064
CACHE_BYTES = 2**28  # more than any device's second-level cache
DRY_ROWS = (2,)


def reads(dry: bool) -> list[dict[str, Any]]:
    """Return one result per number of rows; none without a CUDA device and Triton."""
    if dry:
        copied = copied_per_s("cpu")
        return [_compared(rows, copied, "cpu") for rows in DRY_ROWS]
    if not torch.cuda.is_available() or not fused.works(torch.bfloat16):
        return []
    copied = copied_per_s("cuda")
    return [_compared(rows, copied, "cuda") for rows in ROWS]


def _compared(rows: int, copied: float, device: str) -> dict[str, Any]:
    """Milliseconds of both ways, share of bandwidth used, and whether both find the same ids."""
    one, cuda = rows * VOCAB * torch.bfloat16.itemsize, device == "cuda"
    several = -(-CACHE_BYTES // one) + 1 if cuda else 1
    tensors = [
        torch.randn(1, rows, VOCAB, dtype=torch.bfloat16, device=device) for _ in range(several)
    ]
    kernel, kernel_s, kernel_call_s = _timed(tensors, cuda)
    with patch.object(fused, "available", lambda *dtypes: False):
        passes, passes_s, passes_call_s = _timed(tensors, cuda)
    return {
        "rows": rows,
        "kernel ms": 1000 * kernel_s,
        "passes ms": 1000 * passes_s,
        "ratio": passes_s / kernel_s,
        "of bandwidth, %": 100 * one / copied / kernel_s,
        "kernel call ms": 1000 * kernel_call_s,
        "passes call ms": 1000 * passes_call_s,
        "same ids": kernel.equal(passes),
    }


def _timed(tensors: list[torch.Tensor], cuda: bool) -> tuple[torch.Tensor, float, float]:
    """Return the ids read, and seconds per tensor: of the device, and of a call."""
    ids_KW, turns = read_logits(tensors[0], entropy=True).ids_KW, cycle(tensors)
    all_in_turn = recorded(lambda: [read_logits(one, entropy=True) for one in tensors], cuda)
    device_s = seconds(all_in_turn, cuda) / len(tensors)
    return ids_KW, device_s, seconds(lambda: read_logits(next(turns), entropy=True), cuda)
