"""Parts of `make perf` on a CUDA device: rounds of a model of 7B shape, and the kernel of logits.

Rounds have random weights and are compared with the roofline: all combinations of k lookahead
branches and window, in bf16 with each mode of hardware.compile and in FP8, with 1,024 cached
positions. Tokens per second are *projected*: measured rounds per second
times the tokens per forward that a paper reports. `--dry` runs the same on the CPU with a small
model, whose times mean nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import cycle, product
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from dllm_bench.api.random_model import (
    DREAM_7B,
    SMALL,
    WARM,
    RoundShape,
    copied_per_s,
    measured_ceilings,
    random_model,
    random_rounds,
    recorded,
    roofline_ms,
    seconds,
)
from dllm_bench.decoding import fused
from dllm_bench.decoding.numerics import read_logits

VOCAB = 152_064  # tokens of Dream-7B
TPF = {0: 5.64, 7: 15.55}  # LoPA Table 7 (D2F, MBPP) and Table 3 (S12: base and 7 lookaheads, MBPP)


@dataclass(frozen=True)
class Bench:
    """Model, device and cases."""

    model: RoundShape
    kinds: tuple[tuple[str, str], ...]
    """Quantisation and mode of hardware.compile."""
    lookaheads: tuple[int, ...] = (0, 1, 3, 7)
    windows: tuple[int, ...] = (32, 64, 96)
    steps: int = 24


def bench(dry: bool) -> Bench | None:
    """Return the cases for this machine; None without a CUDA device, unless for a dry run."""
    if dry:
        kinds = (("none", "none"), ("none", "max"))
        return Bench(RoundShape("cpu", torch.float32, SMALL, 1024, 64), kinds, steps=6)
    if not torch.cuda.is_available():
        return None
    kinds = (("none", "none"), ("none", "default"), ("none", "max"), ("fp8", "default"))
    return Bench(RoundShape("cuda", torch.bfloat16, DREAM_7B, VOCAB, 1024), kinds)


def rounds(dry: bool, quick: bool) -> list[dict[str, Any]]:
    """Return one row for every precision, mode, number of lookahead branches and window."""
    chosen = bench(dry)
    if chosen is None:
        return []
    grid, one = list(product(chosen.lookaheads, chosen.windows)), chosen.model
    rows = []
    for kind, mode in chosen.kinds:
        model = random_model(one.vocab, one.shape, one.device, one.dtype, kind, mode)
        ceilings = measured_ceilings(one.device, one.dtype)
        if kind == "fp8":
            ceilings = replace(ceilings, layers_flop_per_s=fp8_flop_per_s(one.device, one.dtype))
        for k, window in grid[:: len(grid) - 1] if quick else grid:
            made = random_rounds(model, one.prefix, k, window, WARM + chosen.steps)
            round_time_ms = median(forward.ms for forward in made[WARM:])
            floor_ms = median(roofline_ms(one, kind, f, ceilings) for f in made[WARM:])
            rows.append(
                {
                    "precision": str(one.dtype)[6:] if kind == "none" else kind,
                    "compile": mode,
                    "lookaheads": k,
                    "window": window,
                    "prefix": one.prefix,
                    "ms/round": round_time_ms,
                    "rounds/s": 1000 / round_time_ms,
                    "roofline ms": floor_ms,
                    "of roofline, %": 100 * floor_ms / round_time_ms,
                    "projected tokens/s": None if dry else projected(k, round_time_ms),
                    **asdict(ceilings),
                }
            )
        del model
    return rows


def fp8_flop_per_s(device: str, dtype: torch.dtype, side: int = 8192) -> float:
    """Measure the operations per second of large products in FP8."""
    one = torch.ones((), device=device)
    # products of equal numbers are faster
    x = torch.randn(side, side, dtype=dtype, device=device).to(torch.float8_e4m3fn)
    product_s = seconds(lambda: torch._scaled_mm(x, x.T, one, one, out_dtype=dtype), True)
    return 2 * side**3 / product_s


def projected(k: int, round_time_ms: float) -> float | None:
    """Rounds per second times the paper's tokens per forward; None where it reports none."""
    return TPF[k] * 1000 / round_time_ms if k in TPF else None


# --- the kernel that reads the logits ------------------------------------------------------------
#
# It is compared with torch's several passes: bfloat16 logits of 152,064 tokens, with entropy, as a
# score of a 7B model needs them. Several tensors are read in turn, more than the second-level cache
# holds, so that they come from memory. Times of the device are those of a recorded graph; what a
# single call takes when the host starts its kernels is a time of its own. The shortest possible
# time is the bytes over the bandwidth of a large copy in the same call. `--dry` reads a few rows on
# the CPU, where both ways are torch's.

ROWS = (32, 128, 256)  # one window, and several branches of a window
CACHE_BYTES = 2**28  # more than any device's second-level cache
DRY_ROWS = (2,)


def reads(dry: bool) -> list[dict[str, Any]]:
    """Return one result per number of rows; none without a CUDA device and Triton."""
    if not dry and not (torch.cuda.is_available() and fused.works(torch.bfloat16)):
        return []
    device, several = ("cpu", DRY_ROWS) if dry else ("cuda", ROWS)
    copied = copied_per_s(device)
    return [_compared(rows, copied, device) for rows in several]


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
