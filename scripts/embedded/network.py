"""The small transformer of the embedded models, as a function of a dictionary of weights.

Pre-norm blocks with rotary attention and a SwiGLU MLP: the common core of the LLaDA, Dream (Qwen2)
and Qwen3 layouts. Weights are plain tensors, so that an adapter is weights + B A, computed before
the call. bf16 matmuls, fp32 residual stream and norms. Only what training needs: no cache, no
generation. Key maps to the published layouts are in `export.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Experts:
    """A sparse MLP: `top_k` of `count` experts by a router, and one all tokens use, in layers
    from `dense_layers` on.

    score "softmax": over all experts, the chosen weights as they are (LLaDA-MoE); "sigmoid": one by
    one, the chosen weights brought to the sum `scale` (LLaDA2).
    """

    count: int
    top_k: int
    size: int
    shared: bool
    dense_layers: int
    score: str
    scale: float = 1.0

    @property
    def shared_size(self) -> int:
        return self.size if self.shared else 0

    @property
    def first_weight(self) -> float:
        """What an untrained router gives a chosen expert."""
        return 1 / self.count if self.score == "softmax" else self.scale / self.top_k


@dataclass(frozen=True)
class NetConfig:
    """Sizes; Dream has biases in q, k and v (`qkv_bias`), Qwen3 norms of each head (`qk_norm`)."""

    vocab_size: int
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 4
    mlp_size: int = 384
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim


def shapes(cfg: NetConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight."""
    d, kv = cfg.d_model, cfg.kv_size
    out: dict[str, tuple[int, ...]] = {"wte": (cfg.vocab_size, d), "head": (cfg.vocab_size, d)}
    out["ln_f"] = (d,)
    for i in range(cfg.n_layers):
        block: dict[str, tuple[int, ...]] = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}
        block |= {"ln_1": (d,), "ln_2": (d,), **_mlp_shapes(cfg, i)}
        if cfg.qkv_bias:
            block |= {"q_bias": (d,), "k_bias": (kv,), "v_bias": (kv,)}
        if cfg.qk_norm:
            block |= {"ln_q": (cfg.head_dim,), "ln_k": (cfg.head_dim,)}
        out |= {f"{i}.{name}": shape for name, shape in block.items()}
    return out


