"""LLaDA layout: OLMo-style config keys and `model.transformer.*` names, logits not shifted.

LLaDA-1.5, dParallel and d3LLM are the same layout. Held by `LlamaForCausalLM`, or by
`Qwen2ForCausalLM` (the same block with biases on q, k and v) where the config has
`include_qkv_bias`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dllm_bench.models.layouts import Layout, Published, value

LAYERS, BLOCKS = "model.layers.", "model.transformer.blocks."
TOP = {  # module name -> published name, without ".weight"
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}
BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


class LLaDA(Layout):
    """`LLaDAModelLM` of block type "llama"."""

    model_type = "llada"
    family = "Llama"
    required: ClassVar = {
        "block_type": ("llama",),
        "activation_type": ("silu",),
        "layer_norm_type": ("rms",),
        "rope": (True,),
        "alibi": (False,),
        "include_bias": (False,),
        "bias_for_layer_norm": (False, None),
        "attention_layer_norm": (False,),
        "input_emb_norm": (False,),
        "scale_logits": (False,),
    }

    def recognises(self, published: Published) -> bool:
        return super().recognises(published) and "num_experts" not in published

    def family_of(self, published: Published) -> str:
        return "Qwen2" if published.get("include_qkv_bias") else self.family

    def settings(self, published: Published) -> dict[str, Any]:
        return {
            "vocab_size": published.get("embedding_size") or value(published, "vocab_size"),
            "hidden_size": value(published, "d_model"),
            "intermediate_size": _mlp_size(published),
            "num_hidden_layers": value(published, "n_layers"),
            "num_attention_heads": value(published, "n_heads"),
            "num_key_value_heads": _kv_heads(published),
            "max_position_embeddings": value(published, "max_sequence_length"),
            "rms_norm_eps": value(published, "rms_norm_eps"),
            "rope_parameters": self.rope(published),
            "tie_word_embeddings": bool(published.get("weight_tying", False)),
        }

    def to_published(self, name: str) -> str:
        """Module name -> published name; unknown names come back as they are."""
        stem, _, kind = name.rpartition(".")
        if not stem.startswith(LAYERS):
            return f"{TOP[stem]}.{kind}" if stem in TOP else name
        index, _, part = stem.removeprefix(LAYERS).partition(".")
        return f"{BLOCKS}{index}.{BLOCK[part]}.{kind}" if part in BLOCK else name


def _mlp_size(published: Published) -> int:
    size = published.get("mlp_hidden_size")
    return int(size or value(published, "mlp_ratio") * value(published, "d_model"))


def _kv_heads(published: Published) -> int:
    if published.get("n_kv_heads"):
        return int(published["n_kv_heads"])
    return 1 if published.get("multi_query_attention") else int(value(published, "n_heads"))
