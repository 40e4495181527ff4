"""Forwards in which every layer chooses the rows it computes, by the rule `ForwardPlan.recompute`.

The hidden states of all rows pass through the layers. A layer computes query, key, attention and
MLP of the rows that the rule chooses; the other rows add the outputs of attention and MLP that were
computed for them last. Key and value of a row stay in the cache until they are computed again. It
calls the parts of a `DecoderLayer` on fewer rows; a layout whose layers have these parts sets
`plain_layers`.

Shapes: X fed positions, R rows that are computed, S positions of which the rule chooses, G heads of
keys and values, E head size, C = G * E, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan, RowChoice
from dllm_bench.models.attention import AnyMask, BatchCache, BatchMask, FreshCache
from dllm_bench.models.kv import PositionCache, buffer
from dllm_bench.models.layer_ops import Rotation
from dllm_bench.models.layers import DecoderLayer

ATTENTION, MLP = 0, 1  # indices of `LayerCache.outputs`


def layers_under(
    plan: ForwardPlan, kv: PositionCache, layers: Sequence[DecoderLayer]
) -> Sequence[Callable[..., Tensor]]:
    """Return the layers as a forward of this plan runs them."""
    if plan.recompute is None:
        return layers
    return [RowLayer(layer, index, plan.recompute, kv) for index, layer in enumerate(layers)]


class RowLayer:
    """A layer that computes some rows of a request; implements `core.denoiser.LayerRows`."""

    def __init__(self, layer: DecoderLayer, index: int, rule: RowChoice, kv: PositionCache) -> None:
        self.index = index
        self._layer, self._rule, self._kv = layer, rule, kv
        self._kept = kv.positions[index]
        self._length = 0  # X
        self._rows_R: Tensor | None = None  # rows that are computed; None: all
        self._normed_1XH: Tensor
        self._compared = 0  # rows computed because of their V

    def __call__(
        self, hidden_1XH: Tensor, mask: AnyMask, rotation: Rotation, cache: FreshCache
    ) -> Tensor:
        """Return hidden states (1, X, H) after the layer."""
        self._length = hidden_1XH.shape[1]
        self._normed_1XH = self._layer.normed(hidden_1XH)
        self._rows_R = self._rule.rows(self)
        rows = self._length if self._rows_R is None else self._rows_R.shape[0]
        attended_1RH = changed_1RH = None
        if rows:
            attended_1RH = self._attended(rows, mask, rotation, cache)
        hidden_1XH = hidden_1XH + self._renewed(ATTENTION, attended_1RH)
        if rows:
            changed_1RH = self._layer.changed(self._of_rows(hidden_1XH, 1))
        hidden_1XH = hidden_1XH + self._renewed(MLP, changed_1RH)
        self._kv.layer_work.append((rows, self._bytes_read(self._length - rows)))
        return hidden_1XH

    def span(self, first: int, last: int) -> Tensor:
        """See `LayerRows`."""
        return torch.arange(first, last, device=self._normed_1XH.device)

    def compared(self, first: int, last: int, choose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See `LayerRows`."""
        assert self._kept.stored is not None
        stored_1GSE = self._kept.stored[1][:, :, first:last]
        old_SC = stored_1GSE[0].transpose(0, 1).flatten(1)
        new_1SC = self._layer.values(self._normed_1XH[:, first:last])
        index_R = choose(old_SC, new_1SC[0])
        stored_1GSE.copy_(new_1SC.unflatten(-1, (stored_1GSE.shape[1], -1)).transpose(1, 2))
        self._compared = len(index_R)
        return index_R + first

    def _of_rows(self, values: Tensor, dim: int) -> Tensor:
        """Return the computed rows of a tensor that has X rows, or 1, in dimension `dim`."""
        if self._rows_R is None or values.shape[dim] == 1:
            return values
        return values.index_select(dim, self._rows_R)

    def _attended(self, rows: int, mask: AnyMask, rotation: Rotation, cache: FreshCache) -> Tensor:
        """Return what attention adds to the rows, (1, R, H); their K/V are kept."""
        if self._rows_R is not None:
            self._kept.at = self._rows_R
        if isinstance(mask, BatchMask):  # of this request alone
            requests, (own,) = [replace(mask.requests[0], rows=rows)], mask.masks
            own = self._of_rows(own, 2) if isinstance(own, Tensor) else own
            mask, cache = BatchMask(mask.attention, requests, [own]), BatchCache(requests)
        elif isinstance(mask, Tensor):
            mask = self._of_rows(mask, 2)
        cos, sin = (self._of_rows(part, 1) for part in rotation)
        return self._layer.attended(self._of_rows(self._normed_1XH, 1), mask, (cos, sin), cache)

    def _renewed(self, output: int, fresh_1RH: Tensor | None) -> Tensor:
        """Keep fresh outputs of attention or MLP; return those of all X positions, (1, X, H)."""
        outputs = self._kept.outputs
        if len(outputs) == output:
            assert fresh_1RH is not None
            outputs.append(buffer(fresh_1RH[:, None], self._kept.length))
        kept_1XH = outputs[output][:, 0, : self._length]
        if fresh_1RH is None:
            return kept_1XH
        if self._rows_R is None:
            return kept_1XH.copy_(fresh_1RH)
        return kept_1XH.index_copy_(1, self._rows_R, fresh_1RH)

    def _bytes_read(self, skipped: int) -> int:
        """Return the bytes taken from the cache: K, V and both outputs of rows that are not
        computed, and the old V of those that were chosen by comparing it with the new one."""
        assert self._kept.stored is not None
        keys, values = self._kept.stored
        per_row = [(keys, skipped), (values, skipped + self._compared)]
        per_row += [(output, skipped) for output in self._kept.outputs]
        return sum(count * s.shape[1] * s.shape[3] * s.itemsize for s, count in per_row)
