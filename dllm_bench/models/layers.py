"""The decoder layers of a model: transformers' modules, or the same layers in fewer launches.

`PlainLayer` computes what the decoder layers of Llama, Qwen2 and Qwen3 compute, up to rounding:
RMSNorm, attention with rotary embedding, RMSNorm, SwiGLU, both added to their input. It reads the
weights of transformers' module. On a CUDA device the projections that share an input are one
matrix, joined once; the module's weights are then views of it, so that there is no copy and the
module still computes the same. `DecoderLayer` calls transformers' module and is the fallback: for
other layers, eager attention, quantised, adapted, compiled or sharded weights, and modules made
elsewhere (`wrap`).

`RowLayer` computes only the rows that the rule `ForwardPlan.recompute` chooses. The hidden states
of all rows pass through the layers. A layer computes query, key, attention and MLP of the rows that
the rule chooses; the other rows add the outputs of attention and MLP that were computed for them
last. Key and value of a row stay in the cache until they are computed again. It calls the parts of
a `DecoderLayer` on fewer rows; a layout whose layers have these parts sets `plain_layers`.

Shapes: P sequences, F rows of each, R rows that are computed, A heads of queries, G heads of keys
and values, E head size, X = A + 2 G, H hidden size, C = G * E. In `RowLayer`: X fed positions, S
positions of which the rule chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear, rms_norm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dllm_bench.core.denoiser import ForwardPlan, RowChoice
from dllm_bench.models.attention import AttentionInputs, BatchCache, BatchMask, attend
from dllm_bench.models.kv import PositionCache, buffer
from dllm_bench.models.layer_ops import has_kernels, normed_heads, rotate_kernel, rotated, swiglu
from dllm_bench.models.plain_module import FAMILIES

# --- whole layers ---------------------------------------------------------------------------------

PLAIN_MODULES = ("PlainModule", *(f"{family}ForCausalLM" for family in FAMILIES))
"""Classes whose layers `PlainLayer` computes; all but the first are of transformers."""
Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, (P, A or G, F, E)."""
WITHOUT_BIAS = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class DecoderLayer:
    """A layer of transformers, as a whole and by its parts for forwards that compute some rows."""

    takes_windows: ClassVar[bool] = False
    """Whether a mask may be `BranchWindows`."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._arguments = tuple(signature(module.forward).parameters)

    def __call__(self, hidden_PFH: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return hidden states (P, F, H) after the layer; those before may be overwritten."""
        return cast(Tensor, self.module(hidden_PFH, **inputs.named(self._arguments)))

    def normed(self, hidden_PFH: Tensor) -> Tensor:
        """Return the normed hidden states that attention reads."""
        return cast(Tensor, self.module.input_layernorm(hidden_PFH))

    def values(self, normed_1RH: Tensor) -> Tensor:
        """Return V (1, R, C) of normed rows."""
        return cast(Tensor, self.module.self_attn.v_proj(normed_1RH))

    def attended(self, normed_PFH: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the term that attention adds to the hidden states, (P, F, H)."""
        return cast(Tensor, self.module.self_attn(normed_PFH, **inputs.named(self._arguments))[0])

    def changed(self, hidden_PFH: Tensor) -> Tensor:
        """Return the term that norm and MLP add to the hidden states, (P, F, H)."""
        return cast(Tensor, self.module.mlp(self.module.post_attention_layernorm(hidden_PFH)))


class Projections:
    """Linear layers of one input, with separate matrices, or with views of joined ones."""

    def __init__(self, layers: Sequence[Linear], joined: bool) -> None:
        groups = [layers] if joined else [[layer] for layer in layers]
        self._matrices = list[tuple[Tensor, Tensor | None]]()
        for group in groups:
            bias = None if group[0].bias is None else _joined([layer.bias for layer in group])
            self._matrices.append((_joined([layer.weight for layer in group]), bias))

    def __call__(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each matrix."""
        return tuple(linear(values, weight, bias) for weight, bias in self._matrices)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parameters of linear layers as one tensor; each is then a view of its rows."""
    if len(parts) == 1:
        return parts[0].data
    whole = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return whole


class PlainLayer(DecoderLayer):
    """A layer of one of `PLAIN_MODULES`, in few launches."""

    takes_windows = True

    def __init__(self, module: Any, index: int, joined: bool) -> None:
        super().__init__(module)
        attention, mlp = module.self_attn, module.mlp
        self.index = index
        self._norms = (module.input_layernorm, module.post_attention_layernorm)
        self._head_size: int = attention.head_dim
        inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._counts = [layer.out_features // self._head_size for layer in inputs]
        self._joined = joined
        self._inputs = Projections(inputs, joined)
        self._gate_up = Projections((mlp.gate_proj, mlp.up_proj), joined)
        self._output: Tensor = attention.o_proj.weight.data.t()
        self._down: Tensor = mlp.down_proj.weight.data.t()
        self._head_norms = _head_norms(attention, self._counts, joined)
        self._eps: float = module.input_layernorm.variance_epsilon

    @property
    def kv_heads(self) -> tuple[int, int]:
        """Heads of keys and values, and their size: (G, E)."""
        return self._counts[1], self._head_size

    def __call__(self, hidden_PFH: Tensor, inputs: AttentionInputs) -> Tensor:
        """See `DecoderLayer`."""
        return self.after(hidden_PFH, self.normed(hidden_PFH), inputs)

    def after(self, hidden_PFH: Tensor, read_PFX: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return hidden states (P, F, H) after the layer, in place of those before; attention reads
        `read`."""
        rows_NH = hidden_PFH.view(-1, hidden_PFH.shape[-1])
        rows_NH.addmm_(self._attention(read_PFX, inputs).view(len(rows_NH), -1), self._output)
        rows_NH.addmm_(self._inner(hidden_PFH).view(len(rows_NH), -1), self._down)
        return hidden_PFH

    def normed(self, hidden_PFH: Tensor) -> Tensor:
        """See `DecoderLayer`."""
        return self._norm(hidden_PFH, 0)

    def attended(self, normed_PFH: Tensor, inputs: AttentionInputs) -> Tensor:
        """See `DecoderLayer`."""
        return self._attention(normed_PFH, inputs) @ self._output

    def changed(self, hidden_PFH: Tensor) -> Tensor:
        """See `DecoderLayer`."""
        return self._inner(hidden_PFH) @ self._down

    def _norm(self, hidden_PFH: Tensor, which: int) -> Tensor:
        return rms_norm(hidden_PFH, hidden_PFH.shape[-1:], self._norms[which].weight, self._eps)

    def _inner(self, hidden_PFH: Tensor) -> Tensor:
        """Return the hidden layer of the MLP, (P, F, I)."""
        return swiglu(self._gate_up(self._norm(hidden_PFH, 1)))

    def _attention(self, normed_PFH: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the heads of attention, (P, F, A * E), before the output projection."""
        return attend(*self._all_turned(normed_PFH, inputs), inputs, self.index)

    def give_context(self, normed_PFH: Tensor, inputs: AttentionInputs) -> None:
        """Give the cache the K/V of rows that attend to nothing."""
        _, keys, values = self._all_turned(normed_PFH, inputs)
        inputs.cache.update(keys, values, self.index)

    def _all_turned(self, normed_PFH: Tensor, inputs: AttentionInputs) -> Heads:
        """Return the heads of rows, queries and keys normed and rotated."""
        heads = [part.unflatten(-1, (-1, self._head_size)) for part in self._inputs(normed_PFH)]
        by_kernel = self._joined and has_kernels(normed_PFH)
        return self._turned_by_kernel(heads, inputs) if by_kernel else self._turned(heads, inputs)

    def _turned(self, heads: list[Tensor], inputs: AttentionInputs) -> Heads:
        """Compute `_all_turned` by torch's passes."""
        queries, keys, values = self._counts
        if self._joined:
            heads = list(heads[0].split((queries + keys, values), 2))
        *turning, value = heads
        if self._head_norms:
            pairs = zip(turning, self._head_norms, strict=True)
            turning = [normed_heads(part, weight, self._eps) for part, weight in pairs]
        turning = [rotated(part, inputs.rotation) for part in turning]
        if self._joined:
            turning = list(turning[0].split((queries, keys), 2))
        query, key = turning
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _turned_by_kernel(self, heads: list[Tensor], inputs: AttentionInputs) -> Heads:
        """Compute `_all_turned` in one launch; K/V go to their place in the cache if it is
        known."""
        (heads_PFXE,) = heads
        sequences, rows = heads_PFXE.shape[:2]
        keys, values = inputs.cache.slots(self.index, rows) or heads_PFXE.new_empty(
            2, sequences, self._counts[1], rows, self._head_size
        )
        weight = self._head_norms[0] if self._head_norms else None
        queries = rotate_kernel(heads_PFXE, inputs.rotation, (keys, values), weight, self._eps)
        return queries.transpose(1, 2), keys, values


def _head_norms(attention: Any, counts: Sequence[int], joined: bool) -> list[Tensor]:
    """Return weights of the norms of query and key heads, (E,) each, or one of (A + G, E); or
    nothing."""
    if not hasattr(attention, "q_norm"):
        return []
    weights = [attention.q_norm.weight.data, attention.k_norm.weight.data]
    if not joined:
        return weights
    return [torch.cat([w.expand(count, -1) for w, count in zip(weights, counts[:2], strict=True)])]


def own_layers(module: Any, joined: bool | None = None) -> list[DecoderLayer]:
    """Return the layers of a `*ForCausalLM`: `PlainLayer` where these compute the same.

    joined: whether weights with the same input become one matrix; None: on a CUDA device, where
    launches count. On a CPU the joined MLP is slower, and weights stay mapped files.
    """
    if not computes_plain_layers(module):
        return module_layers(module)
    joined = module.lm_head.weight.is_cuda if joined is None else joined
    return [PlainLayer(layer, i, joined) for i, layer in enumerate(module.model.layers)]


def module_layers(module: Any) -> list[DecoderLayer]:
    """Return the layers of a `*ForCausalLM` as transformers computes them."""
    return [DecoderLayer(layer) for layer in module.model.layers]


def computes_plain_layers(module: Any) -> bool:
    """Return whether `PlainLayer` computes the module's layers: by its class, config and
    weights."""
    config = module.config
    return (
        type(module).__name__ in PLAIN_MODULES
        and (config._attn_implementation, config.hidden_act) == ("sdpa", "silu")
        and "sliding_attention" not in (getattr(config, "layer_types", None) or ())
        and all(_is_plain(layer) for layer in module.model.layers)
    )


def _is_plain(layer: Any) -> bool:
    """Return whether the linear layers are torch's own and have biases only where `PlainLayer`
    has."""
    parts = dict(layer.named_modules())
    linears = [parts[name] for name in parts if name.endswith("_proj")]
    plain = all(
        type(part) is Linear and not is_traceable_wrapper_subclass(part.weight) for part in linears
    )
    return plain and all(parts[name].bias is None for name in WITHOUT_BIAS)


# --- layers that choose rows ----------------------------------------------------------------------

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

    def __call__(self, hidden_1XH: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return hidden states (1, X, H) after the layer."""
        self._length = hidden_1XH.shape[1]
        self._normed_1XH = self._layer.normed(hidden_1XH)
        self._rows_R = self._rule.rows(self)
        rows = self._length if self._rows_R is None else self._rows_R.shape[0]
        attended_1RH = self._attended(rows, inputs) if rows else None
        hidden_1XH = hidden_1XH + self._renewed(ATTENTION, attended_1RH)
        changed_1RH = self._layer.changed(self._of_rows(hidden_1XH, 1)) if rows else None
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

    def _attended(self, rows: int, inputs: AttentionInputs) -> Tensor:
        """Return what attention adds to the rows, (1, R, H); their K/V are kept."""
        if self._rows_R is not None:
            self._kept.at = self._rows_R
        mask, rotation, cache = inputs
        if isinstance(mask, BatchMask):  # of this request alone
            requests, (own,) = [replace(mask.requests[0], rows=rows)], mask.masks
            own = self._of_rows(own, 2) if isinstance(own, Tensor) else own
            mask, cache = BatchMask(mask.attention, requests, [own]), BatchCache(requests)
        elif isinstance(mask, Tensor):
            mask = self._of_rows(mask, 2)
        cos, sin = (self._of_rows(part, 1) for part in rotation)
        inputs = AttentionInputs(mask, (cos, sin), cache)
        return self._layer.attended(self._of_rows(self._normed_1XH, 1), inputs)

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
