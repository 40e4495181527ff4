"""Layouts that transformers holds under its own names: SDAR in Qwen3's classes, and causal models.

Causal models (Qwen2, Qwen3, Llama, Gemma 4) are denoisers whose rows predict the next position and
whose positions see no later one. Of Gemma the language model is read, not its eyes and ears; its
layers alternate between a sliding window and the whole text, with rotary embeddings of their own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dllm_bench.models.layouts import Layout, Published, Standard, value


class Sdar(Standard):
    """`SDARForCausalLM`: Qwen3 trained on block diffusion, logits not shifted."""

    model_type = "sdar"
    family = "Qwen3"
    attention = "block_causal"
    required: ClassVar = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "attention_bias": (False,),
        "rope_scaling": (None,),
    }


class Causal(Standard):
    """An autoregressive model."""

    shifted = True
    attention = "causal"
    required: ClassVar = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }


class Qwen2(Causal):
    """`Qwen2ForCausalLM`, Qwen2.5 included."""

    model_type = "qwen2"
    family = "Qwen2"
    ropes = ("default", "yarn")


class Qwen3(Causal):
    """`Qwen3ForCausalLM`."""

    model_type = "qwen3"
    family = "Qwen3"
    ropes = ("default", "yarn")


class Llama(Causal):
    """`LlamaForCausalLM`, Llama 3.1 included."""

    model_type = "llama"
    family = "Llama"
    ropes = ("default", "llama3")


class Gemma4(Causal):
    """`Gemma4UnifiedForConditionalGeneration`, the language model of it."""

    model_type = "gemma4_unified"
    family = "Gemma4Unified"
    sizes = (
        *Standard.sizes,
        "head_dim",
        "hidden_activation",
        "sliding_window",
        "layer_types",
    )
    required: ClassVar = {
        "num_kv_shared_layers": (0, None),
        "use_double_wide_mlp": (False, None),
        "use_bidirectional_attention": ("vision", None),
        "hidden_size_per_layer_input": (0, None),
        "enable_moe_block": (False, None),
        "attention_bias": (False, None),
    }
    elsewhere = r"model\.(?!language_model\.)"

    def text(self, published: Published) -> Published:
        outer = {key: published[key] for key in ("tie_word_embeddings",) if key in published}
        return {"tie_word_embeddings": True, **outer, **value(published, "text_config")}

    def settings(self, published: Published) -> dict[str, Any]:
        """Layers over the whole text have heads of their own, in the old spelling or the new."""
        whole = "per_layer_config" if "per_layer_config" in published else "global_head_dim"
        optional = ("attention_k_eq_v", "num_global_key_value_heads", "final_logit_softcapping")
        given = {key: published[key] for key in optional if key in published}
        return {**super().settings(published), **given, whole: value(published, whole)}

    def rope(self, published: Published) -> dict[str, Any]:
        return dict(value(published, "rope_parameters"))

    def to_published(self, name: str) -> str:
        return name.replace("model.", "model.language_model.", 1)


NATIVE: tuple[Layout, ...] = (Sdar(), Qwen2(), Qwen3(), Llama(), Gemma4())
