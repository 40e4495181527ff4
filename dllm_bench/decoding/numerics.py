"""Probabilities from logits, one copy each, and the random numbers of a forward.

`top1`, `probability`, `margin`, `neg_entropy` and `draw` are all that decides a commit, so a change
of precision is a change in one place. A precision names what a published sampler does: logits are
rounded to it, the softmax runs in float32 (float64 for float64), results are rounded to it and
compared in it. Only float64 makes a float64 copy of the logits.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import torch
from torch import Tensor

from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState

Precision = Literal["float32", "bfloat16", "float64", "model"]  # model: the dtype logits come in


def check_choice(owner: object, name: str, value: str, choices: object) -> None:
    """Refuse a value that is not among the words of the Literal `choices`."""
    if value not in get_args(choices):
        raise DllmBenchError(
            f"{type(owner).__name__} has {name} {value!r}; choose among "
            f"{', '.join(get_args(choices))}."
        )


def rounded(logits_KWV: Tensor, precision: Precision) -> Tensor:
    """The logits in the dtype `precision` names."""
    return logits_KWV if precision == "model" else logits_KWV.to(getattr(torch, precision))


def _wide(logits_KWV: Tensor, precision: Precision) -> tuple[Tensor, torch.dtype]:
    """Logits of that precision in a dtype fit to compute with, and the dtype of the results."""
    logits_KWV = rounded(logits_KWV, precision)
    return at_least_float32(logits_KWV), logits_KWV.dtype


def at_least_float32(values: Tensor) -> Tensor:
    """float64 stays, what is shorter than float32 becomes float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def top1(logits_KWV: Tensor, precision: Precision = "float32") -> tuple[Tensor, Tensor]:
    """Most probable token and its probability: ids_KW int64, probability_KW."""
    logits_KWV, dtype = _wide(logits_KWV, precision)
    best_KW, ids_KW = logits_KWV.max(dim=-1)
    return ids_KW, torch.exp(best_KW - logits_KWV.logsumexp(dim=-1)).to(dtype)


def probability(logits_KWV: Tensor, ids_KW: Tensor, precision: Precision = "float32") -> Tensor:
    """Probability of the tokens `ids`, (K, W)."""
    logits_KWV, dtype = _wide(logits_KWV, precision)
    chosen_KW = logits_KWV.gather(-1, ids_KW[..., None])[..., 0]
    return torch.exp(chosen_KW - logits_KWV.logsumexp(dim=-1)).to(dtype)


def neg_entropy(logits_KWV: Tensor, precision: Precision = "float32", eps: float = 0.0) -> Tensor:
    """sum p ln(p + eps) of softmax(logits) in nats, (K, W); ids at -inf contribute 0."""
    logits_KWV, dtype = _wide(logits_KWV, precision)
    probability_KWV = logits_KWV.softmax(dim=-1).to(dtype)
    if eps == 0:
        return -torch.special.entr(probability_KWV).sum(dim=-1)
    return (probability_KWV * (probability_KWV + eps).log()).sum(dim=-1)


def margin(logits_KWV: Tensor, precision: Precision = "float32") -> Tensor:
    """Difference of the two largest probabilities, (K, W)."""
    logits_KWV, dtype = _wide(logits_KWV, precision)
    best_KW2 = logits_KWV.topk(2, dim=-1).values
    probability_KW2 = torch.exp(best_KW2 - logits_KWV.logsumexp(dim=-1, keepdim=True)).to(dtype)
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


def draw(logits_KWV: Tensor, temperature: float, numbers: torch.Generator) -> Tensor:
    """Tokens (K, W) drawn from softmax(logits / temperature): argmax of l - T ln(-ln U)."""
    return shaken(logits_KWV, temperature, numbers).argmax(dim=-1)


def shaken(values_KX: Tensor, temperature: float, numbers: torch.Generator) -> Tensor:
    """values + T * Gumbel noise: the n largest are n draws from softmax(values / T), none twice.

    All branches share U, so what the base draws does not depend on how many stand beside it. U is
    of the values' precision, float32 at least: 24 bits, which cuts Gumbel noise at 16.6.
    """
    values_KX = at_least_float32(values_KX)
    uniform_X = torch.empty(values_KX.shape[1:], dtype=values_KX.dtype, device=numbers.device)
    uniform_X.uniform_(generator=numbers).clamp_(min=torch.finfo(uniform_X.dtype).tiny)
    return values_KX - temperature * torch.log(-torch.log(uniform_X))


def keep_top_p(logits_KWV: Tensor, top_p: float) -> Tensor:
    """-inf at tokens whose more probable ones already hold more than `top_p`; the first stays."""
    sorted_KWV, order_KWV = logits_KWV.sort(dim=-1, descending=True, stable=True)
    mass_KWV = at_least_float32(sorted_KWV).softmax(dim=-1).cumsum(dim=-1)
    before_KWV = torch.nn.functional.pad(mass_KWV[..., :-1], (1, 0))
    dropped_KWV = torch.zeros_like(order_KWV, dtype=torch.bool)
    return logits_KWV.masked_fill(
        dropped_KWV.scatter_(-1, order_KWV, before_KWV > top_p), -torch.inf
    )


def keep_top_k(logits_KWV: Tensor, top_k: int) -> Tensor:
    """-inf below the `top_k`-th largest logit; ties with it stay."""
    least_KW1 = logits_KWV.topk(min(top_k, logits_KWV.shape[-1]), dim=-1).values[..., -1:]
    return logits_KWV.masked_fill(logits_KWV < least_KW1, -torch.inf)
