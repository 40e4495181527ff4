"""Probabilities from logits in one pass, and the random numbers of a forward.

`read_logits`, `margin`, `neg_entropy` and `draw` are all that decides a commit, so a change of
precision is a change in one place. A precision names what a published sampler does: logits are
rounded to it, the softmax runs in float32 (float64 for float64), results are rounded to it and
compared in it. Only float64 makes a float64 copy of the logits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding import fused

Precision = Literal["float32", "bfloat16", "float64", "model"]  # model: the dtype logits come in
CACHED = 2**18  # logits read at a time on a CPU: 1 MiB of float32, half a usual level-2 cache
LOWEST, LEAST = -87.0, 2e-38  # exp(-87) < 2e-38; CPUs are slow with much smaller results


def dtype_of(logits: Tensor, precision: Precision) -> torch.dtype:
    """Return the dtype that `precision` names."""
    return logits.dtype if precision == "model" else getattr(torch, precision)


def rounded(logits_KWV: Tensor, precision: Precision) -> Tensor:
    """Round the logits to the dtype that `precision` names."""
    return logits_KWV.to(dtype_of(logits_KWV, precision))


def forbid(logits: Tensor, ids: Iterable[int]) -> None:
    """Take tokens out of the distribution, in place.

    One token at a time: indexing by a list would copy it to the device, for which the host waits.
    """
    for token in ids:
        logits.select(-1, token).fill_(-torch.inf)


def at_least_float32(values: Tensor) -> Tensor:
    """Return the values in float32 if their dtype is shorter; float64 stays."""
    return values if values.dtype.itemsize >= torch.float32.itemsize else values.float()


@dataclass(frozen=True)
class Candidates:
    """What one pass over the logits yields for every row."""

    ids_KW: Tensor  # the most probable token, or the one asked for
    probability_KW: Tensor  # of that token
    neg_entropy_KW: Tensor | None = None  # sum of p ln(p + eps) in nats; None if not asked for


def read_logits(
    logits_KWV: Tensor,
    precision: Precision = "float32",
    entropy: bool = False,
    ids_KW: Tensor | None = None,
    eps: float = 0.0,
) -> Candidates:
    """Return token, probability and, if `entropy`, negative entropy of every row, in one pass.

    ids_KW: the tokens to look up; None: the most probable ones. Entropy with `eps`, or in a dtype
    shorter than float32, is that of `neg_entropy`, rounded where the published form is: it takes a
    second pass. On the CPU, rows are read in portions that fit into its cache.
    """
    shape, rows_RV = logits_KWV.shape[:-1], logits_KWV.flatten(0, -2)
    dtype = dtype_of(rows_RV, precision)
    published = entropy and (eps > 0 or dtype.itemsize < torch.float32.itemsize)
    best_R, own_R, sum_R, entropy_R = statistics(rows_RV, dtype, entropy and not published)
    if ids_KW is None:
        ids_KW, probability_R = own_R.view(shape), sum_R.reciprocal()
    else:
        chosen_R = rows_RV.gather(-1, ids_KW.reshape(-1, 1))[:, 0].to(dtype).to(best_R.dtype)
        probability_R = (chosen_R - best_R).exp_().div_(sum_R)
    if published and fused.available(rows_RV, dtype):
        entropy_R = fused.neg_entropy(rows_RV, best_R, sum_R, dtype, eps)
    elif published:
        parts = [neg_entropy(part.to(dtype), "model", eps) for part in _portions(rows_RV)]
        entropy_R = torch.cat(parts)
    entropy_KW = None if entropy_R is None else entropy_R.view(shape)
    return Candidates(ids_KW, probability_R.to(dtype).view(shape), entropy_KW)


def _portions(logits_RV: Tensor) -> Sequence[Tensor]:
    """Split the rows, on a CPU into as many at a time as fit into its cache."""
    share = max(1, CACHED // logits_RV.shape[1])
    if logits_RV.device.type != "cpu" or logits_RV.shape[0] <= share:
        return (logits_RV,)
    return logits_RV.split(share)


def statistics(logits_RV: Tensor, dtype: torch.dtype, entropy: bool) -> fused.Statistics:
    """Return each row's maximum, its index (the first of equal ones), and its sums.

    Rows are rounded to `dtype`. The sums are of exp(x - max) and, if `entropy`, of p ln p. Each is
    (R,), in float32 or float64.
    """
    if fused.available(logits_RV, dtype):
        return fused.row_statistics(logits_RV, entropy, dtype)
    parts = _portions(logits_RV)
    if len(parts) < 2:
        return _passes(at_least_float32(logits_RV.to(dtype)), entropy)
    room = logits_RV.new_empty(2, *parts[0].shape, dtype=torch.promote_types(dtype, torch.float32))
    wide = (at_least_float32(part_RV.to(dtype)) for part_RV in parts)
    portions = [_passes(part_RV, entropy, room[:, : len(part_RV)]) for part_RV in wide]
    best, ids, total, entropies = map(tuple, zip(*portions, strict=True))
    whole_R = torch.cat(entropies) if entropy else None
    return torch.cat(best), torch.cat(ids), torch.cat(total), whole_R


def _passes(logits_RV: Tensor, entropy: bool, room: Tensor | None = None) -> fused.Statistics:
    """Return `statistics` of a few rows; `room` (2, R, V) is memory for intermediate results.

    torch's softmax would lose digits in long rows (2e-5 at 131,072 tokens).
    """
    below_RV, mass_RV = (None, None) if room is None else room
    index_R = argmax(logits_RV)
    best_R1 = logits_RV.gather(-1, index_R[:, None])
    below_RV = torch.sub(logits_RV, best_R1, out=below_RV).clamp_min_(LOWEST)
    if not entropy:
        return best_R1[:, 0], index_R, below_RV.exp_().sum(-1), None
    mass_RV = torch.exp(below_RV, out=mass_RV)
    torch.threshold_(mass_RV, LEAST, 0.0)  # a token at -inf adds 0, not 0 * infinity
    sum_R = mass_RV.sum(-1)
    return best_R1[:, 0], index_R, sum_R, below_RV.mul_(mass_RV).sum(-1) / sum_R - sum_R.log()


def argmax(values_XV: Tensor) -> Tensor:
    """Return the index of the maximum over V, the first of equal ones, int64 (X,).

    On the CPU NumPy finds it, as fast as the value alone.
    """
    if values_XV.device.type == "cpu" and values_XV.dtype != torch.bfloat16:
        return torch.from_numpy(values_XV.numpy().argmax(-1))
    return values_XV.argmax(-1)


def top1(logits_KWV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable token and its probability: ids_KW int64, probability_KW."""
    seen = read_logits(logits_KWV)
    return seen.ids_KW, seen.probability_KW


