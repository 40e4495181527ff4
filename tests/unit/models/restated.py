"""Published architectures implemented again in float64, from a checkpoint's own names.

One plain function per block, written from the facts of the architectures and from nothing of the
package: tensors by their published names, config by its published keys, positions one by one.
Only the forward is here: no caches, no branches, no tricks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Sees = Callable[[int, int], bool]  # (query, key)
Config = dict[str, Any]
Weights = dict[str, Tensor]
FeedForward = Callable[[str, Tensor], Tensor]  # (prefix of the layer's mlp, normed input)


@dataclass
class Net:
    """What one block needs, whatever it was called."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    frequencies: list[float]
    eps: float
    mask_LL: Tensor


def restated(folder: Path, tokens_L: list[int], sees: Sees) -> Tensor:
    """Return logits (L, V) of every position, as the published model gives them: not shifted."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    length = len(tokens_L)
    mask_LL = torch.tensor([[sees(q, k) for k in range(length)] for q in range(length)])
    return FORWARDS[config["model_type"].lower()](config, tensors, torch.tensor(tokens_L), mask_LL)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mlp(w: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{prefix}.{side}_proj.weight"].T for side in ("gate", "up", "down"))
    return (x @ gate / (1 + (-x @ gate).exp()) * (x @ up)) @ down


def rotated(x_LHD: Tensor, net: Net) -> Tensor:
    """Pairs (i, i + half) of the first `rotary_dim` entries turn by position * frequency i."""
    positions = torch.arange(len(x_LHD), dtype=torch.float64)
    angles_L1I = torch.outer(positions, torch.tensor(net.frequencies).double())[:, None]
    half, end = net.rotary_dim // 2, net.rotary_dim
    a, b = x_LHD[..., :half], x_LHD[..., half:end]
    cos, sin = angles_L1I.cos(), angles_L1I.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x_LHD[..., end:]], -1)


def attention(q_LI: Tensor, k_LI: Tensor, v_LI: Tensor, net: Net, norms: tuple = ()) -> Tensor:
    """Grouped-query attention over projected inputs; `norms`: weights of RMSNorm per head."""
    q_LHD = q_LI.unflatten(1, (net.heads, net.head_dim))
    k_LGD, v_LGD = (x.unflatten(1, (net.kv_heads, net.head_dim)) for x in (k_LI, v_LI))
    if norms:
        q_LHD, k_LGD = (rms(x, w, net.eps) for x, w in zip((q_LHD, k_LGD), norms, strict=True))
    q_LHD, k_LGD = rotated(q_LHD, net), rotated(k_LGD, net)
    heads = []
    for head in range(net.heads):
        group = head // (net.heads // net.kv_heads)
        scores_LL = q_LHD[:, head] @ k_LGD[:, group].T / math.sqrt(net.head_dim)
        heads.append(scores_LL.masked_fill(~net.mask_LL, -math.inf).softmax(-1) @ v_LGD[:, group])
    return torch.cat(heads, 1)


def net_of(config: Config, mask_LL: Tensor) -> Net:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rotary = int(head_dim * config.get("partial_rotary_factor", 1.0))
    groups, eps = config["num_key_value_heads"], config["rms_norm_eps"]
    turns = frequencies(config["rope_theta"], rotary, config.get("rope_parameters") or {})
    return Net(heads, groups, head_dim, rotary, turns, eps, mask_LL)


def frequencies(theta: float, dim: int, rope: dict[str, Any]) -> list[float]:
    """theta^(-2i/dim); with YaRN divided by `factor` where few turns fit into the first length.

    In between, from `beta_fast` turns (kept) to `beta_slow` (divided), along the number i.
    """
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if rope.get("rope_type") != "yarn":
        return plain
    length = rope["original_max_position_embeddings"]
    turns = [length / (rope[name] * 2 * math.pi) for name in ("beta_fast", "beta_slow")]
    ends = [dim * math.log(turn) / (2 * math.log(theta)) for turn in turns]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
    kept = [1 - min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
    return [f * (k + (1 - k) / rope["factor"]) for f, k in zip(plain, kept, strict=True)]


def standard(
    config: Config, w: Weights, tokens_L: Tensor, mask: Tensor, ffn: FeedForward | None = None
) -> Tensor:
    """Llama-shaped blocks: biases and q/k norms where the checkpoint has them."""
    net = net_of(config, mask)
    x = w["model.embed_tokens.weight"][tokens_L]
    for i in range(config["num_hidden_layers"]):
        stem = f"model.layers.{i}"
        normed = rms(x, w[f"{stem}.input_layernorm.weight"], net.eps)
        projected = [
            normed @ w[f"{stem}.self_attn.{side}_proj.weight"].T
            + w.get(f"{stem}.self_attn.{side}_proj.bias", torch.zeros(()))
            for side in "qkv"
        ]
        own = [w.get(f"{stem}.self_attn.{side}_norm.weight") for side in "qk"]
        seen = attention(*projected, net, () if own[0] is None else tuple(own))
        x = x + seen @ w[f"{stem}.self_attn.o_proj.weight"].T
        normed = rms(x, w[f"{stem}.post_attention_layernorm.weight"], net.eps)
        x = x + (ffn or partial(mlp, w))(f"{stem}.mlp", normed)
    return rms(x, w["model.norm.weight"], net.eps) @ w["lm_head.weight"].T


def softmax_moe(config: Config, w: Weights, tokens_L: Tensor, mask: Tensor) -> Tensor:
    def experts(prefix: str, normed: Tensor) -> Tensor:
        """Softmax over all experts; the top-k probabilities, which sum to 1 with norm_topk_prob."""
        out = torch.zeros_like(normed)
        for t, row in enumerate(normed):
            probability_E = (w[f"{prefix}.gate.weight"] @ row).softmax(0)
            chosen = probability_E.argsort(descending=True)[: config["num_experts_per_tok"]]
            whole = probability_E[chosen].sum() if config["norm_topk_prob"] else 1
            for e in chosen:
                out[t] += probability_E[e] / whole * mlp(w, f"{prefix}.experts.{int(e)}", row)
        return out

    return standard(config, w, tokens_L, mask, experts)


def nemotron(config: Config, w: Weights, tokens_L: Tensor, mask: Tensor) -> Tensor:
    """Llama's layers under other names, with YaRN's frequencies."""
    named = {name.replace("encoder.", "model."): tensor for name, tensor in w.items()}
    return standard(config, {**named, "lm_head.weight": w["diffusion_head.weight"]}, tokens_L, mask)


def grouped(config: Config, scores_E: Tensor, bias_E: Tensor) -> list[int]:
    """Return a token's experts: of the groups whose two best are best, the best ones."""
    biased_GE = (scores_E + bias_E).view(config["n_group"], -1)
    strength_G = biased_GE.sort(-1, descending=True).values[:, :2].sum(-1)
    groups = strength_G.argsort(descending=True)[: config["topk_group"]].tolist()
    size = biased_GE.shape[1]
    allowed = [e for e in range(len(scores_E)) if e // size in groups]
    ranked = sorted(allowed, key=lambda e: -float(scores_E[e] + bias_E[e]))
    return ranked[: config["num_experts_per_tok"]]


def llada2(config: Config, w: Weights, tokens_L: Tensor, mask: Tensor) -> Tensor:
    net = net_of(config, mask)
    heights = [net.heads * net.head_dim, *[net.kv_heads * net.head_dim] * 2]

    def sparse(prefix: str, normed: Tensor) -> Tensor:
        out = mlp(w, f"{prefix}.shared_experts", normed)
        for t, row in enumerate(normed):
            scores_E = 1 / (1 + (-(w[f"{prefix}.gate.weight"] @ row)).exp())
            chosen = grouped(config, scores_E, w[f"{prefix}.gate.expert_bias"])
            total = scores_E[chosen].sum()
            for e in chosen:
                weight = config["routed_scaling_factor"] * scores_E[e] / total
                out[t] += weight * mlp(w, f"{prefix}.experts.{e}", row)
        return out

    x = w["model.word_embeddings.weight"][tokens_L]
    for i in range(config["num_hidden_layers"]):
        stem = f"model.layers.{i}"
        normed = rms(x, w[f"{stem}.input_layernorm.weight"], net.eps)
        fused = normed @ w[f"{stem}.attention.query_key_value.weight"].T
        norms = tuple(w[f"{stem}.attention.{s}_layernorm.weight"] for s in ("query", "key"))
        seen = attention(*fused.split(heights, 1), net, norms)
        x = x + seen @ w[f"{stem}.attention.dense.weight"].T
        normed = rms(x, w[f"{stem}.post_attention_layernorm.weight"], net.eps)
        is_dense = i < config["first_k_dense_replace"]
        x = x + (partial(mlp, w) if is_dense else sparse)(f"{stem}.mlp", normed)
    return rms(x, w["model.norm.weight"], net.eps) @ w["lm_head.weight"].T


FORWARDS: dict[str, Callable[..., Tensor]] = {
    "llada": softmax_moe,
    "sdar_moe": softmax_moe,
    "nemotron_labs_diffusion": nemotron,
    "llada2_moe": llada2,
    **dict.fromkeys("dream fast_dllm_qwen sdar wedlm qwen2 qwen3 llama".split(), standard),
}
