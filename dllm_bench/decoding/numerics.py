"""Probabilities from logits in one pass, and the random numbers of a forward.

`read_logits`, `margin`, `neg_entropy` and `draw` are all that decides a commit, so a change of
precision is a change in one place. A precision names what a published sampler does: logits are
rounded to it, the softmax runs in float32 (float64 for float64), results are rounded to it and
compared in it. Only float64 makes a float64 copy of the logits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding import fused

Precision = Literal["float32", "bfloat16", "float64", "model"]  # model: the dtype logits come in
# logits read at a time on a CPU: 1 MiB of float32, half of a usual second-level cache
CACHED = 2**18
LOWEST, LEAST = -87.0, 2e-38  # exp(-87) < 2e-38; CPUs are slow with results much less than that
Statistics = tuple[Tensor, Tensor, Tensor, Tensor | None]


def check_choice(owner: object, name: str, value: str, choices: object) -> None:
    """Refuse a value that is not among the words of the Literal `choices`."""
    if value not in get_args(choices):
        raise DllmBenchError(
            f"{type(owner).__name__} has {name} {value!r}; choose among "
            f"{', '.join(get_args(choices))}."
        )


def dtype_of(logits: Tensor, precision: Precision) -> torch.dtype:
    """The dtype `precision` names."""
    named: torch.dtype = logits.dtype if precision == "model" else getattr(torch, precision)
    return named


def rounded(logits_KWV: Tensor, precision: Precision) -> Tensor:
    """The logits in the dtype `precision` names."""
    return logits_KWV.to(dtype_of(logits_KWV, precision))


def at_least_float32(values: Tensor) -> Tensor:
    """float64 stays, what is shorter than float32 becomes float32."""
    return values if values.dtype.itemsize >= torch.float32.itemsize else values.float()


@dataclass(frozen=True)
class Candidates:
    """What one pass over the logits leaves of every row, each (K, W).

    ids: the most probable token, or the one asked about; probability: its own; neg_entropy: sum of
    p ln p in nats, where it was asked for and no rounding to a shorter dtype comes between.
    """

    ids_KW: Tensor
    probability_KW: Tensor
    neg_entropy_KW: Tensor | None = None


def read_logits(
    logits_KWV: Tensor,
    precision: Precision = "float32",
    entropy: bool = False,
    ids_KW: Tensor | None = None,
) -> Candidates:
    """Read the logits once, so many rows at a time on the CPU that all fits into its cache."""
    shape, rows_NV = logits_KWV.shape[:-1], logits_KWV.flatten(0, -2)
    dtype = dtype_of(rows_NV, precision)
    entropy = entropy and dtype.itemsize >= torch.float32.itemsize
    best_N, own_N, sum_N, weighted_N = statistics(rows_NV, dtype, entropy)
    if ids_KW is None:
        ids_KW, probability_N = own_N.view(shape), sum_N.reciprocal()
    else:
        chosen_N = rows_NV.gather(-1, ids_KW.reshape(-1, 1))[:, 0].to(dtype).to(best_N.dtype)
        probability_N = (chosen_N - best_N).exp_().div_(sum_N)
    entropy_N = None if weighted_N is None else (weighted_N / sum_N - sum_N.log()).view(shape)
    return Candidates(ids_KW, probability_N.to(dtype).view(shape), entropy_N)


def statistics(logits_NV: Tensor, dtype: torch.dtype, entropy: bool) -> Statistics:
    """Of every row, rounded to `dtype`: maximum, its index (the first of equal ones), sum of
    exp(x - max) and, where `entropy` asks, of exp(x - max) (x - max). float32, or float64.
    """
    if dtype in fused.DTYPES and fused.available(logits_NV):
        widens = torch.promote_types(logits_NV.dtype, dtype) == dtype
        return fused.row_statistics(logits_NV if widens else logits_NV.to(dtype), entropy)
    share = max(1, CACHED // logits_NV.shape[1])
    if logits_NV.device.type != "cpu" or logits_NV.shape[0] <= share:
        return _passes(at_least_float32(logits_NV.to(dtype)), entropy)
    wide = torch.promote_types(dtype, torch.float32)
    room = logits_NV.new_empty(2, share, logits_NV.shape[1], dtype=wide)
    found = [
        _passes(at_least_float32(part_NV.to(dtype)), entropy, room[:, : len(part_NV)])
        for part_NV in logits_NV.split(share)
    ]
    best, index, total, weighted = zip(*found, strict=True)
    return (
        torch.cat(best),
        torch.cat(index),
        torch.cat(total),
        torch.cat(weighted) if entropy else None,
    )


def _passes(logits_NV: Tensor, entropy: bool, room: Tensor | None = None) -> Statistics:
    """`statistics` of a few rows; `room` (2, N, V) is for what is computed on the way.

    Not torch's softmax, which loses digits in long rows (2e-5 at 131,072 tokens).
    """
    below_NV, mass_NV = (None, None) if room is None else room
    index_N = argmax(logits_NV)
    best_N1 = logits_NV.gather(-1, index_N[:, None])
    below_NV = torch.sub(logits_NV, best_N1, out=below_NV).clamp_min_(LOWEST)
    if not entropy:
        return best_N1[:, 0], index_N, below_NV.exp_().sum(-1), None
    mass_NV = torch.exp(below_NV, out=mass_NV)
    torch.threshold_(mass_NV, LEAST, 0.0)  # a token at -inf has no part: 0, not 0 times infinity
    return best_N1[:, 0], index_N, mass_NV.sum(-1), below_NV.mul_(mass_NV).sum(-1)


def argmax(values_XV: Tensor) -> Tensor:
    """Index of the maximum over V, the first of equal ones, int64 (X); on the CPU by NumPy, which
    finds it as fast as the value.
    """
    if values_XV.device.type == "cpu" and values_XV.dtype != torch.bfloat16:
        return torch.from_numpy(values_XV.numpy().argmax(-1))
    return values_XV.argmax(-1)


def top1(logits_KWV: Tensor, precision: Precision = "float32") -> tuple[Tensor, Tensor]:
    """Most probable token and its probability: ids_KW int64, probability_KW."""
    seen = read_logits(logits_KWV, precision)
    return seen.ids_KW, seen.probability_KW


def neg_entropy(logits_KWV: Tensor, precision: Precision = "float32", eps: float = 0.0) -> Tensor:
    """sum p ln(p + eps) of softmax(logits) in nats, (K, W); ids at -inf contribute 0.

    As published, with probabilities rounded to the precision; `read_logits` has the fast form.
    """
    logits_KWV = rounded(logits_KWV, precision)
    probability_KWV = at_least_float32(logits_KWV).softmax(dim=-1).to(logits_KWV.dtype)
    if eps == 0:
        return -torch.special.entr(probability_KWV).sum(dim=-1)
    return (probability_KWV * (probability_KWV + eps).log()).sum(dim=-1)


def margin(logits_KWV: Tensor, precision: Precision = "float32") -> Tensor:
    """Difference of the two largest probabilities, (K, W)."""
    logits_KWV = rounded(logits_KWV, precision)
    dtype, logits_KWV = logits_KWV.dtype, at_least_float32(logits_KWV)
    two_KW2 = logits_KWV.topk(2, dim=-1).values
    best_KW1 = two_KW2[..., :1]
    below_KWV = (logits_KWV - best_KW1).clamp_min_(LOWEST)
    sum_KW1 = below_KWV.exp_().sum(dim=-1, keepdim=True)
    probability_KW2 = ((two_KW2 - best_KW1).exp_() / sum_KW1).to(dtype)
    return probability_KW2[..., 0] - probability_KW2[..., 1]


def stable_top(values_KW: Tensor, n: int) -> Tensor:
    """Indices (K, n) of the n largest values, ties to the lower position."""
    return values_KW.sort(dim=-1, descending=True, stable=True).indices[:, :n]


def generator(state: DecodeState, use: str = "") -> torch.Generator:
    """The random numbers of one forward: they follow from the request's seed and the forward.

    `use` names a stream of its own, for numbers that are not those of the tokens.
    """
    text = f"{state.seed}/{state.forwards}{use}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    return torch.Generator(state.tokens_KL.device).manual_seed(seed)


def draw(
    logits_KWV: Tensor, temperature: float, numbers: torch.Generator, window: Window
) -> Tensor:
    """Tokens (K, W) drawn from softmax(logits / temperature): argmax of l - T ln(-ln U)."""
    return argmax(shaken(logits_KWV, temperature, numbers, window))


def shaken(
    values_KX: Tensor, temperature: float, numbers: torch.Generator, window: Window
) -> Tensor:
    """values + T * Gumbel noise: the n largest are n draws from softmax(values / T), none twice.

    A place of the window has its U, whichever rows are given; all branches share it, so what the
    base draws does not depend on how many stand beside it. U is of the values' precision, float32
    at least: 24 bits, which cuts Gumbel noise at 16.6.
    """
    values_KX = at_least_float32(values_KX)
    shape = (window.width, *values_KX.shape[2:])
    uniform_X = torch.empty(shape, dtype=values_KX.dtype, device=numbers.device)
    uniform_X.uniform_(generator=numbers)
    if window.rows_M is not None:
        uniform_X = uniform_X.index_select(0, window.rows_M % window.width)
    uniform_X.clamp_(min=torch.finfo(uniform_X.dtype).tiny)
    return values_KX - uniform_X.log_().neg_().log_().mul_(temperature)


def keep_top_p(logits_KWV: Tensor, top_p: float) -> Tensor:
    """-inf at tokens whose more probable ones already hold more than `top_p`; the first stays.

    Of equal tokens the earlier ones count as more probable.
    """
    sorted_KWV = descending(at_least_float32(logits_KWV))
    mass_KWV, last = sorted_KWV.softmax(dim=-1).cumsum(dim=-1), sorted_KWV.shape[-1] - 1
    enough_KW1 = mass_KWV.new_full((*mass_KWV.shape[:-1], 1), top_p)
    # tokens in front of the last one kept; all are kept where the sum is rounded below top_p
    before_KW1 = torch.searchsorted(mass_KWV, enough_KW1, right=True).clamp_(max=last)
    least_KW1 = sorted_KWV.gather(-1, before_KW1)
    kept_KWV = logits_KWV.masked_fill(logits_KWV < least_KW1, -torch.inf)
    next_KW1 = sorted_KWV.gather(-1, (before_KW1 + 1).clamp_(max=last))
    equals_KW1 = (next_KW1 == least_KW1) & (before_KW1 < last)
    if logits_KWV.device.type == "cpu" and not equals_KW1.any():
        return kept_KWV  # elsewhere asking would make the host wait
    at_KWV = logits_KWV == least_KW1
    room_KW1 = 1 + before_KW1 - (logits_KWV > least_KW1).sum(dim=-1, keepdim=True)
    beyond_KWV = at_KWV & (at_KWV.cumsum(dim=-1, dtype=torch.int32) > room_KW1)
    return kept_KWV.masked_fill_(beyond_KWV, -torch.inf)


def descending(values_X: Tensor) -> Tensor:
    """Sorted along the last dimension; NumPy does it twenty times faster on the CPU."""
    if values_X.device.type == "cpu":
        return torch.from_numpy(np.sort(values_X.numpy(), axis=-1)).flip(-1)
    return torch.sort(values_X, dim=-1, descending=True).values


def keep_top_k(logits_KWV: Tensor, top_k: int) -> Tensor:
    """-inf below the `top_k`-th largest logit; ties with it stay."""
    least_KW1 = logits_KWV.topk(min(top_k, logits_KWV.shape[-1]), dim=-1).values[..., -1:]
    return logits_KWV.masked_fill(logits_KWV < least_KW1, -torch.inf)