def neg_entropy(logits_KWV: Tensor, precision: Precision = "float32", eps: float = 0.0) -> Tensor:
    """Return the sum of p ln(p + eps) of softmax(logits) in nats, (K, W); ids at -inf contribute 0.

    As published, every step is rounded to the precision; `read_logits` is faster.
    """
    probability_KWV = probabilities(logits_KWV, precision)
    if eps == 0:
        return -torch.special.entr(probability_KWV).sum(dim=-1)
    return (probability_KWV * (probability_KWV + eps).log()).sum(dim=-1)


def probabilities(logits_KWV: Tensor, precision: Precision = "float32") -> Tensor:
    """Return softmax(logits), (K, W, V), rounded to the precision."""
    logits_KWV = rounded(logits_KWV, precision)
    return at_least_float32(logits_KWV).softmax(dim=-1).to(logits_KWV.dtype)


def margin(logits_KWV: Tensor, precision: Precision = "float32") -> Tensor:
    """Return the difference of the two largest probabilities, (K, W)."""
    logits_KWV = rounded(logits_KWV, precision)
    dtype, logits_KWV = logits_KWV.dtype, at_least_float32(logits_KWV)
    two_KW2 = logits_KWV.topk(2, dim=-1).values
    best_KW1 = two_KW2[..., :1]
    sum_KW1 = (logits_KWV - best_KW1).clamp_min_(LOWEST).exp_().sum(dim=-1, keepdim=True)
    probability_KW2 = ((two_KW2 - best_KW1).exp_() / sum_KW1).to(dtype)
    return probability_KW2[..., 0] - probability_KW2[..., 1]


def stable_top(values_KW: Tensor, n: int) -> Tensor:
    """Return the indices (K, n) of the n largest values, ties to the lower position."""
    return values_KW.sort(dim=-1, descending=True, stable=True).indices[:, :n]


def generator(state: DecodeState, use: str = "", device: str = "") -> Generator:
    """Make the generator of one forward's random numbers.

    Its seed depends on the request's seed and the forward. use: names a stream other than the one
    of the tokens. device: where it draws, by default the state's.
    """
    text = f"{state.seed}/{state.forwards}{use}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    return torch.Generator(device or state.tokens_KL.device).manual_seed(seed)


def draw(logits_KWV: Tensor, temperature: float, numbers: Generator, window: Window) -> Tensor:
    """Draw tokens (K, W) from softmax(logits / temperature): argmax of l - T ln(-ln U)."""
    return argmax(add_gumbel(logits_KWV, temperature, numbers, window))


