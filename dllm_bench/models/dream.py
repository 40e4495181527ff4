"""Dream layout: Qwen2 tensor names and config keys one to one, logits shifted by one.

DiffuCoder and the D2F versions of both are the same layout (with a LoRA adapter).
"""

from __future__ import annotations

from typing import Any, ClassVar

from dllm_bench.models.layout import Layout, Published, rope, value

SAME_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


class Dream(Layout):
    """`DreamModel` held by `Qwen2ForCausalLM`."""

    model_type = "Dream"
    shifted = True
    required: ClassVar = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "use_mrope": (False,),
        "rope_scaling": (None,),
    }

    def build(self, published: Published, attention: str) -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        settings: dict[str, Any] = {key: value(published, key) for key in SAME_KEYS}
        settings["rope_parameters"] = rope(published)
        settings["tie_word_embeddings"] = bool(published.get("tie_word_embeddings", False))
        settings["attn_implementation"] = attention
        return Qwen2ForCausalLM(Qwen2Config(**settings))
