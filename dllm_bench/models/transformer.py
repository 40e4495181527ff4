"""`TransformerDenoiser`: a transformers model as a function from tokens to logits.

The K branches of a request lie along the sequence axis of one forward of batch size 1, with their
own position ids, so that the cached prefix is read once; where nothing is cached they are a batch.
The layers (`layers`) run in order, each kind of layer (full attention, sliding window) with its
mask and rotary embedding; `lm_head` is computed only for rows whose logits are wanted. Models with
`shifted` logits predict position p from the hidden state at p - 1, and position 0 from the one at
0. Several requests may share a forward (`forward_batch`). Training is not supported.

Shapes: K branches, L canvas positions, F fed positions, R rows whose logits are computed, M of
them picked, E added rows, H hidden size, V vocabulary, N fed rows of a whole batch, P sequences,
C = H x (number of feature layers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models import attention
from dllm_bench.models.adapters import PLAIN_CLASSES
from dllm_bench.models.attention import AnyMask, AttentionInputs, BatchCache, BatchMask, OwnMask
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.layer_ops import Rotation
from dllm_bench.models.layers import PlainLayer, layers_under, module_layers, own_layers
from dllm_bench.models.plain_module import PlainModule

# Kinds of layers, as transformers names them.
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
POSITIONS = 1024  # by whose multiples kept rotary embeddings grow
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary embedding, as transformers names them, that do not depend on a text's length."""
EMBEDDING_TAP = -1  # the feature layer that stands for the output of the embedding


