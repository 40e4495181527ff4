"""The shortest possible time of a round of a model with random weights: its roofline.

The longer of two times: the round's bytes over the measured bandwidth, and its operations over the
measured rate. Both ceilings are measured on the device, in the same call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class RoundShape:
    """A forward of lookahead branches and the base over a window after a cached prefix."""

    device: str
    dtype: torch.dtype
    shape: dict[str, int]
    """Of the model, as `DREAM_7B`."""
    vocab: int
    prefix: int
    """Cached positions."""


@dataclass(frozen=True)
class Ceilings:
    """What a device can do."""

    bytes_per_s: float
    """Read and written by a large copy."""
    flop_per_s: float
    """Of large matrix products, in operations a second."""
    layers_flop_per_s: float
    """The same in the precision of the linear layers."""


def layer_parameters(shape: dict[str, int]) -> int:
    """Number of weights in the linear layers of all transformer blocks."""
    width, kv = shape["width"], shape["width"] * shape["kv_heads"] // shape["heads"]
    return shape["layers"] * (2 * width * (width + kv) + 3 * width * shape["mlp"])


def roofline_ms(one: RoundShape, kind: str, k: int, window: int, ceilings: Ceilings) -> float:
    """The shortest possible time of a round of k + 1 branches, under the measured ceilings.

    Bytes: every weight, the cached K/V and the logits once. Operations: two per weight and row, and
    four per head dimension, query and key. FP8 halves the bytes of layers, not of the head.
    """
    shape, rows = one.shape, (k + 1) * window
    size = one.dtype.itemsize
    layers, head = layer_parameters(shape), shape["width"] * one.vocab
    kv = shape["width"] * shape["kv_heads"] // shape["heads"]
    cached = 2 * shape["layers"] * kv * one.prefix
    moved = layers * (1 if kind == "fp8" else size) + size * (head + cached + rows * one.vocab)
    attention = 4 * shape["layers"] * shape["width"] * rows * (one.prefix + window)
    plain_s = (2 * rows * head + attention) / ceilings.flop_per_s
    layers_s = 2 * rows * layers / ceilings.layers_flop_per_s
    return 1000 * max(moved / ceilings.bytes_per_s, plain_s + layers_s)


def measured_ceilings(device: str, dtype: torch.dtype, kind: str = "none") -> Ceilings:
    """Bytes per second of a large copy, and operations per second of large matrix products."""
    cuda = device == "cuda"
    side = 8192 if cuda else 256
    a = torch.ones(side, side, dtype=dtype, device=device)
    operations = 2 * side**3
    plain = operations / seconds(lambda: a @ a, cuda)
    of_layers = plain
    if kind == "fp8":
        one = torch.ones((), device=device)
        x = a.to(torch.float8_e4m3fn)
        product_s = seconds(lambda: torch._scaled_mm(x, x.T, one, one, out_dtype=dtype), cuda)
        of_layers = operations / product_s
    return Ceilings(copied_per_s(device), plain, of_layers)


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
