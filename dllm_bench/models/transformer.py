"""`TransformerDenoiser`: a Llama-like transformers model as a function from tokens to logits.

K branches lie along the sequence axis of one forward of batch 1 with their own position ids, so
the cached prefix is read once. The module's own layers run in order; the head runs on wanted rows
only. `shifted` models predict position p from hidden row p - 1, position 0 from row 0.
Left out: training, batches of requests, sliding windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.protocols import KVCache, Plan
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.masks import MaskShape, attention_mask


class TransformerDenoiser:
    """Implements `core.protocols.Denoiser` over a `*ForCausalLM` module of transformers."""

    def __init__(self, module: Any, special: SpecialTokens, shifted: bool) -> None:
        self.module = module.eval()
        self.special = special
        self.shifted = shifted
        self.vocab_size: int = module.lm_head.out_features
        self.device: torch.device = module.lm_head.weight.device
        self.dtype: torch.dtype = module.lm_head.weight.dtype
        module.config.is_causal = False
        for layer in module.model.layers:
            layer.self_attn.is_causal = False  # without a mask every position sees all others

    def new_cache(self, length: int) -> PositionCache:
        """An empty cache for a canvas of `length` positions."""
        return PositionCache(len(self.module.model.layers), length)

    @torch.inference_mode()
    def forward(self, tokens_KL: Tensor, plan: Plan, kv: KVCache) -> Tensor:
        """Logits (K, rows, V): entry [k, i] predicts position rows[0] + i."""
        if not isinstance(kv, PositionCache):
            raise TypeError(f"forward() needs a cache of new_cache(), got {type(kv).__name__}")
        if not plan.feed[0] <= plan.rows[0] < plan.rows[1] <= plan.feed[1] <= tokens_KL.shape[1]:
            raise ValueError(f"Rows {plan.rows} of {plan.feed} fed, canvas {tokens_KL.shape[1]}.")
        kv.begin(plan, tokens_KL.shape[1])
        hidden_KFD = self._layers(tokens_KL[:, slice(*plan.feed)], plan, kv)
        kv.hold(plan, hidden_KFD)
        rows_KRD = self._rows(hidden_KFD, plan, kv)
        logits_KRV: Tensor = self.module.lm_head(self.module.model.norm(rows_KRD))
        return logits_KRV

    def _layers(self, tokens_KF: Tensor, plan: Plan, kv: PositionCache) -> Tensor:
        """Hidden states (K, F, D) before the last norm."""
        model, branches = self.module.model, len(tokens_KF)
        shape = MaskShape.of(plan, branches, kv.spans)
        mask = attention_mask(shape, plan.visible_K, self.dtype, self.device)
        position_F = torch.arange(*plan.feed, device=self.device)
        hidden = model.embed_tokens(tokens_KF.reshape(1, -1))
        rotation = model.rotary_emb(hidden, position_F.repeat(branches)[None])
        for layer in model.layers:
            hidden = layer(
                hidden, attention_mask=mask, position_embeddings=rotation, past_key_values=kv
            )
        return hidden.view(*tokens_KF.shape, -1)

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
