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

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim


def shapes(cfg: NetConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight."""
    d, kv, mlp = cfg.d_model, cfg.kv_size, cfg.mlp_size
    out: dict[str, tuple[int, ...]] = {"wte": (cfg.vocab_size, d), "head": (cfg.vocab_size, d)}
    out["ln_f"] = (d,)
    for i in range(cfg.n_layers):
        block: dict[str, tuple[int, ...]] = {
            "q": (d, d),
            "k": (kv, d),
            "v": (kv, d),
            "o": (d, d),
            "gate": (mlp, d),
        }
        block |= {"up": (mlp, d), "down": (d, mlp), "ln_1": (d,), "ln_2": (d,)}
        if cfg.qkv_bias:
            block |= {"q_bias": (d,), "k_bias": (kv,), "v_bias": (kv,)}
        if cfg.qk_norm:
            block |= {"ln_q": (cfg.head_dim,), "ln_k": (cfg.head_dim,)}
        out |= {f"{i}.{name}": shape for name, shape in block.items()}
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


def without_bias_and_groups(weights: Weights, source: NetConfig) -> Weights:
    """The Dream trunk as a LLaDA start: biases dropped, key/value heads repeated for each query."""
    out, repeat = {}, source.n_heads // source.n_kv_heads
    for name, weight in weights.items():
        if name.endswith((".k", ".v")):
            heads = weight.view(source.n_kv_heads, source.head_dim, -1)
            out[name] = heads.repeat_interleave(repeat, dim=0).reshape(-1, weight.shape[1])
        elif not name.endswith("bias"):
            out[name] = weight
    return out


def rotary(cfg: NetConfig, length: int) -> tuple[Tensor, Tensor]:
    """(cos_LH, sin_LH) in the rotate-half convention; sin carries the sign of the first half."""
    inverse = 1.0 / cfg.rope_theta ** (torch.arange(0, cfg.head_dim, 2) / cfg.head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
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
        block = {name: weights[f"{i}.{name}"] for name in _block_names(cfg)}
        normed = _rms(x_BLD, block["ln_1"], cfg)
        x_BLD = x_BLD + _attention(block, cfg, normed, rope, bias)
        normed = _rms(x_BLD, block["ln_2"], cfg)
        gated = F.silu(F.linear(normed, _half(block["gate"]))) * F.linear(
            normed, _half(block["up"])
        )
        x_BLD = x_BLD + F.linear(gated, _half(block["down"]))
    return _rms(x_BLD, weights["ln_f"], cfg)


def _block_names(cfg: NetConfig) -> tuple[str, ...]:
    names: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down", "ln_1", "ln_2")
    names += ("q_bias", "k_bias", "v_bias") if cfg.qkv_bias else ()
    return names + (("ln_q", "ln_k") if cfg.qk_norm else ())


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
