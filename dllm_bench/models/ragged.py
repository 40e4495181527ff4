"""One forward for several requests of ragged lengths, of any plan a decoder makes.

What all requests feed lies one after another along the sequence axis of one batch, without padding:
embedding, projections, norms, experts and head see the rows of all. Attention is each request's
own, over its own cache and under its own mask, by the same function that a forward of one takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.models.kv import PositionCache

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
