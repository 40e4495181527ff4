"""One forward for requests of ragged lengths, as verification of a batch feeds them.

Requests lie along the batch axis; what each feeds and sees is padded at its end to the longest, and
a mask hides the padding. K/V stay in each request's own cache. Cost: R times the longest feed
instead of the sum of feeds, keys joined to the longest context. Causal attention alone, one branch
a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_bench.core.protocols import Plan
from dllm_bench.models.kv import PositionCache


@dataclass(frozen=True)
class RaggedCache:
    """The caches of R requests as transformers' attention sees one."""

    caches: Sequence[PositionCache]
    plans: Sequence[Plan]

    def update(
        self, keys_RHFD: Tensor, values_RHFD: Tensor, layer: int, *rest: object
    ) -> tuple[Tensor, Tensor]:
        """Called by the attention of a layer: all keys and values to attend to."""
        joined = [
            kv.update(keys[None, :, : fed(plan)], values[None, :, : fed(plan)], layer)
            for kv, plan, keys, values in zip(
                self.caches, self.plans, keys_RHFD, values_RHFD, strict=True
            )
        ]
        keys, values = zip(*joined, strict=True)
        return stacked(keys, dim=2), stacked(values, dim=2)


def fed(plan: Plan) -> int:
    """Number of positions a plan feeds."""
    return plan.feed[1] - plan.feed[0]


def stacked(rows: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors with a leading axis of 1, padded with zeros along `dim` to the longest."""
    longest = max(row.shape[dim] for row in rows)
    after = [0, 0] * (rows[0].dim() - 1 - dim)
    return torch.cat([pad(row, [*after, 0, longest - row.shape[dim]]) for row in rows])


def positions(plans: Sequence[Plan], device: torch.device) -> Tensor:
    """Absolute positions (R, F) of what is fed; padding stands at the last one of its request."""
    spans = torch.tensor([plan.feed for plan in plans], device=device)
    longest = max(map(fed, plans))
    position_RF = spans[:, :1] + torch.arange(longest, device=device)
    return position_RF.minimum(spans[:, 1:] - 1)


def causal_mask(position_RF: Tensor, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (R, 1, F, N): a position sees itself and earlier ones, in a window the last.

    Keys of a request lie in the order of their positions, from 0.
    """
    key_N = torch.arange(keys, device=position_RF.device)
    distance_RFN = position_RF[..., None] - key_N
    hidden_RFN = distance_RFN < 0
    if window:
        hidden_RFN |= distance_RFN >= window
    zeros_RFN = torch.zeros(hidden_RFN.shape, dtype=dtype, device=position_RF.device)
    return zeros_RFN.masked_fill_(hidden_RFN, -torch.inf)[:, None]
