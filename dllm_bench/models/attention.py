"""What each position of a forward sees: masks of one request, and attention of a batch of requests.

Within a request, keys lie as [visible cached positions | fresh keys of branch 0 | branch 1 | ...].
A branch sees the cache and itself, never another branch; under block-causal attention a position
sees earlier blocks and its own block; in a layer with a sliding window it sees only the last
positions up to its own. Masks are additive (0 or -inf); None means that everything is seen, and
`BranchWindows` that every branch sees the whole cached prefix and all of its own window: attention
over either needs no mask, and both are joined by their log-sum-exp.

In a batch, the positions that all requests feed lie one after another along the sequence axis,
without padding, so that embedding, projections, norms, experts and head run once for all of them.
Attention is computed per request, over its own cache and under its own mask, by the same function
as in a forward of one request.

Shapes: K branches, F fed positions, C visible cached positions, N fed rows of a whole batch, Q
queries, A attention heads, E head size.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dllm_bench.core.denoiser import AddedRows, ForwardPlan, fed_positions
from dllm_bench.core.errors import DllmBenchError, passes_check
from dllm_bench.models.kv import KeysValues, PositionCache, Span
from dllm_bench.models.layer_ops import Heads, Rotation, has_kernels, join, windows_kernel

CAUSAL_KEYS = 1024  # by whose multiples causal masks grow
ALIGNED = 8  # numbers by whose multiples rows of masks begin, see `_structure`
CACHED_MASKS = 24  # one request rarely alternates between more shapes
PER_REQUEST = "per request"  # name of `attend_per_request` in transformers' registry
HALF = (torch.bfloat16, torch.float16)
HIDDEN = -30_000.0  # in a finite mask: a row that sees nothing has numbers, and a share of 0
WORTH_MASKED = 2**14  # pairs of query and key under a mask that cost a CPU as much as to join


@dataclass(frozen=True)
class MaskShape:
    """What a mask depends on besides `visible_K`."""

    branches: int
    """K."""
    feed: Span
    """Positions that every branch feeds."""
    cached: tuple[Span, ...]
    """Visible cached positions."""
    origin: int = 0
    """Where the blocks start."""
    block: int = 0
    """Block length of block-causal attention; 0: full attention."""
    window: int = 0
    """Positions that a sliding window sees back; 0: no window."""
    added: AddedRows | None = None
    """Rows fed after the others, see `ForwardPlan.added`; None: none."""
    alone: int | None = None
    """Position from which each is seen by itself only; None: no such positions."""

    @classmethod
    def of(
        cls, plan: ForwardPlan, branches: int, cached: tuple[Span, ...], window: int = 0
    ) -> MaskShape:
        """Return the mask shape of a plan."""
        blocks = (0, 0) if plan.attention == "full" else (plan.origin, plan.block)
        if plan.attention != "full" and plan.block < 1:
            raise ValueError(f"Block-causal attention needs a block length, found {plan.block}.")
        return cls(branches, plan.feed, cached, *blocks, window, plan.added, plan.alone)

    @property
    def sees_all(self) -> bool:
        """Whether there is one branch and each of its queries sees every key."""
        if self.branches > 1 or self.added is not None:
            return False
        last = max(stop for _, stop in (self.feed, *self.cached)) - 1
        if 0 < self.window <= last or (self.alone is not None and self.alone <= last):
            return False
        return self.block == 0 or self.block_index(self.feed[0]) >= self.block_index(last)

    def block_index(self, position: int) -> int:
        """Return 0 before the origin, then 1, 2, ... for the blocks."""
        return 0 if position < self.origin else (position - self.origin) // self.block + 1


def attention_mask(
    shape: MaskShape, visible_K: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return the additive mask, broadcastable to (1, 1, K * F, C + K * F); None where everything is
    seen."""
    base = None if shape.sees_all else _shared_structure(shape, dtype, device)
    if visible_K is None:
        return base
    # fresh keys at or beyond their branch's visible end
    hidden_KF = fed_positions(shape.feed, shape.added, visible_K.device) >= visible_K[:, None]
    cached = sum(stop - start for start, stop in shape.cached)
    hidden = torch.nn.functional.pad(hidden_KF.flatten(), (cached, 0))[None, None, None]
    if base is None:
        base = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return base.masked_fill(hidden, -torch.inf)


