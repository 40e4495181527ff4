"""Write weights in the published checkpoint layouts, and read them back.

LLaDA: `model.transformer.blocks.{i}.…` with config `model_type: llada`. Dream: Qwen2 names with
q/k/v biases and an untied head, `model_type: Dream`; Fast-dLLM v2: the same names. Qwen3:
`model_type: qwen3`, norms per head; SDAR, WeDLM and LLaDA-MoE: the same names, every expert a
tensor of its own; LLaDA2: q, k and v in one tensor. D2F: a peft LoRA adapter. Weights are stored as
bf16 safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.embedded.network import NetworkSizes, Weights, shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_POSITIONS = 2048
LORA_ALPHA_PER_RANK = 1
LLADA_TOP = {
    "wte": "model.transformer.wte.weight",
    "ln_f": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
}
LLADA_BLOCK = {
    "ln_1": "attn_norm.weight", "q": "q_proj.weight", "k": "k_proj.weight", "v": "v_proj.weight",
    "o": "attn_out.weight", "ln_2": "ff_norm.weight", "gate": "ff_proj.weight",
    "up": "up_proj.weight", "down": "ff_out.weight",
}  # fmt: skip
DREAM_TOP = {
    "wte": "model.embed_tokens.weight",
    "ln_f": "model.norm.weight",
    "head": "lm_head.weight",
}
DREAM_BLOCK = {
    "ln_1": "input_layernorm.weight", "ln_2": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias", "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip
QWEN3_BLOCK = {name: part for name, part in DREAM_BLOCK.items() if "bias" not in name} | {
    "ln_q": "self_attn.q_norm.weight",
    "ln_k": "self_attn.k_norm.weight",
}


LLADA2_TOP = DREAM_TOP | {"wte": "model.word_embeddings.weight"}
LLADA2_BLOCK = QWEN3_BLOCK | {
    "qkv": "attention.query_key_value.weight", "o": "attention.dense.weight",
    "ln_q": "attention.query_layernorm.weight", "ln_k": "attention.key_layernorm.weight",
    "expert_bias": "mlp.gate.expert_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}  # fmt: skip
NAMES = {
    "llada": (LLADA_TOP, LLADA_BLOCK, "model.transformer.blocks."),
    "dream": (DREAM_TOP, DREAM_BLOCK, "model.layers."),
    "fast_dllm_v2": (DREAM_TOP, DREAM_BLOCK, "model.layers."),
    "qwen3": (DREAM_TOP, QWEN3_BLOCK, "model.layers."),
    "sdar": (DREAM_TOP, QWEN3_BLOCK, "model.layers."),
    "wedlm": (DREAM_TOP, QWEN3_BLOCK, "model.layers."),
    "llada_moe": (DREAM_TOP, QWEN3_BLOCK, "model.layers."),
    "llada2": (LLADA2_TOP, LLADA2_BLOCK, "model.layers."),
}
"""Layout -> names outside of the blocks, names in a block, prefix of the blocks."""
ROUTER = "mlp.gate.weight"
EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def published_name(name: str, layout: str) -> str:
    """Return the name of one of our weights in a layout."""
    top, block, prefix = NAMES[layout]
    if name in top:
        return top[name]
    index, part = name.split(".")
    return f"{prefix}{index}.{ROUTER if part == 'router' else block[part]}"


def published(weights: Weights, sizes: NetworkSizes, layout: str) -> Weights:
    """Return all tensors under their published names: experts split, LLaDA2's q, k and v joined."""
    ours = dict(weights)
    if layout == "llada2":
        for i in range(sizes.n_layers):
            ours[f"{i}.qkv"] = torch.cat([ours.pop(f"{i}.{n}") for n in "qkv"])
    out: Weights = {}
    for name, weight in ours.items():
        index, _, part = name.partition(".")
        if part not in EXPERT or f"{index}.router" not in ours or sizes.experts is None:
            out[published_name(name, layout)] = weight
            continue
        for expert, rows in enumerate(
            weight.split(sizes.experts.size, dim=1 if part == "down" else 0)
        ):
            out[_expert_name(index, expert, part, layout)] = rows
    if layout == "llada2" and sizes.experts:
        bias = torch.zeros(sizes.experts.count)  # not trained: the router alone chooses
        sparse = range(sizes.experts.dense_layers, sizes.n_layers)
        out |= {published_name(f"{i}.expert_bias", layout): bias for i in sparse}
    return out


def read_weights(folder: Path, sizes: NetworkSizes, layout: str) -> Weights:
    """Load the weights of a checkpoint folder under our names, in fp32."""
    tensors = load_file(folder / "model.safetensors")
    return {n: _read(tensors, n, sizes, layout).float() for n in shapes(sizes)}


def _read(tensors: Weights, name: str, sizes: NetworkSizes, layout: str) -> Tensor:
    """Return one of our weights: experts stacked, LLaDA2's q, k and v taken apart."""
    index, _, part = name.partition(".")
    if layout == "llada2" and part in ("q", "k", "v"):
        parts = [sizes.d_model, sizes.kv_size, sizes.kv_size]
        joined = tensors[published_name(f"{index}.qkv", layout)]
        return joined.split(parts)["qkv".index(part)]
    if part in EXPERT and sizes.experts and int(index) >= sizes.experts.dense_layers:
        experts = [
            tensors[_expert_name(index, e, part, layout)] for e in range(sizes.experts.count)
        ]
        return torch.cat(experts, dim=1 if part == "down" else 0)
    return tensors[published_name(name, layout)]


def _expert_name(index: str, expert: int, part: str, layout: str) -> str:
    """Return the published name of an expert's matrix."""
    return f"{NAMES[layout][2]}{index}.mlp.experts.{expert}.{EXPERT[part]}.weight"


