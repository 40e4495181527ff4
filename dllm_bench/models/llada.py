"""LLaDA layout: OLMo-style config keys and `model.transformer.*` names, logits not shifted.

Held by `LlamaForCausalLM`, or by `Qwen2ForCausalLM` (the same block with biases on q, k and v)
where the config has `include_qkv_bias`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dllm_bench.models.layout import Layout, Published, rope, value

PREFIX = ("model.transformer.blocks.", "model.layers.")
TOP = {  # published name -> module name, without ".weight"
    "model.transformer.wte": "model.embed_tokens",
    "model.transformer.ln_f": "model.norm",
    "model.transformer.ff_out": "lm_head",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


class LLaDA(Layout):
    """`LLaDAModelLM` of block type "llama"."""

    model_type = "llada"
    shifted = False
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

    def build(self, published: Published, attention: str) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

        settings: dict[str, Any] = {
            "vocab_size": published.get("embedding_size") or value(published, "vocab_size"),
            "hidden_size": value(published, "d_model"),
            "intermediate_size": _mlp_size(published),
            "num_hidden_layers": value(published, "n_layers"),
            "num_attention_heads": value(published, "n_heads"),
            "num_key_value_heads": _kv_heads(published),
            "max_position_embeddings": value(published, "max_sequence_length"),
            "rms_norm_eps": value(published, "rms_norm_eps"),
            "rope_parameters": rope(published),
            "tie_word_embeddings": bool(published.get("weight_tying", False)),
            "attn_implementation": attention,
        }
        if published.get("include_qkv_bias"):
            return Qwen2ForCausalLM(Qwen2Config(**settings))
        return LlamaForCausalLM(LlamaConfig(**settings))

    def to_module(self, name: str) -> str:
        return _rename(name, PREFIX, TOP, BLOCK)

    def to_published(self, name: str) -> str:
        top, block = ({new: old for old, new in names.items()} for names in (TOP, BLOCK))
        return _rename(name, PREFIX[::-1], top, block)


def _rename(name: str, prefix: tuple[str, ...], top: dict[str, str], block: dict[str, str]) -> str:
    """`name` with its stem looked up; unknown names come back as they are."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith(prefix[0]):
        return f"{top[stem]}.{kind}" if stem in top else name
    index, _, part = stem.removeprefix(prefix[0]).partition(".")
    return f"{prefix[1]}{index}.{block[part]}.{kind}" if part in block else name


def _mlp_size(published: Published) -> int:
    size = published.get("mlp_hidden_size")
    return int(size or value(published, "mlp_ratio") * value(published, "d_model"))


def _kv_heads(published: Published) -> int:
    if published.get("n_kv_heads"):
        return int(published["n_kv_heads"])
    return 1 if published.get("multi_query_attention") else int(value(published, "n_heads"))