def branch_windows(
    shape: MaskShape, visible_K: Tensor | None, device: torch.device
) -> BranchWindows | None:
    """Return the windows of branches that see all of one cached span and of their own; None for
    others, and where a mask takes less time."""
    own, window = replace(shape, branches=1), shape.feed[1] - shape.feed[0]
    if shape.branches == 1 or len(shape.cached) != 1 or visible_K is not None or not own.sees_all:
        return None
    masked = shape.branches * (shape.branches - 1) * window**2
    return None if device.type == "cpu" and masked < WORTH_MASKED else BranchWindows(window)


def mask_of_sets(plan: ForwardPlan, window: int, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask (1, 1, F, C + F) of one branch that feeds any positions under full
    attention.

    window: positions that a sliding window sees back; 0: no window.
    """
    assert plan.sets is not None
    if window == 0 and plan.visible_K is None and plan.alone is None:
        return None
    if plan.sets.read_C.dim() > 1:
        raise DllmBenchError(
            "The cache keeps other positions in every layer, and a sliding window, the selector or "
            "the schedule (sees_rest) hides some of them; choose another decoder.cache."
        )
    key_X = torch.cat([plan.sets.read_C, plan.sets.feed_F])
    shape = MaskShape(1, plan.feed, (), window=window, alone=plan.alone)
    hidden_FX = ~_sees(shape, plan.sets.feed_F, key_X)
    if plan.visible_K is not None:
        hidden_FX |= key_X >= plan.visible_K
    mask_FX = torch.zeros(hidden_FX.shape, dtype=dtype, device=key_X.device)
    return mask_FX.masked_fill(hidden_FX, -torch.inf)[None, None]


def _shared_structure(shape: MaskShape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `_structure`; for causal rows after all that is cached, a view of a longer mask's last
    columns. So drafts of one length need at most `ALIGNED` masks, wherever they are verified.
    """
    start, stop = shape.feed
    longer = stop + -(stop // ALIGNED * ALIGNED) % CAUSAL_KEYS  # the view is aligned
    feed = (longer - (stop - start), longer)
    cached = ((0, start),) if start else ()
    if shape != MaskShape(1, shape.feed, cached, block=1):
        return _structure(shape, dtype, device)
    return _structure(MaskShape(1, feed, ((0, feed[0]),), block=1), dtype, device)[..., -stop:]


@lru_cache(maxsize=CACHED_MASKS)
def _structure(shape: MaskShape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of branches, blocks and sliding window: (1, 1, K * F, C + K * F).

    Each row begins at a multiple of `ALIGNED` numbers, because torch's kernel for CUDA reads 16
    bytes at a time. It pads other masks, a copy in every layer. It does not ask where a view
    begins: elsewhere than at such a multiple, the read crashes.
    """
    fed_F = fed_positions(shape.feed, shape.added, device)
    spans = [torch.arange(*span, device=device) for span in shape.cached]
    cached_C = torch.cat([torch.arange(0, device=device), *spans])
    fresh_FF, old_FC = _sees(shape, fed_F, fed_F), _sees(shape, fed_F, cached_C)
    if shape.added is not None:
        sees_EX, canvas = shape.added.sees_EX, shape.feed[1] - shape.feed[0]
        first = len(fed_F) - len(sees_EX)  # 0 if it has the rows of the canvas, too
        fresh_FF[:first, canvas:] = False
        fresh_FF[first:] &= sees_EX
    same_branch_KK = torch.eye(shape.branches, dtype=torch.bool, device=device)
    fresh_KFKF = same_branch_KK[:, None, :, None] & fresh_FF[None, :, None, :]
    rows = len(fed_F) * shape.branches
    seen = torch.cat([old_FC.repeat(shape.branches, 1), fresh_KFKF.reshape(rows, rows)], dim=1)
    keys = seen.shape[1]
    mask = torch.zeros(rows, keys + -keys % ALIGNED, dtype=dtype, device=device)[:, :keys]
    return mask.masked_fill_(~seen, -torch.inf)[None, None]


def _sees(shape: MaskShape, query_Q: Tensor, key_C: Tensor) -> Tensor:
    """Return bool (Q, C): the key's block is not after the query's, and the key is in the window
    and not hidden from the query."""
    near_QC = torch.ones(len(query_Q), len(key_C), dtype=torch.bool, device=query_Q.device)
    if shape.window:
        near_QC = query_Q[:, None] - key_C[None, :] < shape.window
    if shape.alone is not None:
        near_QC &= (key_C < shape.alone) | (query_Q[:, None] == key_C)
    if shape.block == 0:
        return near_QC
    query_Q, key_C = (
        (p - shape.origin).div(shape.block, rounding_mode="floor").clamp_min(-1)
        for p in (query_Q, key_C)
    )
    return near_QC & (query_Q[:, None] >= key_C[None, :])


@dataclass(frozen=True)
class BatchedRequest:
    """One request of a batch and the rows it feeds."""

    plan: ForwardPlan
    """Its plan."""
    kv: PositionCache
    """Its cache."""
    groups: int
    """Sequences its branches are split into, which do not see each other."""
    branches: int
    """K."""
    rows: int
    """Rows it feeds: K * F."""


@dataclass(frozen=True)
class BranchWindows:
    """In place of a mask: each branch sees one cached span and its own window, nothing else.

    For K branches with windows of F after C positions, a mask makes all K * F queries attend to C +
    K * F keys, and torch's kernels for CUDA then need a copy of K/V for every head of queries.
    Separately they attend to C + F keys without copies. Launches per layer on CUDA: with a mask
    three (two of them copies), separately three (joined by Triton) or six.
    """

    window: int
    """F."""


@dataclass(frozen=True)
class FixedWindows:
    """In place of a mask, for forwards of a fixed shape: two additive masks, written before a
    forward, say what each branch sees of the store of cached K/V and of its own window.
    """

    own_K1FF: Tensor
    """0 or `HIDDEN`, of each branch's window."""
    cached_C: Tensor | None
    """0 or `HIDDEN`, of each cached position; None: none is read."""


OwnMask = Tensor | BranchWindows | None


@dataclass(frozen=True)
class BatchMask:
    """The masks of a batch, passed to attention in place of one mask."""

    attention: str
    """Name, in transformers, of the attention function of a forward of one request."""
    requests: Sequence[BatchedRequest]
    """The requests, in the order of their rows."""
    masks: Sequence[OwnMask]
    """The mask of each request over its keys."""

    @property
    def window(self) -> int | None:
        """The window of all branches, if every request has `BranchWindows` and the same."""
        windows = {own.window if isinstance(own, BranchWindows) else None for own in self.masks}
        return windows.pop() if len(windows) == 1 else None


def split_requests(values_1ANE: Tensor, requests: Sequence[BatchedRequest]) -> list[Tensor]:
    """Return the rows of each request in the shape of its own forward: (groups, A, rows, E)."""
    pieces = values_1ANE[0].split([request.rows for request in requests], dim=1)
    return [
        one[None] if r.groups == 1 else one.unflatten(1, (r.groups, -1)).transpose(0, 1)
        for r, one in zip(requests, pieces, strict=True)
    ]


@dataclass(frozen=True)
class BatchCache:
    """The caches of all requests, with the interface that transformers' attention uses."""

    requests: Sequence[BatchedRequest]
    """The requests, in the order of their rows."""

    def update(
        self, keys_1ANE: Tensor, values_1ANE: Tensor, layer: int, kwargs: object = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Store fresh K/V of a layer and return what each request attends to."""
        parts = [split_requests(part, self.requests) for part in (keys_1ANE, values_1ANE)]
        each = zip(self.requests, *parts, strict=True)
        visible = [request.kv.update(keys, values, layer) for request, keys, values in each]
        return [keys for keys, _ in visible], [values for _, values in visible]

    def slots(self, layer: int, rows: int) -> None:
        """Return None: batched rows have no shared slot."""


AnyMask = OwnMask | BatchMask | FixedWindows


class AttentionInputs(NamedTuple):
    """What the attention of a layer needs besides the layer's rows."""

    mask: AnyMask
    """Whom each row sees."""
    rotation: Rotation
    """The rotary embedding of the rows."""
    cache: Any
    """Takes the fresh K/V by `update`: a `PositionCache`, a `BatchCache` for a `BatchMask`, a
    `FixedForward` for `FixedWindows`."""

    def named(self, arguments: Container[str]) -> dict[str, Any]:
        """Return them by transformers' names; `arguments`: the names that a module takes.

        Gemma's layers also store keys and values for models that share them, which nothing reads.
        """
        cache = "cache" if "cache" in arguments else "past_key_values"  # until transformers 5.23
        given = dict(zip(("attention_mask", "position_embeddings", cache), self, strict=True))
        return {**given, "shared_kv_states": {}} if "shared_kv_states" in arguments else given


def attend(
    query: Tensor, key: Tensor, value: Tensor, inputs: AttentionInputs, layer: int
) -> Tensor:
    """Return attention (P, F, A * E) of a layer: queries (P, A, F, E) over fresh and cached K/V."""
    mask, _, cache = inputs
    if isinstance(mask, BatchMask):
        return _attend_batch(query, key, value, mask, layer).flatten(2)
    if isinstance(mask, FixedWindows):
        return attend_fixed(query, (key, value), mask, cache, layer).flatten(2)
    return _attend_request(query, key, value, mask, cache, layer).flatten(2)


def _attend_request(
    query: Tensor, key: Tensor, value: Tensor, mask: OwnMask, kv: PositionCache, layer: int
) -> Tensor:
    """Return attention (P, F, A, E) of one request. With a mask, torch's fast kernels for CUDA take
    no K/V that several heads share."""
    if isinstance(mask, BranchWindows):
        cached = kv.aside(key, value, layer)
        return attend_windows(query, (key, value), [cached], [query.shape[2]], mask.window)
    key, value = kv.update(key, value, layer)
    kv.show(query, key, mask)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and mask is not None and query.is_cuda:
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
        repeats = 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=repeats > 1
    ).transpose(1, 2)


def _attend_batch(
    query_1ANE: Tensor, key_1GNE: Tensor, value_1GNE: Tensor, mask: BatchMask, layer: int
) -> Tensor:
    """Return attention (1, N, A, E) of a batch: of all requests at once where all have equal
    windows."""
    parts = (split_requests(part, mask.requests) for part in (query_1ANE, key_1GNE, value_1GNE))
    each = list(zip(*parts, mask.masks, [request.kv for request in mask.requests], strict=True))
    if mask.window is not None:
        cached = [kv.aside(key, value, layer) for _, key, value, _, kv in each]
        rows = [request.rows for request in mask.requests]
        return attend_windows(query_1ANE, (key_1GNE, value_1GNE), cached, rows, mask.window)
    attended = [
        _attend_request(query, key, value, own, kv, layer) for query, key, value, own, kv in each
    ]
    return torch.cat([part.flatten(0, 1) for part in attended])[None]


def attend_windows(
    query_1ANE: Tensor,
    fresh: KeysValues,
    cached: Sequence[KeysValues],
    rows: Sequence[int],
    window: int,
) -> Tensor:
    """Return attention (1, N, A, E) of branches over their own windows, `fresh` (1, G, N, E), and
    over the cached K/V of their request, (1, G, C, E) each. rows: of each request."""
    apart = [part[0].unflatten(1, (-1, window)).transpose(0, 1) for part in (query_1ANE, *fresh)]
    own = attend_with_mass(*apart)
    queries = query_1ANE.split(list(rows), 2)
    old = [attend_with_mass(query, *one) for query, one in zip(queries, cached, strict=True)]
    if len(old) == 1:
        return join(*old[0], *own)
    attended, masses = zip(*old, strict=True)
    return join(torch.cat(attended, 1), torch.cat(masses, 2), *own)


def attend_fixed(
    query_KAFE: Tensor, fresh: KeysValues, mask: FixedWindows, cache: Any, layer: int
) -> Tensor:
    """Return attention (K, F, A, E) of branches over their own windows, `fresh` (K, G, F, E), and
    over the store of cached K/V, for which `cache` is a `FixedForward`."""
    fresh = cache.update(*fresh, layer)
    if has_kernels(query_KAFE, (query_KAFE.shape[1], *fresh[0].shape[1::2])):
        store = None if mask.cached_C is None else (*cache.aside(*fresh, layer), mask.cached_C)
        return windows_kernel(query_KAFE, (*fresh, mask.own_K1FF), store)
    own = attend_with_mass(query_KAFE, *fresh, mask.own_K1FF)
    if mask.cached_C is None:
        return own[0]
    query_1ANE = query_KAFE.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
    keys, values = cache.aside(*fresh, layer)
    mask_11NC = mask.cached_C.expand(1, 1, query_1ANE.shape[2], -1)
    return join(*attend_with_mass(query_1ANE, keys, values, mask_11NC), *own).view_as(own[0])


def attend_with_mass(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention (P, F, A, E), and the log of the sum of its exponentials, float32 (P, A, F).

    mask: additive and finite, (P, 1, F, X) for X keys; None: everything is seen.
    """
    heads = (query.shape[1], *key.shape[1::2])
    if not query.is_cuda:
        attended, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask
        )[:2]
    elif mask is None and mass_kernel_works(query.dtype, heads, str(query.device)):
        attended, mass = _attend_by_kernel(query, key, value)
    else:
        return _attend_by_products(query, key, value, mask)
    return attended.transpose(1, 2), mass


def _attend_by_kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention (P, A, F, E) and mass (P, A, F) by torch's CUDA kernel.

    Of torch's public functions, `scaled_dot_product_attention` returns no mass, FlexAttention is
    fast only under torch.compile, and `varlen_attn` needs tensors of lengths, whose launches and
    checks in Python would be those of every layer.
    """
    attended, mass, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
    return attended, mass


@lru_cache
def mass_kernel_works(dtype: torch.dtype, heads: Heads, device: str) -> bool:
    """Return whether `_attend_by_kernel` agrees with products of matrices; tried once.

    heads: of queries, and of K/V, and their size. False for a dtype that is not in `HALF`.
    """
    if dtype not in HALF:
        return False
    queries, groups, width = heads
    slower = (
        f"Branches take more launches and memory in attention of {queries} over {groups} heads of "
        f"{width} in {dtype}"
    )
    compare = partial(_compare_mass_kernel, dtype, heads, device)
    return passes_check(compare, "torch's kernel", slower)


def _compare_mass_kernel(dtype: torch.dtype, heads: Heads, device: str) -> None:
    """Raise an error unless `_attend_by_kernel` gives what products give, for one sequence over
    many positions and for several windows.
    """
    generator, (queries, groups, width) = torch.Generator(device).manual_seed(0), heads
    for sequences, length in ((1, 96), (3, 32)):
        query, key, value = (
            torch.randn(sequences, n, rows, width, generator=generator, device=device).to(dtype)
            for n, rows in ((queries, 32), (groups, length), (groups, length))
        )
        attended, mass = _attend_by_kernel(query, key, value)
        wanted = _attend_by_products(query, key, value)
        torch.testing.assert_close(attended.transpose(1, 2), wanted[0], atol=0.02, rtol=0.02)
        torch.testing.assert_close(mass.float(), wanted[1], atol=0.02, rtol=0.02)


def _attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attend_with_mass` where no kernel returns the sum."""
    grouped = query.unflatten(1, (key.shape[1], -1)) * query.shape[-1] ** -0.5
    scores = (grouped @ key.unsqueeze(2).mT).float()
    if mask is not None:
        scores += mask.unsqueeze(2)
    attended = scores.softmax(-1).to(value.dtype) @ value.unsqueeze(2)
    return attended.flatten(1, 2).transpose(1, 2), scores.logsumexp(-1).flatten(1, 2)


def attend_per_request(
    module: Any,
    query_1ANE: Tensor,
    *keys_values_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool = True,
) -> tuple[Tensor, None]:
    """Return attention (1, N, A, E) of a batch, request by request, with the signature that
    transformers calls.

    `keys_values_mask` are the keys and values of each request and a `BatchMask`. The last three
    arguments are not needed: windows are in the masks, positions in the rotation.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    keys, values, mask = keys_values_mask
    eager = sys.modules[type(module).__module__].eager_attention_forward
    one = ALL_ATTENTION_FUNCTIONS.get_interface(mask.attention, eager)

    attended = []
    queries = split_requests(query_1ANE, mask.requests)
    each = zip(mask.requests, queries, keys, values, mask.masks, strict=True)
    for request, query, key, value, own in each:
        request.kv.show(query, key, own)
        found = one(module, query, key, value, own, dropout=dropout, scaling=scaling)[0]
        attended.append(found.flatten(0, 1))
    return torch.cat(attended)[None], None


@contextmanager
def per_request_attention(config: Any) -> Iterator[None]:
    """Make a model with this config compute attention with `attend_per_request` in the block."""
    usual = config._attn_implementation
    config._attn_implementation = PER_REQUEST
    try:
        yield
    finally:
        config._attn_implementation = usual
