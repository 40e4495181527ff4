"""Keys and values of one request, addressed by absolute position (`PositionCache`).

Each layer has a buffer over all positions of the canvas, which the `update` that transformers'
attention calls reads and writes. A forward that continues at the end of the cache writes its K/V
into the buffer after the cached ones and attends to one view of both, without a copy; a forward
that feeds positions inside the cached span attends to its fresh K/V joined with the cached spans
around them. `keep` makes the K/V of the chosen branch valid. Cached keys are rotated. For models
with shifted logits the cache also keeps the hidden state that predicts the position after a kept
span, because the row before the next window is not fed again.

A plan with `sets` reads, feeds and stores any positions: these K/V are gathered and scattered.

Shapes: K branches, G heads of keys and values, F fed positions, C cached positions that are read, S
stored positions, E head size, H hidden size, L canvas positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
from torch import Tensor

from dllm_bench.core.denoiser import AttentionProbe, Execution, ForwardPlan, RowWork
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import to_device

Span = tuple[int, int]
KeysValues = tuple[Tensor, Tensor]
Reads = tuple[Span, ...] | Tensor
"""Positions of the cache: spans, or int64 (C,)."""
LENGTHENS = 1.5  # by which buffers get longer at least, so that a rising need moves few of them


class LayerCache:
    """K/V of one layer: buffers over all positions, and what the layer does in a forward.

    `begin` says what it reads and where its fresh K/V go; its attention calls `update`.
    """

    def __init__(self, length: int) -> None:
        self.length = length  # positions of the canvas
        self.stored: KeysValues | None = None  # buffers (1, G, L, E), for one branch
        self.outputs: list[Tensor] = []  # kept outputs of attention and MLP, see `RowLayer`
        self.begin((), None, False)

    def begin(self, reads: Reads, at: int | Tensor | None, stores: bool) -> None:
        """Prepare for a forward that reads the cached positions `reads`.

        at: where fresh K/V are written into the buffers as they come: from a position on, and what
        lies before it is read; or over those of the positions (R,). None: they follow a copy of
        what is read, and are held for `store` if the plan stores any.
        """
        self.reads, self.at, self.stores = reads, at, stores
        self.fresh: KeysValues | None = None
        self.moved = False  # whether the buffers have moved to longer ones

    def uses(self, keys: Tensor) -> bool:
        """Return whether its keys are in that buffer."""
        return self.stored is not None and self.stored[0] is keys

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Use other buffers, with what the present ones hold as far as they reach."""
        if self.stored is not None:
            for new, old in zip((keys, values), self.stored, strict=True):
                length = min(new.shape[2], old.shape[2])
                new[:, :, :length] = old[:, :, :length]
        self.stored = keys, values

    def update(self, keys: Tensor, values: Tensor) -> KeysValues:
        """Return the keys and values to attend to: the visible cached ones, then the fresh ones."""
        if self.at is not None:
            return self._write(self.at, keys, values)
        if self.stores:
            self.fresh = keys, values
        if len(self.reads) == 0:
            return keys, values
        assert self.stored is not None
        return self._join(self.stored[0], keys), self._join(self.stored[1], values)

    def aside(self, keys: Tensor, values: Tensor) -> KeysValues:
        """Return the cached K/V of the one visible span, without the fresh ones, which are not
        written."""
        if self.stores:
            self.fresh = keys, values
        (span,) = self.reads
        return self.read(*span)

    def read(self, start: int, stop: int) -> KeysValues:
        """Return views of the cached K/V of a span."""
        assert self.stored is not None
        return self.stored[0][:, :, start:stop], self.stored[1][:, :, start:stop]

    def _join(self, stored: Tensor, fresh: Tensor) -> Tensor:
        """Return a copy of the cached K/V to read, followed by the fresh ones."""
        if isinstance(self.reads, Tensor):
            return torch.cat([stored.index_select(2, self.reads), fresh], dim=2)
        return torch.cat([*(stored[:, :, start:stop] for start, stop in self.reads), fresh], dim=2)

    def slots(self, count: int) -> KeysValues | None:
        """Return the part of the buffers where `count` fresh K/V are written, branches one after
        another; None if it is not known."""
        if self.stored is None or not isinstance(self.at, int):
            return None
        stop = self.at + count
        self._lengthen(self.stored, stop)
        self.fresh = self.read(self.at, stop)
        return self.fresh

    def _write(self, at: int | Tensor, keys: Tensor, values: Tensor) -> KeysValues:
        """Return cached and fresh K/V as views of the buffers; fresh ones that are not in their
        slots are copied there."""
        if self.stored is None:
            self.stored = buffer(keys, self.length), buffer(values, self.length)
        if isinstance(at, Tensor):
            for stored, fresh in zip(self.stored, (keys, values), strict=True):
                stored.index_copy_(2, at, fresh)
            ((_, stop),) = self.reads
        else:
            if self.fresh is None or self.fresh[0] is not keys:
                slots = self.slots(keys.shape[2])
                assert slots is not None
                slots[0].copy_(keys)
                slots[1].copy_(values)
            stop = at + keys.shape[2]
        return self.read(0, stop)

    def _lengthen(self, stored: KeysValues, length: int) -> None:
        """Enlarge the buffers to at least `length` positions, if all branches need more than the
        canvas."""
        keys, values = stored
        if length > keys.shape[2]:
            length = max(length, int(LENGTHENS * keys.shape[2]))
            self.stored = buffer(keys, length, keys), buffer(values, length, values)
            self.moved = True

    def store(self, plan: ForwardPlan, branches: int, branch: Tensor) -> None:
        """Copy the branch's fresh K/V of `plan.store` into the buffers, unless they are there."""
        if self.at is not None and branches == 1:
            return
        assert self.fresh is not None
        if self.stored is None:
            self.stored = buffer(self.fresh[0], self.length), buffer(self.fresh[1], self.length)
        if plan.sets is not None:
            row_S = torch.searchsorted(plan.sets.feed_F, plan.sets.store_S)
            for stored, fresh in zip(self.stored, self.fresh, strict=True):
                stored.index_copy_(2, plan.sets.store_S, fresh.index_select(2, row_S))
            return
        (first, last), offset = plan.store, plan.feed[0]
        for stored, fresh in zip(self.stored, self.fresh, strict=True):
            branches_KGFE = fresh  # branches are a batch, or there is only one
            if len(fresh) != branches:
                branches_KGFE = fresh[0].unflatten(1, (branches, -1)).transpose(0, 1)
            kept_KGSE = branches_KGFE[:, :, first - offset : last - offset]
            stored[0, :, first:last] = pick(kept_KGSE, 0, branch)