class TransformerDenoiser(Denoiser):
    """Implements `core.denoiser.Denoiser` and `core.speculative.Target` over a `*ForCausalLM`.

    `attention_form` and `block` say how the weights were trained; only "causal" restricts which
    plans are accepted.
    """

    picks_rows = True
    batches = True  # whether rows of several requests may form one sequence
    parts = 1  # processes that the heads are split over
    owns_layers = True  # whether `layers` may compute what transformers' modules would

    def __init__(
        self,
        module: Any,
        special: SpecialTokens,
        shifted: bool,
        *,
        attention_form: str = "full",
        block: int | None = None,
    ) -> None:
        self._module = ready_to_decode(module)
        self.special = special
        self.shifted = shifted
        self.attention_form = attention_form
        self.block = block
        self.vocab_size: int = module.config.vocab_size
        self.device: torch.device = module.lm_head.weight.device
        self.dtype: torch.dtype = module.lm_head.weight.dtype
        config = module.config
        self.layers = own_layers(module) if self.owns_layers else module_layers(module)
        self.num_layers: int = config.num_hidden_layers
        self.position_bytes: int = 4 * config.hidden_size * self.dtype.itemsize
        self.hidden_size: int = config.hidden_size
        classes = {kind.__name__ for kind in type(module).__mro__}
        self.chooses_rows = bool(classes & {"PlainModule", *PLAIN_CLASSES})
        self._last_request: tuple[object, tuple[int, ...], PositionCache] | None = None
        self._rotated: tuple[object, dict[str, Rotation]] = (None, {})  # span, of the last one
        self._positions = 0  # the first ones, whose rotary embeddings are kept
        self._angles: dict[str, Rotation] = {}
        self._kinds = getattr(config, "layer_types", None) or [FULL_ATTENTION] * self.num_layers
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._set_up()

    @property
    def module(self) -> Any:
        """transformers' module. It takes the place of a `PlainModule` when it is first read."""
        if isinstance(self._module, PlainModule):
            self._module = ready_to_decode(self._module.as_transformers())
        return self._module

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self._module.parameters())

    def _set_up(self) -> None:
        """Add what a subclass needs to the instance, which is complete otherwise."""

    def new_cache(self, length: int) -> PositionCache:
        """Return an empty cache for a canvas of `length` positions."""
        return PositionCache(self.num_layers, length, self.shifted, self.parts)

    def reuse_prefix(self, kv: KVCache, prompt_ids: Sequence[int], grid: int, by: object) -> None:
        """Start the empty cache with K/V of the prompt prefix shared with the request before.

        Keeps one request (decoder, prompt, cache), and only reuses it for an equal decoder `by`.
        """
        kv, last = as_position_cache(kv), self._last_request
        if last and last[0] == by:
            _, last_ids, last_kv = last
            pairs = zip(last_ids, prompt_ids, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            # a shifted model predicts the window's first position from one that is fed
            end = len(prompt_ids) // grid * grid - int(self.shifted)
            length = min(same, end, len(prompt_ids) - 1, last_kv.length) // grid * grid
            if length > 0:
                kv.copy_prefix(last_kv, length)
        self._last_request = (by, tuple(prompt_ids), kv)

    @torch.inference_mode()
    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Return logits (K, R, V): entry [k, i] predicts position rows[0] + i.

        With `plan.only_M`, those rows alone: (1, M, V).
        """
        kv = as_position_cache(kv)
        fed_KF = self._begin(tokens_KL, plan, kv)
        if plan.probe is not None:  # only attention per request sees the queries
            (hidden_KFH,) = self._layers_of_batch([fed_KF], [plan], [kv])
        else:
            hidden_KFH = self._layers(fed_KF, plan, kv)
        return self._logits(self._wanted_rows(hidden_KFH, plan, kv))

    @torch.inference_mode()
    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[ForwardPlan], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """Compute `forward` of several requests of any lengths at once; return the logits of each.

        One by one where layers choose rows, since they choose others in every request, and for
        models that do not batch.
        """
        if not self.batches or any(plan.recompute is not None for plan in plans):
            return super().forward_batch(tokens, plans, caches)
        kvs = [as_position_cache(kv) for kv in caches]
        fed = [self._begin(*each) for each in zip(tokens, plans, kvs, strict=True)]
        wanted = list(map(self._wanted_rows, self._layers_of_batch(fed, plans, kvs), plans, kvs))
        flat = [rows_KRH.flatten(0, 1) for rows_KRH in wanted]
        pairs = zip(self._logits(torch.cat(flat)).split([*map(len, flat)]), wanted, strict=True)
        return [logits_NV.unflatten(0, rows_KRH.shape[:2]) for logits_NV, rows_KRH in pairs]

    def _begin(self, tokens_KL: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        """Prepare the cache for the plan; return the fed tokens (K, F).

        ValueError for rows that are not fed.
        """
        (start, stop), (first, last), length = plan.feed, plan.rows, tokens_KL.shape[1]
        # with shifted logits, rows may end one position after the fed span
        if not start <= first < last <= stop + int(self.shifted) or stop > length:
            raise ValueError(f"Rows {plan.rows} of {plan.feed} fed, canvas {length}.")
        kv.begin(plan, length)
        if plan.sets is not None:
            return tokens_KL.index_select(1, plan.sets.feed_F)
        fed_KF = tokens_KL[:, slice(*plan.feed)]
        if plan.added is None:
            return fed_KF
        return torch.cat([fed_KF, plan.added.tokens_E.expand(len(fed_KF), -1)], dim=1)

    def _wanted_rows(self, hidden_KFH: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        """Return the hidden states whose logits are wanted: (K, R, H), or (1, M, H) of picked
        rows."""
        kv.hold(plan, hidden_KFH)
        rows_KRH = self._rows(hidden_KFH, plan, kv)
        if plan.only_M is None:
            return rows_KRH
        return rows_KRH.flatten(0, 1).index_select(0, plan.only_M)[None]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., H) before the last norm."""
        norm = self._module.model.norm
        if not isinstance(self.layers[0], PlainLayer):
            return self.head(norm(hidden))
        return self.head(rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon))

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings (..., H) of token ids."""
        return self._module.model.embed_tokens(ids)

    @torch.inference_mode()
    def mean_embeddings(self, logits_KRV: Tensor) -> Tensor:
        """Return the mean embedding (K, R, H) of the distribution of each row, in the logits'
        dtype."""
        table = self._module.model.embed_tokens
        return (logits_KRV.softmax(-1) @ table.weight) * getattr(table, "scalar_embed_scale", 1.0)

    def _embed_fed(self, ids_PF: Tensor, added: Tensor | None) -> Tensor:
        """Return embeddings (P, F, H) of fed tokens, with what a plan adds to them."""
        embedded_PFH = self.embed(ids_PF)
        return embedded_PFH if added is None else embedded_PFH + added.reshape(embedded_PFH.shape)

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of normalised hidden states (..., H)."""
        logits: Tensor = self._module.lm_head(hidden)
        if self._softcap is not None:
            logits = (logits / self._softcap).tanh_().mul_(self._softcap)
        return logits

    def head_rows(self, ids_N: Tensor) -> Tensor:
        """Return weights (N, H) of the head for these tokens."""
        return self._module.lm_head.weight.index_select(0, ids_N)

    def _layers(self, tokens_KF: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        """Return hidden states (K, F, H) before the last norm."""
        branches = len(tokens_KF)
        groups = independent_sequences(branches, plan, kv)
        together = branches // groups
        masks = {kind: self._mask(kind, plan, together, kv) for kind in set(self._kinds)}
        hidden = self._embed_fed(tokens_KF.reshape(groups, -1), plan.added_KFH)
        rotations = self._span_rotations(hidden, plan, together)
        layers, taps = layers_under(plan, kv, self.layers), plan.feature_layers
        hidden, features = self._run_layers(layers, hidden, rotations, masks, kv, taps)
        if features is not None:
            kv.features = features.view(*tokens_KF.shape, -1)
        return hidden.view(*tokens_KF.shape, -1)

    def _layers_of_batch(
        self, fed: Sequence[Tensor], plans: Sequence[ForwardPlan], kvs: Sequence[PositionCache]
    ) -> list[Tensor]:
        """Compute `_layers` of several requests, whose rows form one sequence."""
        groups = map(independent_sequences, map(len, fed), plans, kvs)
        requests = [
            attention.BatchedRequest(plan, kv, count, len(fed_KF), fed_KF.numel())
            for fed_KF, plan, kv, count in zip(fed, plans, kvs, groups, strict=True)
        ]
        spans = [plan.positions(self.device) for plan in plans]
        repeated = [span_F.repeat(r.branches) for span_F, r in zip(spans, requests, strict=True)]
        backend = self._module.config._attn_implementation
        masks = {}
        for kind in set(self._kinds):
            own = [self._mask(kind, r.plan, r.branches // r.groups, r.kv) for r in requests]
            masks[kind] = BatchMask(backend, requests, own)
        ids_1N = torch.cat([fed_KF.flatten() for fed_KF in fed])[None]
        hidden_1NH = self._embed_fed(ids_1N, self._added_of_batch(fed, plans))
        rotations = self._rotations(hidden_1NH, torch.cat(repeated)[None])
        layers, taps = layers_under(plans[0], kvs[0], self.layers), plans[0].feature_layers
        with attention.per_request_attention(self._module.config):
            hidden, features = self._run_layers(
                layers, hidden_1NH, rotations, masks, BatchCache(requests), taps
            )
        rows = [request.rows for request in requests]
        if features is not None:
            for kv, features_1FC in zip(kvs, features.split(rows, dim=1), strict=True):
                kv.features = features_1FC
        pairs = zip(hidden[0].split(rows), fed, strict=True)
        return [hidden_NH.view(*fed_KF.shape, -1) for hidden_NH, fed_KF in pairs]

    def _added_of_batch(self, fed: Sequence[Tensor], plans: Sequence[ForwardPlan]) -> Tensor | None:
        """Return the embeddings that the plans add, concatenated (N, H); None if there are none."""
        if all(plan.added_KFH is None for plan in plans):
            return None
        nothing_1H = self._module.lm_head.weight.new_zeros(1, self.hidden_size)
        added = list[Tensor]()
        for fed_KF, plan in zip(fed, plans, strict=True):
            none_NH = nothing_1H.expand(fed_KF.numel(), -1)
            added.append(none_NH if plan.added_KFH is None else plan.added_KFH.flatten(0, 1))
        return torch.cat(added)

    def _run_layers(
        self,
        layers: Sequence[Callable[..., Tensor]],
        hidden: Tensor,
        rotations: Mapping[str, Rotation],
        masks: Mapping[str, AnyMask],
        cache: Any,
        feature_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states (P, F, H) of embeddings `hidden`, and the outputs of the feature
        layers concatenated (P, F, C)."""
        outputs = {}
        if EMBEDDING_TAP in feature_layers:
            outputs[EMBEDDING_TAP] = hidden.clone()
        for index, (layer, kind) in enumerate(zip(layers, self._kinds, strict=True)):
            hidden = layer(hidden, AttentionInputs(masks[kind], rotations[kind], cache))
            if index in feature_layers:
                outputs[index] = hidden.clone()
        if not feature_layers:
            return hidden, None
        return hidden, torch.cat([outputs[index] for index in feature_layers], dim=-1)

    def _mask(self, kind: str, plan: ForwardPlan, branches: int, kv: PositionCache) -> OwnMask:
        """Return the mask of the layers of one kind, or the windows of branches that need none."""
        window = self._window(kind)
        if plan.sets is not None:
            return attention.mask_of_sets(plan, window, self.dtype)
        shape = attention.MaskShape.of(plan, branches, kv.spans, window)
        if self.layers[0].takes_windows:
            windows = attention.branch_windows(shape, plan.visible_K, self.device)
            if windows is not None:
                return windows
        return attention.attention_mask(shape, plan.visible_K, self.dtype, self.device)

    def _window(self, kind: str) -> int:
        """Return how many positions back the layers of one kind see, 0 for all."""
        return int(self._module.config.sliding_window) if kind == SLIDING_ATTENTION else 0

    def _span_rotations(self, hidden: Tensor, plan: ForwardPlan, times: int) -> dict[str, Rotation]:
        """Return `_rotations` of the fed positions, repeated; kept for the next forward of this
        span."""
        span = None if plan.sets or plan.added else (plan.feed, times)
        if span is None or span != self._rotated[0]:
            self._rotated = span, self._new_rotations(hidden, plan, times)
        return self._rotated[1]

    def _new_rotations(self, hidden: Tensor, plan: ForwardPlan, times: int) -> dict[str, Rotation]:
        """Return `_span_rotations` of a new span: views of the embeddings kept for the first
        positions, if a span is fed and a position's angle does not depend on the text's length.
        """
        rope_type = getattr(self._module.model.rotary_emb, "rope_type", "default")
        if plan.sets or plan.added or rope_type not in FIXED_ROTATIONS:
            return self._rotations(hidden, plan.positions(self.device).repeat(times)[None])
        first, last = plan.feed
        if last > self._positions:
            self._positions = last + -last % POSITIONS
            position_L = torch.arange(self._positions, device=self.device)
            self._angles = self._rotations(hidden, position_L[None])
        return {
            kind: (repeated(cos[:, first:last], times), repeated(sin[:, first:last], times))
            for kind, (cos, sin) in self._angles.items()
        }

    def _rotations(self, hidden: Tensor, position_PF: Tensor) -> dict[str, Rotation]:
        """Return rotary embeddings by kind of layer; most models have one for all kinds."""
        rotary, kinds = self._module.model.rotary_emb, set(self._kinds)
        if kinds <= self._module.config.rope_parameters.keys():
            return {kind: rotary(hidden, position_PF, kind) for kind in kinds}
        return dict.fromkeys(kinds, rotary(hidden, position_PF))

    def _rows(self, hidden_KFH: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        """Return the hidden state (K, R, H) that predicts each wanted position."""
        if plan.sets is not None:  # 0 where no fed position predicts a row
            first, behind = plan.rows[0], plan.rows[1] - plan.rows[0] + 1
            # the places `behind` and 0 take what is not wanted
            place_F = plan.sets.feed_F + int(self.shifted) - first + 1
            rows_KXH = hidden_KFH.new_zeros(len(hidden_KFH), behind + 1, hidden_KFH.shape[2])
            if self.shifted and plan.scored_M is None:
                rows_KXH[:, 1] = kv.boundary_of_sets(plan, hidden_KFH[0])
            return rows_KXH.index_copy_(1, place_F.clamp(0, behind), hidden_KFH)[:, 1:-1]
        offset = plan.feed[0] + int(self.shifted)
        first, last = plan.rows[0] - offset, plan.rows[1] - offset
        if plan.added is not None:
            added_KEH = hidden_KFH[:, plan.feed[1] - plan.feed[0] :]
            return torch.cat([hidden_KFH[:, first:last], added_KEH], dim=1)
        if first >= 0:
            return hidden_KFH[:, first:last]
        before_K1H = hidden_KFH[:, :1]
        if plan.feed[0] > 0:
            before_K1H = kv.boundary(plan.feed[0]).expand_as(before_K1H)
        return torch.cat([before_K1H, hidden_KFH[:, :last]], dim=1)


def repeated(angles_1FE: Tensor, times: int) -> Tensor:
    """Return the angles of positions that are fed several times."""
    return angles_1FE if times == 1 else angles_1FE.repeat(1, times, 1)


def ready_to_decode(module: Any) -> Any:
    """Return the module in evaluation mode, where attention without a mask sees everything."""
    if isinstance(module, PlainModule):
        return module.eval()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes seconds to import

    ALL_ATTENTION_FUNCTIONS.register(attention.PER_REQUEST, attention.attend_per_request)
    module.config.is_causal = False
    for layer in module.model.layers:
        layer.self_attn.is_causal = False
    return module.eval()


def independent_sequences(branches: int, plan: ForwardPlan, kv: PositionCache) -> int:
    """Return into how many sequences the branches of a forward are split.

    One if they share a cached prefix or their visible ends differ; else one per branch: sequences
    of a batch need no mask between them.
    """
    return 1 if kv.spans or plan.visible_K is not None else branches


def as_position_cache(kv: KVCache) -> PositionCache:
    """Return the cache, checked to be one of `new_cache`."""
    if not isinstance(kv, PositionCache):
        raise TypeError(f"A forward needs a cache of new_cache(), got {type(kv).__name__}.")
    return kv


def is_causal(plan: ForwardPlan) -> bool:
    """Return whether no position sees a later one: blocks of 1 from position 0."""
    return plan.attention == "block_causal" and (plan.block, plan.origin) == (1, 0)
