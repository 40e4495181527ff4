"""`PlainModule`: the weights of a dense embedded model, without transformers' classes.

Importing those takes seconds, several times as long as decoding a short text. The parameters have
the names that transformers gives those of Llama, Qwen2 and Qwen3; `layers.PlainLayer` computes the
layers, and the norm and rotary embedding here compute what transformers' do, in float32 bit by bit.
`as_transformers` gives transformers' module with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, ModuleList, Parameter
from torch.nn.functional import rms_norm

FAMILIES = ("Llama", "Qwen2", "Qwen3")
"""Classes of transformers, without "ForCausalLM", whose parameters a `PlainModule` has."""


class PlainModule(Module):
    """Embedding, layers, last norm and head, as config.json describes them.

    settings: arguments of transformers' config class.
    build: makes transformers' module of the same config, without weights.
    """

    def __init__(
        self, family: str, settings: Mapping[str, Any], build: Callable[[], Module]
    ) -> None:
        super().__init__()
        heads = settings["num_attention_heads"]
        head_dim = settings.get("head_dim") or settings["hidden_size"] // heads
        usual = {"hidden_act": "silu", "_attn_implementation": "sdpa", "is_causal": False}
        self.config = SimpleNamespace(**usual, **{**settings, "head_dim": head_dim})
        self._build = build
        width = settings["hidden_size"]
        self.model = Module()
        table = torch.empty(settings["vocab_size"], width)  # not drawn at random
        self.model.embed_tokens = Embedding(len(table), width, _weight=table)
        count = settings["num_hidden_layers"]
        self.model.layers = ModuleList(_layer(family, self.config) for _ in range(count))
        self.model.norm = RMSNorm(width, self.config.rms_norm_eps)
        self.model.rotary_emb = RotaryEmbedding(self.config)
        self.lm_head = Linear(width, settings["vocab_size"], bias=False)

    def tie_weights(self) -> None:
        """Let the head use the embedding's table, if config.json says so."""
        if self.config.tie_word_embeddings:
            table: Any = self.model.embed_tokens
            self.lm_head.weight = table.weight

    def _init_weights(self, part: Module) -> None:
        """Compute the buffers of a part of this module; the name is transformers'."""
        size, base = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        exponent = torch.arange(0, size, 2, dtype=torch.float) / size
        part.inv_freq.copy_(1.0 / base**exponent)  # type: ignore[operator]

    def as_transformers(self) -> Any:
        """Return transformers' module, whose parameters are the tensors of this one."""
        with torch.device("meta"):
            module: Any = self._build()
        module.load_state_dict(self.state_dict(), assign=True)
        module.model.rotary_emb = type(module.model.rotary_emb)(module.config)
        module.to(self.lm_head.weight.device)
        module.tie_weights()
        return module.requires_grad_(False)


class RMSNorm(Module):
    """Root mean square norm over the last dimension, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states (..., H), normed, in their dtype; one launch on a CUDA device."""
        return rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


class RotaryEmbedding(Module):
    """Cosines and sines of positions, for the rotary embedding without scaling."""

    inv_freq: Tensor

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(config.head_dim // 2), persistent=False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, position_PF: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (P, F, E) each, in the dtype of the hidden states."""
        half_PFE = position_PF[..., None].float() * self.inv_freq
        angle_PFE = torch.cat((half_PFE, half_PFE), dim=-1)
        return angle_PFE.cos().to(hidden.dtype), angle_PFE.sin().to(hidden.dtype)


def _layer(family: str, config: SimpleNamespace) -> Module:
    """Return the parameters of a decoder layer."""
    width, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    biased = family == "Qwen2"
    layer, attention, mlp = Module(), Module(), Module()
    attention.q_proj = Linear(width, heads * size, bias=biased)
    attention.k_proj = Linear(width, kv_heads * size, bias=biased)
    attention.v_proj = Linear(width, kv_heads * size, bias=biased)
    attention.o_proj = Linear(heads * size, width, bias=False)
    if family == "Qwen3":
        attention.q_norm = RMSNorm(size, config.rms_norm_eps)
        attention.k_norm = RMSNorm(size, config.rms_norm_eps)
    attention.head_dim = size
    mlp.gate_proj = Linear(width, inner, bias=False)
    mlp.up_proj = Linear(width, inner, bias=False)
    mlp.down_proj = Linear(inner, width, bias=False)
    layer.self_attn, layer.mlp = attention, mlp
    layer.input_layernorm = RMSNorm(width, config.rms_norm_eps)
    layer.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)
    return layer
