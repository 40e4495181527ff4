"""Attention masks of one forward: who sees which cached and fed positions.

Keys lie as [visible cached positions | fresh keys of branch 0 | branch 1 | ...]. A branch sees the
cache and itself, never another branch; under block-causal attention a position sees earlier
blocks and its own block, in a layer with a sliding window only the last positions up to its own.
Masks are additive (0 or -inf); None means that everything is seen. Padding and batches of requests
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan

Span = tuple[int, int]
REMEMBERED = 16  # masks of recent shapes; a request rarely alternates between more


@dataclass(frozen=True)
class MaskShape:
    """What a mask depends on besides `visible_K`; `block` 0 is full attention, `window` 0 none."""

    branches: int
    feed: Span
    cached: tuple[Span, ...]
    origin: int = 0
    block: int = 0
    window: int = 0

    @classmethod
    def of(
        cls, plan: ForwardPlan, branches: int, cached: tuple[Span, ...], window: int = 0
    ) -> MaskShape:
        if plan.attention == "full":
            return cls(branches, plan.feed, cached, window=window)
        if plan.block < 1:
            raise ValueError(f"Block-causal attention needs a block length, found {plan.block}.")
        return cls(branches, plan.feed, cached, plan.origin, plan.block, window)

    @property
    def sees_all(self) -> bool:
        """One branch whose every query sees every key."""
        if self.branches > 1:
            return False
        last = max(stop for _, stop in (self.feed, *self.cached)) - 1
        if 0 < self.window <= last:
            return False
        return self.block == 0 or self.block_index(self.feed[0]) >= self.block_index(last)

    def block_index(self, position: int) -> int:
        """0 before the origin, 1, 2, ... for the blocks."""
        if position < self.origin:
            return 0
        return (position - self.origin) // self.block + 1


def attention_mask(
    shape: MaskShape, visible_K: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive mask, broadcastable to (1, 1, K * F, C + K * F); None when all see all."""
    base = None if shape.sees_all else _structure(shape, dtype, device)
    if visible_K is None:
        return base
    hidden = _hidden(shape, visible_K)
    if base is None:
        base = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return base.masked_fill(hidden, -torch.inf)


@lru_cache(maxsize=REMEMBERED)
def _structure(shape: MaskShape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Branches apart, blocks in order: (1, 1, K * F, C + K * F)."""
    fed_F = torch.arange(*shape.feed, device=device)
    cached_C = _cached(shape, device)
    fresh_FF, old_FC = _sees(shape, fed_F, fed_F), _sees(shape, fed_F, cached_C)
    apart_KK = torch.eye(shape.branches, dtype=torch.bool, device=device)
    fresh_KFKF = apart_KK[:, None, :, None] & fresh_FF[None, :, None, :]
    rows = len(fed_F) * shape.branches
    seen = torch.cat([old_FC.repeat(shape.branches, 1), fresh_KFKF.reshape(rows, rows)], dim=1)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)[
        None, None
    ]


def _cached(shape: MaskShape, device: torch.device) -> Tensor:
    """Visible cached positions, in key order."""
    spans = [torch.arange(*span, device=device) for span in shape.cached]
    return torch.cat([torch.arange(0, device=device), *spans])


def _sees(shape: MaskShape, query_Q: Tensor, key_N: Tensor) -> Tensor:
    """bool (Q, N): the query's block is not before the key's, which is not before the window."""
    near_QN = torch.ones(len(query_Q), len(key_N), dtype=torch.bool, device=query_Q.device)
    if shape.window:
        near_QN = query_Q[:, None] - key_N[None, :] < shape.window
    if shape.block == 0:
        return near_QN
    query_Q, key_N = (
        (p - shape.origin).div(shape.block, rounding_mode="floor").clamp_min(-1)
        for p in (query_Q, key_N)
    )
    return near_QN & (query_Q[:, None] >= key_N[None, :])


def _hidden(shape: MaskShape, visible_K: Tensor) -> Tensor:
    """bool (1, 1, 1, C + K * F): fresh keys at or beyond their branch's visible end."""
    fed_F = torch.arange(*shape.feed, device=visible_K.device)
    hidden_KF = fed_F >= visible_K[:, None]
    cached = sum(stop - start for start, stop in shape.cached)
    return torch.nn.functional.pad(hidden_KF.flatten(), (cached, 0))[None, None, None]
