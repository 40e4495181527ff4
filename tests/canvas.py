"""Tiny random DiffusionGemmas: transformers' own object, and the model that reads its files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dllm_bench.api.generation import composed_decoder, slot_override
from dllm_bench.decoding.canvas import CanvasDecoder
from dllm_bench.models.canvas import CanvasDenoiser
from tests.helpers import load_denoiser

VOCAB, SLIDING, FULL = 512, "sliding_attention", "full_attention"
SPREAD = 12
"""Scale of a random embedding table without which every distribution would be flat."""
NO_TOKEN = -1


def published(
    seed: int = 0,
    canvas: int = 16,
    layers: Sequence[str] = (SLIDING, SLIDING, FULL),
    window: int = 16,
    spread: float = SPREAD,
) -> Any:
    """Return a random model as transformers makes it."""
    from transformers import AutoConfig, DiffusionGemmaConfig, DiffusionGemmaTextConfig
    from transformers import DiffusionGemmaForBlockDiffusion as Published

    one = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim", "global_head_dim"), 16)
    vision = AutoConfig.for_model("gemma4_vision", **one, **sizes)
    text = DiffusionGemmaTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        sliding_window=window,
        layer_types=list(layers),
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    config = DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=canvas,
        image_token_id=509,
        boi_token_id=510,
        eoi_token_id=511,
        initializer_range=0.02,
    )
    torch.manual_seed(seed)
    model = Published(config).eval()
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.mul_(spread)
    return model


def scaled_apart(model: Any) -> Any:
    """Return the model with other numbers for the layers of its encoder than for those of its
    decoder."""
    both = (model.model.encoder.language_model.layers, model.model.decoder.layers)
    for number, layer in enumerate(layer for layers in both for layer in layers):
        layer.layer_scalar.fill_(0.8 + 0.05 * number)
    return model


def read_here(model: Any) -> CanvasDenoiser:
    """Return the same weights as this package reads them from files; no token ends a text."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        denoiser = load_denoiser(Path(folder))
        denoiser.special = replace(denoiser.special, mask=NO_TOKEN, eos=NO_TOKEN, eot=None)
        assert isinstance(denoiser, CanvasDenoiser)
        return denoiser


@cache
def tiny_canvas_model(seed: int = 0, **shape: Any) -> CanvasDenoiser:
    """Return a random model of this package."""
    return read_here(published(seed, **shape))


def canvas_decoder(**settings: Any) -> CanvasDecoder:
    """Return the decoder of `diffusion_gemma` with settings such as accept__gamma=1.0."""
    changes = [slot_override(key.replace("__", "."), value) for key, value in settings.items()]
    made = composed_decoder("diffusion_gemma", changes)
    assert isinstance(made, CanvasDecoder)
    return made