class PositionCache:
    """One `LayerCache` per layer; implements `core.denoiser.KVCache`.

    shifted: row i predicts position i + 1, so the hidden state before a window is kept.
    parts: processes that the heads are split over, each with a cache of its own.
    """

    def __init__(self, layers: int, length: int, shifted: bool = True, parts: int = 1) -> None:
        self.positions = [LayerCache(length) for _ in range(layers)]
        self.spans: tuple[Span, ...] = ()
        self.shifted, self._parts = shifted, parts
        self.length = 0  # positions [0, length) hold valid keys and values
        self.kept: ForwardPlan | None = None
        self.features: Tensor | None = None
        self._held: tuple[ForwardPlan, Tensor] | None = None
        self._boundary: dict[int, Tensor] = {}
        self.probes: list[Tensor] = []  # of each layer, by the last plan with `probe`
        self._probe: AttentionProbe | None = None  # of the forward's plan
        self.layer_work: list[tuple[int, int]] = []
        """Rows computed and bytes read by each layer of the last forward, if it chose its rows."""
        self.graph = (False, False)  # whether the last forward was one, and whether it recorded it
        self.of_all_layers: tuple[Tensor, Tensor] | None = None
        """Stored (N, 2, 1, G, C, E) and last computed (N, 2, K, G, F, E) K/V, where those of all
        layers are one tensor."""

    @property
    def probed(self) -> Tensor | None:
        """What `plan.probe` gave in each layer of the last forward that had one, (N, ...)."""
        return torch.stack(self.probes) if self.probes else None

    @property
    def work(self) -> RowWork | None:
        """What the last forward did, if each layer chose its rows."""
        if not self.layer_work:
            return None
        rows, read = map(sum, zip(*self.layer_work, strict=True))
        return RowWork(round(rows / len(self.layer_work), 4), read)

    def begin(self, plan: ForwardPlan, canvas: int) -> None:
        """Prepare for the forward of `plan`: what each layer reads, and where its fresh K/V go."""
        self._held = self.features = self.of_all_layers = None
        self.graph, self.layer_work = (False, False), []
        self._probe = plan.probe
        if plan.probe is not None:
            self.probes = []
        self.spans = self._visible(plan, canvas)
        at: int | None = None
        reads: Iterable[Reads] = repeat(self.spans)
        if plan.recompute is not None:  # written over what is there, as layers are computed
            at, reads = 0, repeat((plan.feed,))
        elif plan.sets is not None:
            read_C = plan.sets.read_C
            reads = read_C if read_C.dim() > 1 else repeat(read_C)
        elif self.spans == ((0, plan.feed[0]),) and self.length <= plan.feed[0]:
            at = plan.feed[0]
        for layer, read in zip(self.positions, reads, strict=False):
            layer.begin(read, at, plan.stores)

    def _visible(self, plan: ForwardPlan, canvas: int) -> tuple[Span, ...]:
        """Return the cached spans around what is fed; none where positions or rows are chosen."""
        if plan.sets is not None or plan.recompute is not None:
            return ()
        start, stop = plan.feed
        if start > self.length:
            raise ValueError(
                f"The plan feeds from position {start}, but only {self.length} are cached."
            )
        around = ((0, start), (stop, min(self.length, canvas)))
        return tuple(span for span in around if span[0] < span[1])

    def update(self, keys: Tensor, values: Tensor, layer: int, kwargs: object = None) -> KeysValues:
        """Store fresh K/V of a layer and return what it attends to; called by its attention, whose
        `kwargs` (since transformers 5.24) are not read."""
        return self.positions[layer].update(keys, values)

    def aside(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        """Return the cached K/V of a layer, apart from the fresh ones."""
        return self.positions[layer].aside(keys, values)

    def slots(self, layer: int, rows: int) -> KeysValues | None:
        """Return where a layer's fresh K/V are to be written before `update`; None: anywhere."""
        return self.positions[layer].slots(rows)

    def show(self, query_1AFE: Tensor, key_1GXE: Tensor, mask_11FX: Tensor | None) -> None:
        """Let the plan's probe, if it has one, see the queries and keys of a layer."""
        if self._probe is not None:
            scale = query_1AFE.shape[-1] ** -0.5
            self.probes.append(self._probe(query_1AFE[0], key_1GXE[0], scale, mask_11FX))

    def hold(self, plan: ForwardPlan, hidden_KFH: Tensor) -> None:
        """Hold the last forward's hidden states until `keep` or the next forward."""
        if plan.stores:
            self._held = (plan, hidden_KFH)

    def keep(self, plan: ForwardPlan, branch: Tensor) -> None:
        """Store the last forward's K/V of `branch` (0-d int64) for the positions `plan.store`.

        A prefill or renewal counts as one even if no position lies before its block.
        """
        first, last = plan.store
        if not plan.stores:
            if plan.kind in (ForwardKind.PREFILL, ForwardKind.REFRESH):
                self.kept = plan
            return
        if self._held is None or self._held[0] is not plan:
            raise ValueError("keep() needs the plan of the last forward, once.")
        fits = plan.feed[0] <= first <= self.length and last <= plan.feed[1]
        if plan.sets is None and not fits:
            raise ValueError(f"Cannot store {plan.store} of {plan.feed}, {self.length} cached.")
        hidden_KFH = self._held[1]
        if self.of_all_layers is not None:
            stored_N21GCE, fresh_N2KGFE = self.of_all_layers
            kept = slice(first - plan.feed[0], last - plan.feed[0])
            stored_N21GCE[:, :, 0, :, first:last] = pick(fresh_N2KGFE, 2, branch)[:, :, :, kept]
        else:
            for layer in self.positions:
                layer.store(plan, len(hidden_KFH), branch)
                layer.fresh = None
        predicts_next = plan.rows[1] > plan.feed[1]  # as will plans after it, with what they feed
        if self.shifted and plan.recompute is None and not predicts_next:
            self._keep_boundary(plan, pick(hidden_KFH, 0, branch))
        self.length = max(self.length, last)
        self.kept, self._held = plan, None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep the K/V of rows of the last forward as those of the positions from `length` on."""
        if not rows:
            return
        assert self.kept is not None
        first, last = self.length, self.length + len(rows)
        if self.of_all_layers is not None:
            stored_N21GCE, fresh_N2KGFE = self.of_all_layers
            rows_S = to_device(rows, fresh_N2KGFE.device)
            stored_N21GCE[:, :, 0, :, first:last] = fresh_N2KGFE[:, :, 0].index_select(3, rows_S)
        else:
            # They were written after what was cached: the first of them are in their place.
            places = [self.kept.feed[0] + row for row in rows]
            if places != [*range(first, last)] and (buffers := self._buffers()):
                places_S = to_device(places, buffers[0].device)
                for stored in buffers:
                    stored[:, :, first:last] = stored.index_select(2, places_S)
        self.length = last

    def _buffers(self) -> list[Tensor]:
        """Return the stored keys and values of all layers."""
        return [stored for layer in self.positions for stored in layer.stored or ()]

    @property
    def execution(self) -> Execution:
        """How the last forward ran."""
        return Execution(*self.graph, any(layer.moved for layer in self.positions))

    @property
    def bytes_per_position(self) -> int:
        """Bytes that all layers and parts keep of a position; 0 while nothing was stored."""
        buffers = [*self._buffers(), *(s for layer in self.positions for s in layer.outputs)]
        return sum(s.shape[1] * s.shape[3] * s.itemsize for s in buffers) * self._parts

    def predicting(self, where_KL: Tensor) -> Tensor:
        """Return the rows that predict the positions `where`, bool (K, L)."""
        return torch.nn.functional.pad(where_KL[:, 1:], (0, 1)) if self.shifted else where_KL

    def predicted(self, rows_KL: Tensor) -> Tensor:
        """Return the positions that `rows` predict, bool (K, L)."""
        return torch.nn.functional.pad(rows_KL[:, :-1], (1, 0)) if self.shifted else rows_KL

    def crop(self, length: int) -> None:
        """Forget the keys and values of positions at and beyond `length`."""
        self.length = min(self.length, length)

    @torch.inference_mode()
    def copy_prefix(self, other: PositionCache, length: int) -> None:
        """Start from another cache's K/V of positions [0, length)."""
        for layer, source in zip(self.positions, other.positions, strict=True):
            assert source.stored is not None
            keys, values = (buffer(s, layer.length, s[:, :, :length]) for s in source.stored)
            layer.stored = keys, values
        self.length = length

    def packed(self, plan: ForwardPlan) -> Tensor:
        """Return what `keep` stored for `plan`, flattened, to send to a cache in another
        process."""
        return torch.cat([part.flatten() for part in self._kept_parts(plan)])

    def unpack(self, plan: ForwardPlan, packed: Tensor) -> None:
        """Replace what `keep` stored for `plan` by what another process packed."""
        parts = self._kept_parts(plan)
        for part, values in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))

    def _kept_parts(self, plan: ForwardPlan) -> list[Tensor]:
        """Return views of the stored K/V of `plan.store`, and the kept boundary hidden states."""
        views = [stored[:, :, slice(*plan.store)] for stored in self._buffers()]
        return views + [self._boundary[position] for position in sorted(self._boundary)]

    def _keep_boundary(self, plan: ForwardPlan, hidden_FH: Tensor) -> None:
        """Keep the hidden states that predict the positions a later window may begin at."""
        if plan.sets is not None:
            before = self.boundary_of_sets(plan, hidden_FH)
            feed_F, row = plan.sets.feed_F, plan.rows[0] - 1
            at = torch.searchsorted(feed_F, row).clamp(max=len(feed_F) - 1)
            is_fed = pick(feed_F, 0, at) == row
            self._boundary = {plan.rows[0]: torch.where(is_fed, pick(hidden_FH, 0, at), before)}
            return
        start, stop = plan.feed
        starts = {plan.store[1], plan.rows[0]}
        kept = {p: hidden for p, hidden in self._boundary.items() if p in starts}
        new = {p: hidden_FH[p - 1 - start].clone() for p in starts if start < p <= stop}
        self._boundary = kept | new

    def boundary_of_sets(self, plan: ForwardPlan, hidden_FH: Tensor) -> Tensor:
        """Return the kept hidden state (H,) that predicts the plan's first row, 0 if there is
        none."""
        kept = self._boundary.get(plan.rows[0])
        return hidden_FH.new_zeros(hidden_FH.shape[1:]) if kept is None else kept

    def boundary(self, position: int) -> Tensor:
        """Return the kept hidden state (H,) that predicts `position`."""
        if position not in self._boundary:
            raise DllmBenchError(
                f"Logits of this model are shifted by one and the row that predicts position "
                f"{position} is neither fed nor kept (kept: {sorted(self._boundary)}); use a cache "
                f"that feeds the position before its window or keeps K/V up to it."
            )
        return self._boundary[position]


def buffer(like: Tensor, length: int, begin: Tensor | None = None) -> Tensor:
    """Return a buffer (1, G, `length`, E) that holds `begin`; writable in and out of inference
    mode."""
    with torch.inference_mode(False):
        values = like.new_zeros(1, like.shape[1], length, like.shape[3])
    if begin is not None:
        values[:, :, : begin.shape[2]] = begin
    return values


def pick(values: Tensor, dim: int, branch: Tensor) -> Tensor:
    """Return the entry `branch` (0-d int64) of dimension `dim`, without waiting for the device."""
    if values.shape[dim] == 1:
        return values.squeeze(dim)
    return values.index_select(dim, branch.reshape(1)).squeeze(dim)
