"""`TransformerDenoiser`: a transformers model as a function from tokens to logits.

K branches lie along the sequence axis of one forward of batch 1 with their own position ids, so
the cached prefix is read once; where nothing is cached they are a batch. The module's own layers
run in order, each kind of layer (whole text, sliding window) with its mask and rotation; the head
runs on wanted rows only. `shifted` models predict position p from hidden row p - 1, position 0
from row 0. Several requests may share a forward (`ragged`). Left out: training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models.attention import (
    MaskShape,
    Part,
    RaggedCache,
    Seen,
    Span,
    apart,
    attention_mask,
)
from dllm_bench.models.kv import PositionCache

FULL_ATTENTION, SLIDING_ATTENTION = (
    "full_attention",
    "sliding_attention",
)  # transformers' names of layer kinds
EMBEDDING_TAP = -1  # the "layer" whose output is the embedding
Rotation = tuple[Tensor, Tensor]


class TransformerDenoiser(Denoiser):
    """Implements `core.protocols.Denoiser` over a `*ForCausalLM` module of transformers.

    `attention_form` and `block` say how the weights were trained, for whoever chooses a plan.
    """

    picks_rows = True

    def __init__(
        self,
        module: Any,
        special: SpecialTokens,
        shifted: bool,
        *,
        attention_form: str = "full",
        block: int | None = None,
    ) -> None:
        self.module = module.eval()
        self.special = special
        self.shifted = shifted
        self.attention_form = attention_form
        self.block = block
        self.vocab_size: int = module.config.vocab_size
        self.device: torch.device = module.lm_head.weight.device
        self.dtype: torch.dtype = module.lm_head.weight.dtype
        config = module.config
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        config.is_causal = False
        for layer in module.model.layers:
            layer.self_attn.is_causal = False  # without a mask every position sees all others
        self._recalled: tuple[object, tuple[int, ...], PositionCache] | None = None
        self._kinds = (
            getattr(config, "layer_types", None) or [FULL_ATTENTION] * config.num_hidden_layers
        )
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def new_cache(self, length: int) -> PositionCache:
        """An empty cache for a canvas of `length` positions."""
        return PositionCache(len(self.module.model.layers), length, self.shifted)

    def reuse_prefix(self, kv: KVCache, prompt_ids: Sequence[int], grid: int, by: object) -> None:
        """Begin the empty cache with what the last recalled prompt and this one share.

        Remembers one request: its decoder, its prompt, and its cache as it is then.
        """
        kv, last = own(kv), self._recalled
        if last and last[0] == by:
            _, known_ids, source = last
            pairs = zip(known_ids, prompt_ids, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            length = min(same, len(prompt_ids) - 1, source.length) // grid * grid
            if length > 0:
                kv.adopt(source, length)
        self._recalled = (by, tuple(prompt_ids), kv)

    @torch.inference_mode()
    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Logits (K, rows, V): entry [k, i] predicts position rows[0] + i; or `plan.only_M`'s."""
        kv = own(kv)
        fed_KF = self._begin(tokens_KL, plan, kv)
        return self._logits(self._wanted(self._layers(fed_KF, plan, kv), plan, kv))

    @torch.inference_mode()
    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[ForwardPlan], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """`forward` for several requests at once, of ragged lengths: the logits of each."""
        asked = list(zip(tokens, plans, map(own, caches), strict=True))
        fed = [self._begin(*each) for each in asked]
        hidden = self._layers_ragged(fed, [(plan, kv) for _, plan, kv in asked])
        wanted = [
            self._wanted(hidden_KFD, plan, kv)
            for hidden_KFD, (_, plan, kv) in zip(hidden, asked, strict=True)
        ]
        flat_ND = torch.cat([rows_KRD.flatten(0, 1) for rows_KRD in wanted])
        parts = self._logits(flat_ND).split([len(rows) * rows.shape[1] for rows in wanted])
        return [
            logits_NV.view(*rows_KRD.shape[:2], -1)
            for logits_NV, rows_KRD in zip(parts, wanted, strict=True)
        ]

    def _begin(self, tokens_KL: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        """What is fed, (K, F), once the cache knows the plan."""
        self._check(plan, tokens_KL.shape[1])
        kv.begin(plan, tokens_KL.shape[1])
        return tokens_KL[:, slice(*plan.feed)]

    def _wanted(self, hidden_KFD: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        """The hidden states whose logits are wanted, (K, rows, D) or (1, M, D)."""
        kv.hold(plan, hidden_KFD)
        rows_KRD = self._rows(hidden_KFD, plan, kv)
        if plan.only_M is None:
            return rows_KRD
        return rows_KRD.flatten(0, 1).index_select(0, plan.only_M)[None]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states before the last norm."""
        return self.head(self.module.model.norm(hidden))

    def embed(self, ids: Tensor) -> Tensor:
        """Rows (..., D) of the embedding table."""
        embedded: Tensor = self.module.model.embed_tokens(ids)
        return embedded

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of normalised hidden states."""
        logits: Tensor = self.module.lm_head(hidden)
        if self._softcap is not None:
            logits = (logits / self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _check(self, plan: ForwardPlan, length: int) -> None:
        """Rows lie in what is fed (one beyond, where logits are shifted), that in the canvas."""
        (start, stop), (first, last) = plan.feed, plan.rows
        ahead = int(self.shifted)
        if not self.shifted and last == stop + 1:
            raise DllmBenchError(
                "The decoder asks for the token after those it feeds, and this model predicts each "
                "position at its own row; use a model with shifted logits, or another decoder."
            )
        if not start <= first < last <= stop + ahead or stop > length:
            raise ValueError(f"Rows {plan.rows} of {plan.feed} fed, canvas {length}.")
        if self.attention_form == "causal" and not is_causal(plan):
            raise DllmBenchError(
                f"This model is autoregressive, but the decoder asks for {plan.attention} "
                f"attention (blocks of {plan.block}); use an autoregressive or speculative "
                f"decoder, or a diffusion model."
            )

    def _layers(self, tokens_KF: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        """Hidden states (K, F, D) before the last norm."""
        branches = len(tokens_KF)
        position_1F = torch.arange(*plan.feed, device=self.device)[None]
        groups = independent_sequences(branches, plan, kv)
        if groups == 1:
            position_1F = position_1F.repeat(1, branches)
        masks = {kind: self._mask(kind, plan, branches // groups, kv) for kind in set(self._kinds)}
        ids = tokens_KF.reshape(groups, -1)
        hidden, tapped = self._through(ids, position_1F, masks, kv, plan.feature_layers)
        if tapped is not None:
            kv.features = tapped.view(*tokens_KF.shape, -1)
        return hidden.view(*tokens_KF.shape, -1)

    def _layers_ragged(
        self, fed: Sequence[Tensor], asked: Sequence[tuple[ForwardPlan, PositionCache]]
    ) -> list[Tensor]:
        """The same of several requests, whose rows are one sequence."""
        parts = [
            Part(
                plan, kv, independent_sequences(len(fed_KF), plan, kv), len(fed_KF), fed_KF.numel()
            )
            for fed_KF, (plan, kv) in zip(fed, asked, strict=True)
        ]
        spans = [torch.arange(*part.plan.feed, device=self.device) for part in parts]
        repeated = [span_F.repeat(p.branches) for span_F, p in zip(spans, parts, strict=True)]
        position_1N = torch.cat(repeated)[None]
        seen = {kind: self._seen(kind, parts) for kind in set(self._kinds)}
        ids_1N = torch.cat([fed_KF.flatten() for fed_KF in fed])[None]
        feature_layers = parts[0].plan.feature_layers
        with apart(self.module.config):
            hidden, tapped = self._through(
                ids_1N, position_1N, seen, RaggedCache(parts), feature_layers
            )
        sizes = [part.rows for part in parts]
        if tapped is not None:
            for part, features_1FC in zip(parts, tapped.split(sizes, dim=1), strict=True):
                part.kv.features = features_1FC
        return [
            hidden_ND.view(*fed_KF.shape, -1)
            for hidden_ND, fed_KF in zip(hidden[0].split(sizes), fed, strict=True)
        ]

    def _seen(self, kind: str, parts: Sequence[Part]) -> Seen:
        """What the layers of one kind see of each request."""
        masks = [self._mask(kind, p.plan, p.branches // p.groups, p.kv) for p in parts]
        return Seen(self.module.config._attn_implementation, parts, masks)

    def _through(
        self,
        ids_RF: Tensor,
        position_RF: Tensor,
        masks: Mapping[str, Tensor | Seen | None],
        cache: PositionCache | RaggedCache,
        feature_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """All layers in order: hidden states (R, F, D), and those of the tapped layers abreast."""
        model = self.module.model
        hidden = model.embed_tokens(ids_RF)
        rotations = self._rotations(hidden, position_RF)
        tapped = {EMBEDDING_TAP: hidden}
        for index, (layer, kind) in enumerate(zip(model.layers, self._kinds, strict=True)):
            hidden = layer(
                hidden,
                attention_mask=masks[kind],
                position_embeddings=rotations[kind],
                past_key_values=cache,
            )
            if index in feature_layers:
                tapped[index] = hidden
        return hidden, torch.cat(
            [tapped[tap] for tap in feature_layers], dim=-1
        ) if feature_layers else None

    def _mask(
        self, kind: str, plan: ForwardPlan, branches: int, kv: PositionCache
    ) -> Tensor | None:
        """What the layers of one kind see."""
        return self._mask_over(kv.spans, kind, plan, branches)

    def _mask_over(
        self, cached: tuple[Span, ...], kind: str, plan: ForwardPlan, branches: int
    ) -> Tensor | None:
        shape = MaskShape.of(plan, branches, cached, self._window(kind))
        return attention_mask(shape, plan.visible_K, self.dtype, self.device)

    def _window(self, kind: str) -> int:
        """Positions the layers of one kind see back to, 0 for all."""
        return int(self.module.config.sliding_window) if kind == SLIDING_ATTENTION else 0

    def _rotations(self, hidden: Tensor, position_1F: Tensor) -> dict[str, Rotation]:
        """Rotary embeddings by kind of layer; most models have one for all."""
        rotary, kinds = self.module.model.rotary_emb, set(self._kinds)
        if kinds <= self.module.config.rope_parameters.keys():
            return {kind: rotary(hidden, position_1F, kind) for kind in kinds}
        return dict.fromkeys(kinds, rotary(hidden, position_1F))

    def _rows(self, hidden_KFD: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        """The hidden state that predicts each wanted position."""
        offset = plan.feed[0] + int(self.shifted)
        first, last = plan.rows[0] - offset, plan.rows[1] - offset
        if first >= 0:
            return hidden_KFD[:, first:last]
        before_K1D = hidden_KFD[:, :1]
        if plan.feed[0] > 0:
            before_K1D = kv.boundary(plan.feed[0]).expand_as(before_K1D)
        return torch.cat([before_K1D, hidden_KFD[:, :last]], dim=1)


def independent_sequences(branches: int, plan: ForwardPlan, kv: PositionCache) -> int:
    """How many sequences a forward's branches are.

    One, where a cache is read once for all; else a batch, whose branches need no mask to be apart.
    """
    return 1 if kv.spans or plan.visible_K is not None else branches


def own(kv: KVCache) -> PositionCache:
    """A cache of `new_cache`."""
    if not isinstance(kv, PositionCache):
        raise TypeError(f"A forward needs a cache of new_cache(), got {type(kv).__name__}.")
    return kv


def is_causal(plan: ForwardPlan) -> bool:
    """Blocks of one from the first position on: no position sees a later one."""
    return plan.attention == "block_causal" and (plan.block, plan.origin) == (1, 0)
