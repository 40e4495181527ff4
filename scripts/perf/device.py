"""Rounds of a model of 7B shape with random weights on a CUDA device, compared with its roofline.

All combinations of k lookahead branches and window, in bf16 with each mode of hardware.compile and
in FP8, with 1,024 cached positions. Tokens per second are *projected*: measured rounds per second
times the tokens per forward that a paper reports. `--dry` runs the same on the CPU with a small
model, whose times mean nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from dllm_bench.api.random_model import (
    DREAM_7B,
    SMALL,
    RoundShape,
    measured_ceilings,
    random_model,
    roofline_ms,
    round_ms,
)

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
    return Bench(RoundShape("cuda", torch.bfloat16, DREAM_7B, 152_064, 1024), kinds)


def rounds(dry: bool, quick: bool) -> list[dict[str, Any]]:
    """Return one row for every precision, mode, number of lookahead branches and window."""
    chosen = bench(dry)
    if chosen is None:
        return []
    grid, one = list(product(chosen.lookaheads, chosen.windows)), chosen.model
    rows = []
    for kind, mode in chosen.kinds:
        model = random_model(one.vocab, one.shape, one.device, one.dtype, kind, mode)
        ceilings = measured_ceilings(one.device, one.dtype, kind)
        for k, window in grid[:: len(grid) - 1] if quick else grid:
            round_time_ms = round_ms(model, one.prefix, k, window, chosen.steps)
            floor_ms = roofline_ms(one, kind, k, window, ceilings)
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


def projected(k: int, round_time_ms: float) -> float | None:
    """Rounds per second times the paper's tokens per forward; None where it reports none."""
    return TPF[k] * 1000 / round_time_ms if k in TPF else None
