"""Probabilities from logits, one copy each, in float32.

`top1`: candidate id, its log-probability and probability from one pass of max and log-sum-exp;
`neg_entropy`: sum_v p_v ln p_v (<= 0, larger is surer). Everything that decides a commit is
computed here, so a change of precision is a change in one place. Sampling is not here yet: all
decoders are greedy in the token (temperature 0).
"""

from __future__ import annotations

import torch
from torch import Tensor


def top1(logits_KWV: Tensor) -> tuple[Tensor, Tensor]:
    """Most probable token and its probability: ids_KW int64, probability_KW float32."""
    logits_KWV = logits_KWV.float()
    best_KW, ids_KW = logits_KWV.max(dim=-1)
    return ids_KW, torch.exp(best_KW - logits_KWV.logsumexp(dim=-1))


def neg_entropy(logits_KWV: Tensor) -> Tensor:
    """Negative entropy of softmax(logits) in nats, (K, W) float32; ids at -inf contribute 0."""
    return -torch.special.entr(logits_KWV.float().softmax(dim=-1)).sum(dim=-1)


def margin(logits_KWV: Tensor) -> Tensor:
    """Difference of the two largest probabilities, (K, W) float32."""
    logits_KWV = logits_KWV.float()
    best_KW2 = logits_KWV.topk(2, dim=-1).values
    probability_KW2 = torch.exp(best_KW2 - logits_KWV.logsumexp(dim=-1, keepdim=True))
    return probability_KW2[..., 0] - probability_KW2[..., 1]


def stable_top(values_KW: Tensor, n: int) -> Tensor:
    """Indices (K, n) of the n largest values, ties to the lower position."""
    return values_KW.sort(dim=-1, descending=True, stable=True).indices[:, :n]
