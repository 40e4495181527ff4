"""`TransformerDenoiser`: a transformers model as a function from tokens to logits.

K branches lie along the sequence axis of one forward of batch 1 with their own position ids, so
the cached prefix is read once; where nothing is cached they are a batch. The module's own layers
run in order, each kind of layer (whole text, sliding window) with its mask and rotation; the head
runs on wanted rows only. `shifted` models predict position p from hidden row p - 1, position 0
from row 0. Requests of a causal model may share a forward (`ragged`). Left out: training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.protocols import KVCache, Plan
from dllm_bench.core.request import DllmBenchError, SpecialTokens
from dllm_bench.models import ragged
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.masks import MaskShape, Span, attention_mask

WHOLE, SLIDING = "full_attention", "sliding_attention"  # transformers' names of layer kinds
EMBEDDED = -1  # the "layer" whose output is the embedding
Rotation = tuple[Tensor, Tensor]


class TransformerDenoiser:
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
        config.is_causal = False
        for layer in module.model.layers:
            layer.self_attn.is_causal = False  # without a mask every position sees all others
        self._kinds = getattr(config, "layer_types", None) or [WHOLE] * config.num_hidden_layers
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def new_cache(self, length: int) -> PositionCache:
        """An empty cache for a canvas of `length` positions."""
        return PositionCache(len(self.module.model.layers), length)

    @torch.inference_mode()
    def forward(self, tokens_KL: Tensor, plan: Plan, kv: KVCache) -> Tensor:
        """Logits (K, rows, V): entry [k, i] predicts position rows[0] + i; or `plan.only_M`'s."""
        if not isinstance(kv, PositionCache):
            raise TypeError(f"forward() needs a cache of new_cache(), got {type(kv).__name__}")
        self._check(plan, tokens_KL.shape[1])
        kv.begin(plan, tokens_KL.shape[1])
        hidden_KFD = self._layers(tokens_KL[:, slice(*plan.feed)], plan, kv)
        kv.hold(plan, hidden_KFD)
        rows_KRD = self._rows(hidden_KFD, plan, kv)
        if plan.only_M is not None:
            rows_KRD = rows_KRD.flatten(0, 1).index_select(0, plan.only_M)[None]
        return self.head(self.module.model.norm(rows_KRD))

    @torch.inference_mode()
    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[Plan], caches: Sequence[PositionCache]
    ) -> list[Tensor]:
        """`forward` for requests of ragged lengths, one branch each: logits (rows, V) of each."""
        feeds = []
        for tokens_1L, plan, kv in zip(tokens, plans, caches, strict=True):
            if not is_causal(plan) or kv.length != plan.feed[0]:
                raise ValueError(f"A batch extends causal caches, found {plan}, {kv.length} cached")
            self._check(plan, tokens_1L.shape[1])
            kv.begin(plan, tokens_1L.shape[1])
            feeds.append(tokens_1L[:, slice(*plan.feed)])
        hidden_RFD = self._layers_ragged(ragged.stacked(feeds, dim=1), plans, caches)
        wanted = []
        for hidden_FD, plan, kv in zip(hidden_RFD, plans, caches, strict=True):
            hidden_1FD = hidden_FD[None, : ragged.fed(plan)]
            kv.hold(plan, hidden_1FD)
            wanted.append(self._rows(hidden_1FD, plan, kv)[0])
        logits_NV = self.head(self.module.model.norm(torch.cat(wanted)))
        return list(logits_NV.split([len(rows_RD) for rows_RD in wanted]))

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

    def _check(self, plan: Plan, length: int) -> None:
        """Rows lie in what is fed (one beyond, where logits are shifted), that in the canvas."""
        (start, stop), (first, last) = plan.feed, plan.rows
        ahead = int(self.shifted)
        if not start <= first < last <= stop + ahead or stop > length:
            raise ValueError(f"Rows {plan.rows} of {plan.feed} fed, canvas {length}.")
        if self.attention_form == "causal" and not is_causal(plan):
            raise DllmBenchError(
                f"This model is autoregressive, but the decoder asks for {plan.attention} "
                f"attention (blocks of {plan.block}); use an autoregressive or speculative "
                f"decoder, or a diffusion model."
            )

    def _layers(self, tokens_KF: Tensor, plan: Plan, kv: PositionCache) -> Tensor:
        """Hidden states (K, F, D) before the last norm."""
        branches = len(tokens_KF)
        position_1F = torch.arange(*plan.feed, device=self.device)[None]
        if kv.spans or plan.visible_K is not None:  # one sequence: the cache is read once for all
            position_1F = position_1F.repeat(1, branches)
            ids, apart = tokens_KF.reshape(1, -1), branches
        else:  # nothing to share: a batch, whose branches need no mask to be apart
            ids, apart = tokens_KF, 1
        masks = {kind: self._mask(kind, plan, apart, kv) for kind in set(self._kinds)}
        hidden, tapped = self._through(ids, position_1F, masks, kv, plan.taps)
        if tapped is not None:
            kv.features = tapped.view(*tokens_KF.shape, -1)
        return hidden.view(*tokens_KF.shape, -1)

    def _layers_ragged(
        self, ids_RF: Tensor, plans: Sequence[Plan], caches: Sequence[PositionCache]
    ) -> Tensor:
        """The same (R, F, D) for a batch of requests; rows of padding mean nothing."""
        position_RF = ragged.positions(plans, self.device)
        keys = max(plan.feed[1] for plan in plans)
        masks = {
            kind: ragged.causal_mask(position_RF, keys, self._window(kind), self.dtype)
            for kind in set(self._kinds)
        }
        cache, taps = ragged.RaggedCache(caches, plans), plans[0].taps
        hidden_RFD, tapped_RFC = self._through(ids_RF, position_RF, masks, cache, taps)
        if tapped_RFC is not None:
            for tapped_FC, plan, kv in zip(tapped_RFC, plans, caches, strict=True):
                kv.features = tapped_FC[None, : ragged.fed(plan)]
        return hidden_RFD

    def _through(
        self,
        ids_RF: Tensor,
        position_RF: Tensor,
        masks: Mapping[str, Tensor | None],
        cache: PositionCache | ragged.RaggedCache,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """All layers in order: hidden states (R, F, D), and those of the tapped layers abreast."""
        model = self.module.model
        hidden = model.embed_tokens(ids_RF)
        rotations = self._rotations(hidden, position_RF)
        tapped = {EMBEDDED: hidden}
        for index, (layer, kind) in enumerate(zip(model.layers, self._kinds, strict=True)):
            hidden = layer(
                hidden,
                attention_mask=masks[kind],
                position_embeddings=rotations[kind],
                past_key_values=cache,
            )
            if index in taps:
                tapped[index] = hidden
        return hidden, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None

    def _mask(self, kind: str, plan: Plan, branches: int, kv: PositionCache) -> Tensor | None:
        """What the layers of one kind see."""
        return self._mask_over(kv.spans, kind, plan, branches)

    def _mask_over(
        self, cached: tuple[Span, ...], kind: str, plan: Plan, branches: int
    ) -> Tensor | None:
        shape = MaskShape.of(plan, branches, cached, self._window(kind))
        return attention_mask(shape, plan.visible_K, self.dtype, self.device)

    def _window(self, kind: str) -> int:
        """Positions the layers of one kind see back to, 0 for all."""
        return int(self.module.config.sliding_window) if kind == SLIDING else 0

    def _rotations(self, hidden: Tensor, position_1F: Tensor) -> dict[str, Rotation]:
        """Rotary embeddings by kind of layer; most models have one for all."""
        rotary, kinds = self.module.model.rotary_emb, set(self._kinds)
        if kinds <= self.module.config.rope_parameters.keys():
            return {kind: rotary(hidden, position_1F, kind) for kind in kinds}
        return dict.fromkeys(kinds, rotary(hidden, position_1F))

    def _rows(self, hidden_KFD: Tensor, plan: Plan, kv: PositionCache) -> Tensor:
        """The hidden state that predicts each wanted position."""
        offset = plan.feed[0] + int(self.shifted)
        first, last = plan.rows[0] - offset, plan.rows[1] - offset
        if first >= 0:
            return hidden_KFD[:, first:last]
        before_K1D = hidden_KFD[:, :1]
        if plan.feed[0] > 0:
            before_K1D = kv.boundary(plan.feed[0]).expand_as(before_K1D)
        return torch.cat([before_K1D, hidden_KFD[:, :last]], dim=1)


def is_causal(plan: Plan) -> bool:
    """Blocks of one from the first position on: no position sees a later one."""
    return plan.attention == "block_causal" and (plan.block, plan.origin) == (1, 0)
