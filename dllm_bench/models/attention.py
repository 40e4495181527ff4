"""Attention masks of one forward: who sees which cached and fed positions.

Keys lie as [visible cached positions | fresh keys of branch 0 | branch 1 | ...]. A branch sees the
cache and itself, never another branch; under block-causal attention a position sees earlier
blocks and its own block, in a layer with a sliding window only the last positions up to its own.
Masks are additive (0 or -inf); None means that everything is seen. Padding and batches of requests
are left out.


One forward for several requests of ragged lengths, of any plan a decoder makes.

What all requests feed lies one after another along the sequence axis of one batch, without padding:
embedding, projections, norms, experts and head see the rows of all. Attention is each request's
own, over its own cache and under its own mask, by the same function that a forward of one takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.models.kv import PositionCache

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


Attention = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True)
class Part:
    """The rows of one request: its branches, in `groups` sequences that do not see each other."""

    plan: ForwardPlan
    kv: PositionCache
    groups: int
    branches: int
    rows: int

    def of(self, values_HND: Tensor) -> Tensor:
        """Its rows (heads first) as the attention of a forward of one has them."""
        if self.groups == 1:
            return values_HND[None]
        return values_HND.unflatten(1, (self.groups, -1)).transpose(0, 1)


@dataclass(frozen=True)
class Seen:
    """Each request's rows and the mask over its keys; `attention` is the function of a forward of
    one, by its name in transformers.
    """

    attention: str
    parts: Sequence[Part]
    masks: Sequence[Tensor | None]


def split(values_1HND: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """The rows of every request."""
    pieces = values_1HND[0].split([part.rows for part in parts], dim=1)
    return [part.of(piece_HND) for part, piece_HND in zip(parts, pieces, strict=True)]


@dataclass(frozen=True)
class RaggedCache:
    """The caches of all requests as transformers' attention sees one."""

    parts: Sequence[Part]

    def update(
        self, keys_1HND: Tensor, values_1HND: Tensor, layer: int, *rest: object
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Called by the attention of a layer: what each request attends to."""
        fresh = zip(split(keys_1HND, self.parts), split(values_1HND, self.parts), strict=True)
        joined = [
            part.kv.update(keys, values, layer)
            for part, (keys, values) in zip(self.parts, fresh, strict=True)
        ]
        return [keys for keys, _ in joined], [values for _, values in joined]


def attend(
    module: Any,
    query_1HND: Tensor,
    *others: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool = True,
) -> tuple[Tensor, None]:
    """Attention request by request: (1, N, H, D); `others` are keys and values of each and `Seen`.

    What layers say besides is known already: windows are in the masks, positions in the rotation.
    """
    keys, values, seen = others
    eager = sys.modules[type(module).__module__].eager_attention_forward
    one: Attention = ALL_ATTENTION_FUNCTIONS.get_interface(seen.attention, eager)
    queries = split(query_1HND, seen.parts)
    found = [
        one(module, *each, dropout=dropout, scaling=scaling)[0].flatten(0, 1)
        for each in zip(queries, keys, values, seen.masks, strict=True)
    ]
    return torch.cat(found)[None], None


BY_REQUEST = "by request"
ALL_ATTENTION_FUNCTIONS.register(BY_REQUEST, attend)


@contextmanager
def apart(config: Any) -> Iterator[None]:
    """Within, the attention of a model of this config is `attend`."""
    usual = config._attn_implementation
    config._attn_implementation = BY_REQUEST
    try:
        yield
    finally:
        config._attn_implementation = usual
