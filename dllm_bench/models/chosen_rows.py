"""Forwards in which every layer chooses the rows it computes, by the rule `ForwardPlan.recompute`.

The hidden states of all rows pass through the layers. A layer computes query, key, attention and
MLP of the rows that the rule wants; the others add what attention and MLP gave for them last. Key
and value of a row stay in the cache until they are computed again. The parts of a `DecoderLayer`
are called on fewer rows: a layout says by `plain_layers` that its layers have them.

Shapes: X fed positions, R rows that are computed, S positions of which the rule chooses, G heads of
keys and values, E head size, C = G * E, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.denoiser import RowChoice, RowWork
from dllm_bench.models.kv import LayerCache, PositionCache, buffer
from dllm_bench.models.layer_ops import Rotation
from dllm_bench.models.layers import DecoderLayer

ATTENTION, MLP = 0, 1  # indices of `LayerCache.outputs`
LayerOfRows = tuple[DecoderLayer, Tensor | None, Rotation]
"""A layer, its mask over X rows or 1, and its rotation of X rows."""


@dataclass
class RowStore:
    """What a layer keeps, in a forward that computes some rows; its attention calls `update`."""

    kept: LayerCache
    length: int
    """X."""
    rows_R: Tensor | None = None
    """Rows that are computed; None: all."""
    chosen: int = 0
    """How many of them the rule chose by V."""

    @property
    def any_row(self) -> bool:
        """Whether there are rows to compute."""
        return self.rows_R is None or self.rows_R.shape[0] > 0

    def update(
        self, keys_1GRE: Tensor, values_1GRE: Tensor, *rest: object
    ) -> tuple[Tensor, Tensor]:
        """Keep fresh K/V; the K/V of all X positions."""
        if not self.kept.is_initialized:
            self.kept.lazy_initialization(keys_1GRE, values_1GRE)
        assert self.kept.keys is not None
        assert self.kept.values is not None
        return self._write(self.kept.keys, keys_1GRE), self._write(self.kept.values, values_1GRE)

    def slots(self, layer: int, rows: int) -> None:
        """Anywhere: rows are not written one after another."""

    def renew(self, output: int, fresh_1RH: Tensor | None) -> Tensor:
        """Keep fresh outputs of attention or MLP; those of all X positions, (1, X, H)."""
        outputs = self.kept.outputs
        if fresh_1RH is None:
            return outputs[output][:, 0, : self.length]
        if len(outputs) == output:
            outputs.append(buffer(fresh_1RH[:, None], self.kept.length))
        return self._write(outputs[output], fresh_1RH[:, None])[:, 0]

    def _write(self, stored_1GLE: Tensor, fresh_1GRE: Tensor) -> Tensor:
        stored_1GXE = stored_1GLE[:, :, : self.length]
        if self.rows_R is None:
            return stored_1GXE.copy_(fresh_1GRE)
        return stored_1GXE.index_copy_(2, self.rows_R, fresh_1GRE)

    def of_rows(self, values: Tensor, dim: int) -> Tensor:
        """The rows that are computed, of a tensor with X or 1 of them in dimension `dim`."""
        if self.rows_R is None or values.shape[dim] == 1:
            return values
        return values.index_select(dim, self.rows_R)

    def judge(self, rule: RowChoice, span: tuple[int, int], new_1SC: Tensor) -> Tensor:
        """Rows (R,) of `span` that the rule chooses by its new V, which are kept."""
        assert self.kept.values is not None
        stored_1GSE = self.kept.values[:, :, slice(*span)]
        old_SC = stored_1GSE[0].transpose(0, 1).flatten(1)
        index_R = rule.choose(old_SC, new_1SC[0])
        self.chosen = len(index_R)
        stored_1GSE.copy_(new_1SC.unflatten(-1, (stored_1GSE.shape[1], -1)).transpose(1, 2))
        return index_R + span[0]


def run_chosen_rows(
    rule: RowChoice, kv: PositionCache, hidden_1XH: Tensor, layers: Sequence[LayerOfRows]
) -> Tensor:
    """Hidden states (1, X, H) after all layers, each of which computes the rows it chooses."""
    length, rows, read = hidden_1XH.shape[1], 0, 0
    for index, parts in enumerate(layers):
        store = RowStore(kv.positions[index], length)
        hidden_1XH = _run_layer(rule, store, hidden_1XH, parts, rule.spans(index))
        computed = length if store.rows_R is None else store.rows_R.shape[0]
        rows += computed
        read += _bytes_read(store, computed)
    kv.work = RowWork(round(rows / len(layers), 4), read)
    return hidden_1XH


def _run_layer(
    rule: RowChoice,
    store: RowStore,
    hidden_1XH: Tensor,
    parts: LayerOfRows,
    spans: tuple[tuple[int, int], tuple[int, int]],
) -> Tensor:
    """The hidden states after one layer."""
    layer, mask, rotation = parts
    normed_1XH = layer.normed(hidden_1XH)
    _choose_rows(rule, store, layer, normed_1XH, spans)
    attended_1RH = changed_1RH = None
    if store.any_row:
        cos, sin = rotation
        attended_1RH = layer.attended(
            store.of_rows(normed_1XH, 1),
            None if mask is None else store.of_rows(mask, 2),
            (store.of_rows(cos, 1), store.of_rows(sin, 1)),
            store,
        )
    if rule.also_R is not None:
        _show_attention(rule, store, normed_1XH, parts)
    hidden_1XH = hidden_1XH + store.renew(ATTENTION, attended_1RH)
    if store.any_row:
        changed_1RH = layer.changed(store.of_rows(hidden_1XH, 1))
    return hidden_1XH + store.renew(MLP, changed_1RH)


def _choose_rows(
    rule: RowChoice,
    store: RowStore,
    layer: DecoderLayer,
    normed_1XH: Tensor,
    spans: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """Set the rows that the layer computes."""
    always, judged = spans
    if always == (0, store.length):
        return
    chosen = []
    if judged[0] < judged[1]:
        new_1SC = layer.values(normed_1XH[:, slice(*judged)])
        chosen.append(store.judge(rule, judged, new_1SC))
    if rule.also_R is not None:
        chosen.append(rule.also_R)
    if not chosen or always[0] < always[1]:
        chosen = [torch.arange(*always, device=normed_1XH.device), *chosen]
    store.rows_R = torch.cat(chosen) if len(chosen) > 1 else chosen[0]


def _show_attention(
    rule: RowChoice, store: RowStore, normed_1XH: Tensor, parts: LayerOfRows
) -> None:
    """Let the rule see what its own rows attend to in a layer."""
    (layer, mask, (cos, sin)), rows_R = parts, rule.also_R
    assert rows_R is not None
    assert store.kept.keys is not None
    of_rows = RowStore(store.kept, store.length, rows_R).of_rows
    rotation = (of_rows(cos, 1), of_rows(sin, 1))
    query_ARE = layer.queries(of_rows(normed_1XH, 1), rotation)
    mask_11RX = None if mask is None else of_rows(mask, 2)
    key_GXE = store.kept.keys[0, :, : store.length]
    rule.attended(query_ARE, key_GXE, query_ARE.shape[-1] ** -0.5, mask_11RX)


def _bytes_read(store: RowStore, rows: int) -> int:
    """What a layer takes from the cache: K, V and both outputs of rows that are not computed, and
    the old V of those that were chosen by comparing it with the new one.
    """
    keys, values, outputs = store.kept.keys, store.kept.values, store.kept.outputs
    assert keys is not None
    assert values is not None
    skipped = store.length - rows
    per_row = [(keys, skipped), (values, skipped + store.chosen)]
    per_row += [(output, skipped) for output in outputs]
    return sum(count * s.shape[1] * s.shape[3] * s.itemsize for s, count in per_row)
