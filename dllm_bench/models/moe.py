"""Mixtures of experts: LLaDA-MoE in Qwen3-MoE's classes, LLaDA2 in GLM-4-MoE's.

LLaDA-MoE: softmax over all experts, the top-k weights not renormalised, RMSNorm per head on q and
k (OLMoE's class normalises the whole projection, Qwen3-MoE's each head). LLaDA2 (Bailing MoE v2):
sigmoid scores with a selection bias, the best groups by the sum of their two best, one shared
expert, rotary on the first half of a head, q/k/v in one tensor: [all q | all k | all v].
"""

from __future__ import annotations

from typing import Any, ClassVar

from dllm_bench.models.layouts import Part, Published, Shapes, Standard, expert_parts, value


class LLaDAMoE(Standard):
    """`LLaDAMoEModelLM`; its config.json says model_type "llada", as the dense model's does."""

    model_type = "llada"
    family = "Qwen3Moe"
    sizes = tuple(size for size in Standard.sizes if size != "intermediate_size")
    required: ClassVar = {
        "hidden_act": ("silu",),
        "qk_layernorm": (True,),
        "clip_qkv": (None,),
        "attention_bias": (False, None),
        "partial_rotary_factor": (1, None),
        "rope_scaling": (None,),
        "moe_router_score_function": ("softmax",),
        "moe_router_enable_expert_bias": (False, None),
        "router_num_group": (None, 0, 1),
        "routed_scaling_factor": (1, None),
        "shared_expert_intermediate_size": (None, 0),
    }

    def recognises(self, published: Published) -> bool:
        kind = str(published.get("model_type")).lower().replace("_", "")
        return kind in ("llada", "lladamoe") and "num_experts" in published

    def settings(self, published: Published) -> dict[str, Any]:
        sparse = published.get("moe_layer_freq") or [1] * value(published, "num_hidden_layers")
        return super().settings(published) | {
            "intermediate_size": published.get("dense_intermediate_size") or 1,
            "moe_intermediate_size": value(published, "expert_intermediate_size"),
            "num_experts": value(published, "num_experts"),
            "num_experts_per_tok": value(published, "num_experts_per_tok"),
            "norm_topk_prob": bool(published.get("norm_topk_prob")),
            "mlp_only_layers": [i for i, is_sparse in enumerate(sparse) if not is_sparse],
            "head_dim": _head_dim(published),
        }

    def parts(self, name: str, shapes: Shapes) -> list[Part]:
        return expert_parts(name, shapes) or super().parts(name, shapes)


RENAMED = {  # end of the module's name -> end of the published name
    "model.embed_tokens.weight": "model.word_embeddings.weight",
    ".self_attn.o_proj.weight": ".attention.dense.weight",
    ".self_attn.q_norm.weight": ".attention.query_layernorm.weight",
    ".self_attn.k_norm.weight": ".attention.key_layernorm.weight",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
FUSED = ("q_proj", "k_proj", "v_proj")  # rows of query_key_value, in this order


class LLaDA2(Standard):
    """`LLaDA2MoeModelLM`; blocks of 32 see each other and what lies before them."""

    model_type = "llada2_moe"
    family = "Glm4Moe"
    attention = "block_causal"
    required: ClassVar = {
        "hidden_act": ("silu",),
        "use_qk_norm": (True,),
        "use_qkv_bias": (False,),
        "use_bias": (False,),
        "norm_head": (False,),
        "score_function": ("sigmoid",),
        "moe_router_enable_expert_bias": (True,),
        "use_sliding_window": (False,),
        "rope_scaling": (None,),
    }

    def settings(self, published: Published) -> dict[str, Any]:
        whole = super().settings(published)
        fraction = published.get("partial_rotary_factor", 1.0)
        return whole | {
            "rope_parameters": whole["rope_parameters"] | {"partial_rotary_factor": fraction},
            "head_dim": _head_dim(published),
            "use_qk_norm": True,
            "moe_intermediate_size": value(published, "moe_intermediate_size"),
            "n_routed_experts": value(published, "num_experts"),
            "n_shared_experts": value(published, "num_shared_experts"),
            "num_experts_per_tok": value(published, "num_experts_per_tok"),
            "n_group": value(published, "n_group"),
            "topk_group": value(published, "topk_group"),
            "routed_scaling_factor": value(published, "routed_scaling_factor"),
            "norm_topk_prob": bool(published.get("norm_topk_prob", True)),
            "first_k_dense_replace": value(published, "first_k_dense_replace"),
        }

    def to_published(self, name: str) -> str:
        for ours, theirs in RENAMED.items():
            if name.endswith(ours):
                return name.removesuffix(ours) + theirs
        return name

    def parts(self, name: str, shapes: Shapes) -> list[Part]:
        stem, _, side = name.removesuffix(".weight").rpartition(".self_attn.")
        if side not in FUSED:
            return expert_parts(name, shapes) or super().parts(name, shapes)
        heights = [shapes[f"{stem}.self_attn.{other}.weight"][0] for other in FUSED]
        start = sum(heights[: FUSED.index(side)])
        rows = (start, start + shapes[name][0])
        return [Part(f"{stem}.attention.query_key_value.weight", rows=rows)]


def _head_dim(published: Published) -> int:
    given = published.get("head_dim")
    return int(given or published["hidden_size"] // published["num_attention_heads"])
