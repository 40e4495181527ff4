"""DiffusionGemma's text model, without its vision tower: a model of uniform-state diffusion
(`decoding/canvas.py`).

transformers' class holds the layers twice, an encoder and a decoder that share their weights and
differ in attention and in a scale of each layer's output. Here they are the encoder's modules, and
the decoder's scales are stored separately (`CanvasModule`).

A forward with block-causal attention (`CanvasDenoiser`) is transformers' encoder, one with full
attention its decoder: its input is conditioned on the mean embedding of the last prediction,
sliding layers see all of the canvas and the last positions of the text, and no K/V are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from transformers import DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as published

from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.models.attention import OwnMask
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.transformer import TransformerDenoiser


class CanvasModule(Module):
    """Embedding, layers, last norm and head, and the network of self-conditioning.

    settings: arguments of transformers' config class. canvas_length: positions of a canvas.
    """

    def __init__(self, settings: Mapping[str, Any], canvas_length: int, backend: str) -> None:
        super().__init__()
        given = {**settings, "attn_implementation": backend}
        self.config = DiffusionGemmaTextConfig(**given)
        self.canvas_length = canvas_length
        self.model = published.DiffusionGemmaEncoderTextModel(self.config)
        self.self_conditioning = published.DiffusionGemmaSelfConditioning(self.config)
        self.lm_head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        # of the decoder, a number a layer
        self.register_buffer("scale_N1", torch.ones(self.config.num_hidden_layers, 1))
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the head use the embedding's table."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def _init_weights(self, part: Module) -> None:
        """Compute the buffers of a part of this module; the name is transformers'."""
        self.model._init_weights(part)


class CanvasDenoiser(TransformerDenoiser):
    """Implements `decoding.canvas.CanvasModel` over a `CanvasModule`."""

    batches = False  # some requests encode and some denoise

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

    @torch.inference_mode()
    def mean_embeddings(self, logits_KRV: Tensor) -> Tensor:
        """Return the mean embedding (K, R, H) of the distribution of each row, in the weights'
        dtype."""
        table = self._module.model.embed_tokens
        share_KRV = logits_KRV.softmax(-1, dtype=torch.float32).to(table.weight.dtype)
        return share_KRV @ table.weight * table.embed_scale.to(table.weight.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """Return float32 logits (..., V) of normalised hidden states (..., H)."""
        logits = self._module.lm_head(hidden).float()
        return logits if self._softcap is None else (logits / self._softcap).tanh() * self._softcap

    def _embed_fed(self, ids_PF: Tensor, added: Tensor | None) -> Tensor:
        """Return embeddings (P, F, H); on a canvas with self-conditioning, 0 where nothing is
        added."""
        embedded_PFH = self.embed(ids_PF)
        if not self._denoises:
            return embedded_PFH
        mean_PFH = torch.zeros_like(embedded_PFH) if added is None else added
        return self._module.self_conditioning(embedded_PFH, mean_PFH)

    def _mask(self, kind: str, plan: ForwardPlan, branches: int, kv: PositionCache) -> OwnMask:
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
