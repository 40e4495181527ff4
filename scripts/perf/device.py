"""Rounds of a model of 7B shape with random weights on a CUDA device, compared with its roofline.

All combinations of k lookahead branches, window, and bf16 or FP8, with 1,024 cached positions. The
roofline of a round is the longer of two times: its bytes over the measured bandwidth, and its
operations over the measured rate; both ceilings are measured in the same call. Tokens per second
are *projected*: measured rounds per second times the tokens per forward that a paper reports.
`--dry` runs the same on the CPU with a small model, whose times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch

from dllm_bench.api.random_model import DREAM_7B, random_model, round_ms

TPF = {0: 5.64, 7: 15.55}  # LoPA Table 7 (D2F, MBPP) and Table 3 (S12: base and 7 lookaheads, MBPP)
SMALL = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 128}


@dataclass(frozen=True)
class Bench:
    """Model, device and cases."""

    device: str
    dtype: torch.dtype
    shape: dict[str, int]
    vocab: int
    prefix: int
    kinds: tuple[str, ...]
    lookaheads: tuple[int, ...] = (0, 1, 3, 7)
    windows: tuple[int, ...] = (32, 64, 96)
    steps: int = 24


def bench(dry: bool) -> Bench | None:
    """The cases for this machine; None without a CUDA device, unless for a dry run."""
    if dry:
        return Bench("cpu", torch.float32, SMALL, 1024, 64, ("none",), steps=6)
    if not torch.cuda.is_available():
        return None
    return Bench("cuda", torch.bfloat16, DREAM_7B, 152_064, 1024, ("none", "fp8"))


def rounds(dry: bool, quick: bool) -> list[dict[str, Any]]:
    """One row for every precision, number of lookahead branches and window."""
    chosen = bench(dry)
    if chosen is None:
        return []
    grid = list(product(chosen.lookaheads, chosen.windows))
    rows = []
    for kind in chosen.kinds:
        model = random_model(
            chosen.vocab, chosen.shape, chosen.device, chosen.dtype, quantization=kind
        )
        ceilings = measured_ceilings(chosen, kind)
        for k, window in grid[:: len(grid) - 1] if quick else grid:
            round_time_ms = round_ms(model, chosen.prefix, k, window, chosen.steps)
            floor_ms = roofline_ms(chosen, kind, k, window, ceilings)
            rows.append(
                {
                    "precision": str(chosen.dtype)[6:] if kind == "none" else kind,
                    "lookaheads": k,
                    "window": window,
                    "prefix": chosen.prefix,
                    "ms/round": round_time_ms,
                    "rounds/s": 1000 / round_time_ms,
                    "roofline ms": floor_ms,
                    "of roofline, %": 100 * floor_ms / round_time_ms,
                    "projected tokens/s": None if dry else projected(k, round_time_ms),
                    **ceilings,
                }
            )
        del model
    return rows


def projected(k: int, round_time_ms: float) -> float | None:
    """Rounds per second times the paper's tokens per forward; None where it reports none."""
    return TPF[k] * 1000 / round_time_ms if k in TPF else None


# --- the roofline -------------------------------------------------------------------------------


def layer_parameters(shape: dict[str, int]) -> int:
    """Number of weights in the linear layers of all transformer blocks."""
    width, kv = shape["width"], shape["width"] * shape["kv_heads"] // shape["heads"]
    return shape["layers"] * (2 * width * (width + kv) + 3 * width * shape["mlp"])


def roofline_ms(chosen: Bench, kind: str, k: int, window: int, ceilings: dict[str, float]) -> float:
    """The shortest possible time of a round of k + 1 branches, under the measured ceilings.

    Bytes: every weight, the cached K/V and the logits once. Operations: two per weight and row, and
    four per head dimension, query and key. FP8 halves the bytes of layers, not of the head.
    """
    shape, rows = chosen.shape, (k + 1) * window
    size = torch.empty(0, dtype=chosen.dtype).element_size()
    layers, head = layer_parameters(shape), shape["width"] * chosen.vocab
    kv = shape["width"] * shape["kv_heads"] // shape["heads"]
    cached = 2 * shape["layers"] * kv * chosen.prefix
    moved = layers * (1 if kind == "fp8" else size) + size * (head + cached + rows * chosen.vocab)
    attention = 4 * shape["layers"] * shape["width"] * rows * (chosen.prefix + window)
    plain_s = (2 * rows * head + attention) / ceilings["ceiling FLOP/s"]
    layers_s = 2 * rows * layers / ceilings["ceiling FLOP/s of layers"]
    return 1000 * max(moved / ceilings["ceiling bytes/s"], plain_s + layers_s)


def measured_ceilings(chosen: Bench, kind: str) -> dict[str, float]:
    """Bytes per second of a large copy, and operations per second of large matrix products."""
    cuda = chosen.device == "cuda"
    side = 8192 if cuda else 256
    a = torch.ones(side, side, dtype=chosen.dtype, device=chosen.device)
    operations = 2 * side**3
    plain = operations / seconds(lambda: a @ a, cuda)
    of_layers = plain
    if kind == "fp8":
        one = torch.ones((), device=chosen.device)
        x = a.to(torch.float8_e4m3fn)
        product_s = seconds(
            lambda: torch._scaled_mm(x, x.T, one, one, out_dtype=chosen.dtype), cuda
        )
        of_layers = operations / product_s
    return {
        "ceiling bytes/s": copied_per_s(chosen.device),
        "ceiling FLOP/s": plain,
        "ceiling FLOP/s of layers": of_layers,
    }


def copied_per_s(device: str) -> float:
    """Bytes read and written per second in a large copy."""
    cuda = device == "cuda"
    source = torch.zeros(2**31 if cuda else 2**22, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), cuda)


def seconds(work: Callable[[], object], cuda: bool, repeats: int = 10) -> float:
    """Median time of one call after a warm-up."""
    spent = []
    for _ in range(repeats + 3):
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
    return median(spent[3:])