def write_checkpoint(
    folder: Path,
    weights: Weights,
    sizes: NetworkSizes,
    layout: str,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Write weights, config.json and tokenizer of a whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    file = folder / "tokenizer.json"  # without indentation: a third of the size
    compact = json.dumps(json.loads(file.read_text()), ensure_ascii=False, separators=(",", ":"))
    file.write_text(compact + "\n")
    ids = {
        f"{k}_token_id": getattr(tokenizer, f"{k}_token_id") for k in ("mask", "eos", "pad", "bos")
    }
    config = CONFIGS[layout](sizes) | ids
    _write_json(folder / "config.json", config)
    tensors = {n: _stored(t) for n, t in published(weights, sizes, layout).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.bfloat16).contiguous()


def _llada_config(sizes: NetworkSizes) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "block_type": "llama",
        "d_model": sizes.d_model, "n_layers": sizes.n_layers, "n_heads": sizes.n_heads,
        "n_kv_heads": sizes.n_kv_heads, "mlp_ratio": 4, "mlp_hidden_size": sizes.mlp_size,
        "activation_type": "silu", "rope": True, "rope_theta": sizes.rope_theta, "alibi": False,
        "layer_norm_type": "rms", "rms_norm_eps": sizes.norm_eps, "attention_layer_norm": False,
        "include_bias": False, "include_qkv_bias": sizes.qkv_bias, "input_emb_norm": False,
        "scale_logits": False, "weight_tying": False, "vocab_size": sizes.vocab_size,
        "embedding_size": sizes.vocab_size, "max_sequence_length": MAX_POSITIONS,
        "use_cache": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _dream_config(sizes: NetworkSizes) -> dict[str, Any]:
    return {
        "architectures": ["DreamModel"], "model_type": "Dream", "hidden_act": "silu",
        "hidden_size": sizes.d_model, "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads, "num_key_value_heads": sizes.n_kv_heads,
        "intermediate_size": sizes.mlp_size, "rope_theta": sizes.rope_theta, "rope_scaling": None,
        "rms_norm_eps": sizes.norm_eps, "attention_dropout": 0.0, "use_sliding_window": False,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": sizes.vocab_size,
        "max_position_embeddings": MAX_POSITIONS, "use_cache": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _fast_dllm_v2_config(sizes: NetworkSizes) -> dict[str, Any]:
    return _dream_config(sizes) | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen",
        "bd_size": 32,
    }  # fmt: skip


def _qwen3_config(sizes: NetworkSizes) -> dict[str, Any]:
    return _dream_config(sizes) | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": sizes.head_dim,
        "attention_bias": False,
    }  # fmt: skip


def _sdar_config(sizes: NetworkSizes) -> dict[str, Any]:
    return _qwen3_config(sizes) | {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}


def _wedlm_config(sizes: NetworkSizes) -> dict[str, Any]:
    own = {"architectures": ["WeDLMForCausalLM"], "model_type": "wedlm", "qk_norm": sizes.qk_norm}
    return _qwen3_config(sizes) | own


def _llada_moe_config(sizes: NetworkSizes) -> dict[str, Any]:
    assert sizes.experts
    return _qwen3_config(sizes) | {
        "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "qk_layernorm": True,
        "clip_qkv": None, "partial_rotary_factor": 1, "num_experts": sizes.experts.count,
        "num_experts_per_tok": sizes.experts.top_k, "expert_intermediate_size": sizes.experts.size,
        "dense_intermediate_size": sizes.mlp_size, "shared_expert_intermediate_size": None,
        "moe_layer_freq": [1] * sizes.n_layers, "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False, "norm_topk_prob": False,
        "routed_scaling_factor": 1, "router_num_group": None,
    }  # fmt: skip


def _llada2_config(sizes: NetworkSizes) -> dict[str, Any]:
    assert sizes.experts
    return _qwen3_config(sizes) | {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "use_qk_norm": True,
        "use_qkv_bias": False, "use_bias": False, "norm_head": False, "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "partial_rotary_factor": 1.0,
        "num_experts": sizes.experts.count, "num_shared_experts": int(sizes.experts.shared),
        "num_experts_per_tok": sizes.experts.top_k, "moe_intermediate_size": sizes.experts.size,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": sizes.experts.scale,
        "norm_topk_prob": True, "first_k_dense_replace": sizes.experts.dense_layers,
    }  # fmt: skip


CONFIGS = {
    "llada": _llada_config, "dream": _dream_config, "qwen3": _qwen3_config, "sdar": _sdar_config,
    "llada_moe": _llada_moe_config, "llada2": _llada2_config, "fast_dllm_v2": _fast_dllm_v2_config,
    "wedlm": _wedlm_config,
}  # fmt: skip


def write_adapter(folder: Path, lora: Weights, base: str, rank: int, layout: str) -> None:
    """Write a peft LoRA adapter of a model in this layout, whose tokenizer it shares.

    `lora` holds `{i}.{q|k|v|o}.A` (rank, in) and `.B` (out, rank).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors, targets = {}, []
    for name, tensor in lora.items():
        weight, side = name.rsplit(".", 1)
        target = published_name(weight, layout).removesuffix(".weight")
        tensors[f"base_model.model.{target}.lora_{side}.weight"] = _stored(tensor)
        targets.append(target.rsplit(".", 1)[1])
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": rank, "lora_alpha": rank * LORA_ALPHA_PER_RANK, "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(dict.fromkeys(targets)), "fan_in_fan_out": False,
        "inference_mode": True, "modules_to_save": None, "use_rslora": False, "use_dora": False,
    }  # fmt: skip
    _write_json(folder / "adapter_config.json", config)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
