"""Embedded weights <-> the published checkpoint layouts, plus model card and log.

LLaDA: ``model.transformer.blocks.{i}.…`` with config ``model_type: llada``. Dream: Qwen2 names
with q/k/v biases and an untied head, ``model_type: Dream``. Qwen3: ``model_type: qwen3``, norms
per head. D2F: a peft LoRA adapter. Weights are stored as bf16 safetensors. Nothing here trains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dllm_bench.models import embedded
from dllm_bench.training.net import NetConfig, Weights

MAX_POSITIONS = 2048
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


def published_name(name: str, layout: str) -> str:
    """Our weight name -> its name in the layout ("llada", "dream" or "qwen3")."""
    top, block, prefix = {
        "llada": (LLADA_TOP, LLADA_BLOCK, "model.transformer.blocks."),
        "dream": (DREAM_TOP, DREAM_BLOCK, "model.layers."),
        "qwen3": (DREAM_TOP, QWEN3_BLOCK, "model.layers."),
    }[layout]
    if name in top:
        return top[name]
    index, part = name.split(".")
    return f"{prefix}{index}.{block[part]}"


def read_weights(folder: Path, names: list[str], layout: str) -> Weights:
    """Load a checkpoint folder as fp32 weights under our names."""
    tensors = load_file(folder / "model.safetensors")
    return {n: tensors[published_name(n, layout)].float() for n in names}


def write_checkpoint(
    folder: Path, weights: Weights, cfg: NetConfig, layout: str, chat: bool
) -> None:
    """Write weights, config.json and tokenizer files of a full model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = embedded.build_tokenizer(chat)
    tokenizer.save_pretrained(str(folder))
    ids = {
        f"{k}_token_id": getattr(tokenizer, f"{k}_token_id") for k in ("mask", "eos", "pad", "bos")
    }
    config = CONFIGS[layout](cfg) | ids
    _write_json(folder / "config.json", config)
    tensors = {published_name(n, layout): _stored(t) for n, t in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.bfloat16).contiguous()


def _llada_config(cfg: NetConfig) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "block_type": "llama",
        "d_model": cfg.d_model, "n_layers": cfg.n_layers, "n_heads": cfg.n_heads,
        "n_kv_heads": cfg.n_kv_heads, "mlp_ratio": 4, "mlp_hidden_size": cfg.mlp_size,
        "activation_type": "silu", "rope": True, "rope_theta": cfg.rope_theta, "alibi": False,
        "layer_norm_type": "rms", "rms_norm_eps": cfg.norm_eps, "attention_layer_norm": False,
        "include_bias": False, "include_qkv_bias": cfg.qkv_bias, "input_emb_norm": False,
        "scale_logits": False, "weight_tying": False, "vocab_size": cfg.vocab_size,
        "embedding_size": cfg.vocab_size, "max_sequence_length": MAX_POSITIONS,
        "use_cache": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _dream_config(cfg: NetConfig) -> dict[str, Any]:
    return {
        "architectures": ["DreamModel"], "model_type": "Dream", "hidden_act": "silu",
        "hidden_size": cfg.d_model, "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads, "num_key_value_heads": cfg.n_kv_heads,
        "intermediate_size": cfg.mlp_size, "rope_theta": cfg.rope_theta, "rope_scaling": None,
        "rms_norm_eps": cfg.norm_eps, "attention_dropout": 0.0, "use_sliding_window": False,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": cfg.vocab_size,
        "max_position_embeddings": MAX_POSITIONS, "use_cache": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _qwen3_config(cfg: NetConfig) -> dict[str, Any]:
    own = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": cfg.head_dim,
        "attention_bias": False,
    }  # fmt: skip
    return _dream_config(cfg) | own


CONFIGS = {"llada": _llada_config, "dream": _dream_config, "qwen3": _qwen3_config}


def write_adapter(
    folder: Path, lora: Weights, base: str, rank: int, alpha: int, chat: bool
) -> None:
    """Write a peft LoRA adapter; `lora` holds ``{i}.{q|k|v|o}.A`` [r, in] and ``.B`` [out, r]."""
    folder.mkdir(parents=True, exist_ok=True)
    embedded.build_tokenizer(chat).save_pretrained(str(folder))
    tensors = {}
    for name, tensor in lora.items():
        index, part, side = name.split(".")
        target = f"model.layers.{index}.{DREAM_BLOCK[part].removesuffix('.weight')}"
        tensors[f"base_model.model.{target}.lora_{side}.weight"] = _stored(tensor)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "fan_in_fan_out": False,
        "inference_mode": True, "modules_to_save": None, "use_rslora": False, "use_dora": False,
    }  # fmt: skip
    _write_json(folder / "adapter_config.json", config)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