def _mlp_shapes(cfg: NetConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """A dense MLP, or all experts one below the other with the router's rows."""
    d, experts = cfg.d_model, cfg.experts
    sparse = experts is not None and layer >= experts.dense_layers
    size = experts.count * experts.size if experts and sparse else cfg.mlp_size
    out: dict[str, tuple[int, ...]] = {"gate": (size, d), "up": (size, d), "down": (d, size)}
    if experts and sparse:
        out["router"] = (experts.count, d)
        if one := experts.shared_size:
            out |= {"shared_gate": (one, d), "shared_up": (one, d), "shared_down": (d, one)}
    return out


def initial_weights(cfg: NetConfig, seed: int, number_ids: list[int]) -> Weights:
    """Random fp32 weights; number tokens start on shared Fourier features of their value."""
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(cfg).items():
        if len(shape) == 1:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            std = {"wte": 0.1, "head": 0.02}.get(name, 0.7 / math.sqrt(shape[1]))
            depth = math.sqrt(2 * cfg.n_layers) if name.endswith(("o", "down")) else 1.0
            weights[name] = torch.randn(shape, generator=rng) * std / depth
    ids = torch.tensor(number_ids)
    features_NF = _number_features(len(number_ids))
    mix_FD = torch.randn(features_NF.shape[1], cfg.d_model, generator=rng)
    wave_ND = features_NF @ mix_FD / math.sqrt(features_NF.shape[1])
    weights["wte"][ids] += 0.1 * wave_ND
    weights["head"][ids] += 0.02 * wave_ND
    return weights


def _number_features(count: int) -> Tensor:
    periods = torch.tensor([2.0, 5.0, 10.0, 20.0, 25.0, 50.0, 100.0, 200.0])
    angle_NF = 2 * math.pi * torch.arange(count)[:, None] / periods
    return torch.cat([angle_NF.cos(), angle_NF.sin()], dim=1)


def rotary(cfg: NetConfig, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """(cos_LH, sin_LH) in the rotate-half convention; sin carries the sign of the first half."""
    inverse = 1.0 / cfg.rope_theta ** (torch.arange(0, cfg.head_dim, 2) / cfg.head_dim)
    angle = torch.outer(positions_L.float(), inverse)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def hidden_states(
    weights: Weights,
    cfg: NetConfig,
    ids_BL: Tensor,
    rope: tuple[Tensor, Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Final normed states [B, L, D] (bf16).

    `rope`: cos and sin, [L, H] or [B, 1, L, H]; `bias`: additive attention mask broadcastable to
    [B, heads, L, L], or None for full bidirectional attention.
    """
    x_BLD = F.embedding(ids_BL, weights["wte"])
    for i in range(cfg.n_layers):
        block = {n.partition(".")[2]: w for n, w in weights.items() if n.startswith(f"{i}.")}
        normed = _rms(x_BLD, block["ln_1"], cfg)
        x_BLD = x_BLD + _attention(block, cfg, normed, rope, bias)
        normed = _rms(x_BLD, block["ln_2"], cfg)
        x_BLD = x_BLD + _mlp(block, cfg, normed)
    return _rms(x_BLD, weights["ln_f"], cfg)


def _mlp(block: Weights, cfg: NetConfig, x_BLD: Tensor) -> Tensor:
    """SwiGLU; of a sparse layer all experts are computed, those not chosen count nothing."""
    gated_BLM = _gated(x_BLD, block["gate"], block["up"])
    if "router" in block and cfg.experts:
        shares_BLE = _half(_routed(x_BLD, block["router"], cfg.experts))
        by_expert = gated_BLM.unflatten(-1, (cfg.experts.count, cfg.experts.size))
        gated_BLM = (by_expert * shares_BLE[..., None]).flatten(-2)
    out_BLD = F.linear(gated_BLM, _half(block["down"]))
    if "shared_gate" in block:
        shared_BLM = _gated(x_BLD, block["shared_gate"], block["shared_up"])
        out_BLD = out_BLD + F.linear(shared_BLM, _half(block["shared_down"]))
    return out_BLD


def _gated(x_BLD: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x_BLD, _half(gate))) * F.linear(x_BLD, _half(up))


def _routed(x_BLD: Tensor, router: Tensor, experts: Experts) -> Tensor:
    """Each expert's weight at each position, 0 for those not chosen."""
    logits_BLE = F.linear(x_BLD.float(), router)
    soft = experts.score == "softmax"
    scores_BLE = logits_BLE.softmax(-1) if soft else logits_BLE.sigmoid()
    least_BL1 = scores_BLE.topk(experts.top_k, dim=-1).values[..., -1:]
    kept_BLE = torch.where(scores_BLE >= least_BL1, scores_BLE, 0.0)
    return kept_BLE if soft else experts.scale * kept_BLE / kept_BLE.sum(-1, keepdim=True)


def _half(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16)


def _rms(x: Tensor, weight: Tensor, cfg: NetConfig) -> Tensor:
    return _half(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps) * weight)


def _attention(
    block: Weights, cfg: NetConfig, x_BLD: Tensor, rope: tuple[Tensor, Tensor], bias: Tensor | None
) -> Tensor:
    """Plain softmax attention: at these lengths faster on a CPU than the fused kernel."""
    batch, length, d_model = x_BLD.shape
    qkv = F.linear(x_BLD, _half(torch.cat([block["q"], block["k"], block["v"]])))
    if cfg.qkv_bias:
        qkv = qkv + _half(torch.cat([block["q_bias"], block["k_bias"], block["v_bias"]]))
    heads = qkv.view(batch, length, -1, cfg.head_dim).transpose(1, 2)
    q, k, v = heads.split([cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads], dim=1)
    if cfg.qk_norm:
        q, k = _rms(q, block["ln_q"], cfg), _rms(k, block["ln_k"], cfg)
    q, k = _rotate(q, rope), _rotate(k, rope)
    if cfg.n_kv_heads != cfg.n_heads:
        k, v = (t.repeat_interleave(cfg.n_heads // cfg.n_kv_heads, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(cfg.head_dim)
    if bias is not None:
        scores = scores + bias
    mixed = _half(torch.softmax(scores, dim=-1)) @ v
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, d_model), _half(block["o"]))


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    return _half(x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin)
