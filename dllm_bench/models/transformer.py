"""`TransformerDenoiser`: a transformers model as a function from tokens to logits.

K branches lie along the sequence axis of one forward of batch 1 with their own position ids, so
the cached prefix is read once. The module's own layers run in order, each kind of layer (whole
text, sliding window) with its mask and rotation; the head runs on wanted rows only. `shifted`
models predict position p from hidden row p - 1, position 0 from row 0.
Left out: training, batches of requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.protocols import KVCache, Plan
from dllm_bench.core.request import DllmBenchError, SpecialTokens
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.masks import MaskShape, Span, attention_mask

WHOLE, SLIDING = "full_attention", "sliding_attention"  # transformers' names of layer kinds
EMBEDDED = -1  # the "layer" whose output is the embedding
Rotation = tuple[Tensor, Tensor]


class TransformerDenoiser:
    """Implements `core.protocols.Denoiser` over a `*ForCausalLM` module of transformers.

    `attention_form` and `block` say how the weights were trained, for whoever chooses a plan.
    """

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
        """Logits (K, rows, V): entry [k, i] predicts position rows[0] + i."""
        if not isinstance(kv, PositionCache):
            raise TypeError(f"forward() needs a cache of new_cache(), got {type(kv).__name__}")
        self._check(plan, tokens_KL.shape[1])
        kv.begin(plan, tokens_KL.shape[1])
        hidden_KFD = self._layers(tokens_KL[:, slice(*plan.feed)], plan, kv)
        kv.hold(plan, hidden_KFD)
        rows_KRD = self._rows(hidden_KFD, plan, kv)
        return self.head(self.module.model.norm(rows_KRD))

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
        model, branches = self.module.model, len(tokens_KF)
        masks = {kind: self._mask(kind, plan, branches, kv) for kind in set(self._kinds)}
        position_F = torch.arange(*plan.feed, device=self.device)
        hidden = model.embed_tokens(tokens_KF.reshape(1, -1))
        rotations = self._rotations(hidden, position_F.repeat(branches)[None])
        tapped = {EMBEDDED: hidden} if plan.taps else {}
        for index, (layer, kind) in enumerate(zip(model.layers, self._kinds, strict=True)):
            hidden = layer(
                hidden,
                attention_mask=masks[kind],
                position_embeddings=rotations[kind],
                past_key_values=kv,
            )
            if index in plan.taps:
                tapped[index] = hidden
        if plan.taps:
            features = torch.cat([tapped[tap] for tap in plan.taps], dim=-1)
            kv.features = features.view(*tokens_KF.shape, -1)
        return hidden.view(*tokens_KF.shape, -1)

    def _mask(self, kind: str, plan: Plan, branches: int, kv: PositionCache) -> Tensor | None:
        """What the layers of one kind see."""
        return self._mask_over(kv.spans, kind, plan, branches)

    def _mask_over(
        self, cached: tuple[Span, ...], kind: str, plan: Plan, branches: int
    ) -> Tensor | None:
        window = self.module.config.sliding_window if kind == SLIDING else 0
        shape = MaskShape.of(plan, branches, cached, window)
        return attention_mask(shape, plan.visible_K, self.dtype, self.device)

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