def add_gumbel(values_KX: Tensor, temperature: float, numbers: Generator, window: Window) -> Tensor:
    """Add Gumbel noise, times the temperature T, to the values.

    The n largest results are n draws without replacement from softmax(values / T). Each window
    position has its own uniform number, whichever rows are given, and all branches share it, so
    what the base draws does not depend on the number of branches. Uniform numbers have the
    precision of the values, float32 at least: 24 bits, which cut Gumbel noise at 16.6.
    """
    values_KX = at_least_float32(values_KX)
    shape = (window.width, *values_KX.shape[2:])
    uniform_X = torch.empty(shape, dtype=values_KX.dtype, device=numbers.device)
    uniform_X.uniform_(generator=numbers)
    if window.rows_M is not None:
        uniform_X = uniform_X.index_select(0, window.rows_M % window.width)
    uniform_X.clamp_(min=torch.finfo(uniform_X.dtype).tiny)
    return values_KX - uniform_X.log_().neg_().log_().mul_(temperature)


def keep_top_p(logits_KWV: Tensor, top_p: float, released_ties: bool = False) -> Tensor:
    """Set tokens to -inf if more probable ones already sum to more than `top_p`; 1 drops nothing.

    The most probable one stays. Of equal tokens the earlier ones count as more probable, or, with
    `released_ties`, those that torch.sort returns first.
    """
    if np.float32(top_p) >= 1:  # a rounded sum may exceed 1 long before the last token
        return logits_KWV
    if released_ties:
        return _keep_top_p_sorted(logits_KWV, top_p)
    if logits_KWV.dtype != torch.float64 and fused.available(logits_KWV):
        return fused.keep_top_p(logits_KWV.flatten(0, -2), top_p).view(logits_KWV.shape)
    sorted_KWV = descending(at_least_float32(logits_KWV))
    mass_KWV, last = sorted_KWV.softmax(dim=-1).cumsum(dim=-1), sorted_KWV.shape[-1] - 1
    enough_KW1 = mass_KWV.new_full((*mass_KWV.shape[:-1], 1), top_p)
    # how many tokens precede the last one kept; all are kept if rounding leaves the sum below top_p
    before_KW1 = torch.searchsorted(mass_KWV, enough_KW1, right=True).clamp_(max=last)
    least_KW1 = sorted_KWV.gather(-1, before_KW1)
    kept_KWV = logits_KWV.masked_fill(logits_KWV < least_KW1, -torch.inf)
    next_KW1 = sorted_KWV.gather(-1, (before_KW1 + 1).clamp_(max=last))
    equals_KW1 = (next_KW1 == least_KW1) & (before_KW1 < last)
    if logits_KWV.device.type == "cpu" and not equals_KW1.any():
        return kept_KWV  # on another device the question would make the host wait
    at_KWV = logits_KWV == least_KW1
    room_KW1 = 1 + before_KW1 - (logits_KWV > least_KW1).sum(dim=-1, keepdim=True)
    beyond_KWV = at_KWV & (at_KWV.cumsum(dim=-1, dtype=torch.int32) > room_KW1)
    return kept_KWV.masked_fill_(beyond_KWV, -torch.inf)


def _keep_top_p_sorted(logits_KWV: Tensor, top_p: float) -> Tensor:
    """Apply `keep_top_p` in torch.sort's order, which is not stable, in the logits' own dtype."""
    sorted_KWV, order_KWV = torch.sort(logits_KWV, dim=-1, descending=True)
    beyond_KWV = sorted_KWV.softmax(dim=-1).cumsum(dim=-1) > top_p
    beyond_KWV = torch.nn.functional.pad(beyond_KWV[..., :-1], (1, 0))
    cut_KWV = torch.empty_like(beyond_KWV).scatter_(-1, order_KWV, beyond_KWV)
    return logits_KWV.masked_fill(cut_KWV, -torch.inf)


def descending(values_X: Tensor) -> Tensor:
    """Sort along the last dimension, largest first; on the CPU by NumPy, 20 times faster."""
    if values_X.device.type == "cpu":
        return torch.from_numpy(np.sort(values_X.numpy(), axis=-1)).flip(-1)
    return torch.sort(values_X, dim=-1, descending=True).values


def keep_top_k(logits_KWV: Tensor, top_k: int) -> Tensor:
    """Set logits below the `top_k`-th largest to -inf; tokens equal to it stay."""
    least_KW1 = logits_KWV.topk(min(top_k, logits_KWV.shape[-1]), dim=-1).values[..., -1:]
    return logits_KWV.masked_fill(logits_KWV < least_KW1, -torch.inf)
