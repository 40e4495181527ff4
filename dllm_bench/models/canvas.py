"""`CanvasDenoiser`: DiffusionGemma as a model of uniform-state diffusion (`decoding/canvas.py`).

A forward with block-causal attention is transformers' encoder, one with full attention its decoder:
its input is conditioned on the mean embedding of the last prediction, sliding layers see all of the
canvas and the last positions of the text, and no K/V are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.transformer import TransformerDenoiser


class CanvasDenoiser(TransformerDenoiser):
    """Implements `decoding.canvas.CanvasModel` over a `CanvasModule`."""

    def _set_up(self) -> None:
        self.canvas_length: int = self._module.canvas_length
        self._encoder_scales = [layer.layer_scalar for layer in self._module.model.layers]
        self._denoises = False

    @torch.inference_mode()
    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Return float32 logits (1, C, V) of a canvas; see `TransformerDenoiser.forward`."""
        self._denoises = plan.attention == "full"
        scales = self._module.scale_N1 if self._denoises else self._encoder_scales
        for layer, scale in zip(self._module.model.layers, scales, strict=True):
            layer.layer_scalar = scale
        return super().forward(tokens_KL, plan, kv)

    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[ForwardPlan], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """Compute `forward` of several requests, one after another, since some encode and some
        denoise."""
        return [self.forward(*each) for each in zip(tokens, plans, caches, strict=True)]

    @torch.inference_mode()
    def mean_embeddings(self, logits_KRV: Tensor) -> Tensor:
        """Return the mean embedding (K, R, H) of the distribution of each row, in the weights'
        dtype."""
        table = self._module.model.embed_tokens
        share_KRV = logits_KRV.softmax(-1, dtype=torch.float32).to(table.weight.dtype)
        mean_KRH: Tensor = share_KRV @ table.weight * table.embed_scale.to(table.weight.dtype)
        return mean_KRH

    def head(self, hidden: Tensor) -> Tensor:
        """Return float32 logits (..., V) of normalised hidden states (..., H)."""
        logits: Tensor = self._module.lm_head(hidden).float()
        return logits if self._softcap is None else (logits / self._softcap).tanh() * self._softcap

    def _embed_fed(self, ids_PF: Tensor, added: Tensor | None) -> Tensor:
        """Return embeddings (P, F, H); on a canvas with self-conditioning, 0 where nothing is
        added."""
        embedded_PFH = self.embed(ids_PF)
        if not self._denoises:
            return embedded_PFH
        mean_PFH = torch.zeros_like(embedded_PFH) if added is None else added
        conditioned_PFH: Tensor = self._module.self_conditioning(embedded_PFH, mean_PFH)
        return conditioned_PFH

    def _mask(
        self, kind: str, plan: ForwardPlan, branches: int, kv: PositionCache
    ) -> Tensor | None:
        """Return the mask of the layers of one kind; on a canvas it hides old positions of the
        text."""
        window, text = self._window(kind), plan.feed[0]
        if not self._denoises:
            return super()._mask(kind, plan, branches, kv)
        if not 0 < window <= text:
            return None
        mask_11FX = torch.zeros(1, 1, plan.fed, plan.feed[1], dtype=self.dtype, device=self.device)
        mask_11FX[..., : text - window + 1] = -torch.inf
        return mask_11FX
