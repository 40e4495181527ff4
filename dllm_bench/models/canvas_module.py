"""DiffusionGemma's text model as one stack of layers, without its vision tower.

transformers' class holds the layers twice, an encoder and a decoder that share their weights and
differ in attention and in a scale of each layer's output. Here they are the encoder's modules, and
the decoder's scales are stored separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Linear, Module
from transformers import DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as published


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
