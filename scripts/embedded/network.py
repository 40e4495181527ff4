"""The small transformer of the embedded models, as a function of a dictionary of weights.

Pre-norm blocks with rotary attention and a SwiGLU MLP: the common core of the LLaDA, Dream (Qwen2)
and Qwen3 layouts. Weights are plain tensors, so that an adapter is weights + B A, computed before
the call. Matrix products in bf16, residual stream and norms in fp32. Left out: cache and
generation; the names of weights in the published layouts are in `export.py`.

Shapes: B rows, L positions, H hidden size, M size of an MLP, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this CPU multiplies bf16; where it does not, bf16 is ten times slower than fp32."""


@dataclass(frozen=True)
class Experts:
    """A sparse MLP: a router chooses `top_k` of `count` experts for each token."""

    count: int
    top_k: int
    size: int
    """Neurons of an expert."""
    shared: bool
    """Whether there is one more expert that every token uses."""
    dense_layers: int
    """Number of first layers that keep a dense MLP."""
    score: str
    """"softmax": over all experts, the chosen weights as they are (LLaDA-MoE); "sigmoid": of each
    expert, the chosen weights scaled to the sum `scale` (LLaDA2)."""
    scale: float = 1.0

    @property
    def shared_size(self) -> int:
        """Neurons of the shared expert; 0 without one."""
        return self.size if self.shared else 0

    @property
    def first_weight(self) -> float:
        """Return the weight that an untrained router gives a chosen expert."""
        return 1 / self.count if self.score == "softmax" else self.scale / self.top_k


@dataclass(frozen=True)
class NetworkSizes:
    """Sizes and optional parts of a network."""

    vocab_size: int
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 4
    mlp_size: int = 384
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    """Biases in q, k and v, as Dream has them."""
    qk_norm: bool = False
    """A norm of each head's queries and keys, as Qwen3 has them."""
    experts: Experts | None = None

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.d_model // self.n_heads

    @property
    def kv_size(self) -> int:
        """Size of all keys, or all values, of a position."""
        return self.n_kv_heads * self.head_dim


LLADA_MOE_EXPERTS = Experts(
    count=4, top_k=2, size=128, shared=False, dense_layers=0, score="softmax"
)
LLADA2_EXPERTS = Experts(
    count=4, top_k=2, size=96, shared=True, dense_layers=1, score="sigmoid", scale=2.0
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "llada": {"n_kv_heads": 4},
    "llada_moe": {"n_kv_heads": 4, "qk_norm": True, "experts": LLADA_MOE_EXPERTS},
    "llada2": {"n_kv_heads": 2, "qk_norm": True, "experts": LLADA2_EXPERTS},
    "dream": {"n_kv_heads": 2, "qkv_bias": True},
    "fast_dllm_v2": {"n_kv_heads": 2, "qkv_bias": True},
    "sdar": {"n_kv_heads": 2, "qk_norm": True},
    "qwen3": {"n_kv_heads": 2, "qk_norm": True},
    "wedlm": {"n_kv_heads": 2, "qk_norm": True},
}
"""Layout -> sizes in which it differs; LLaDA has as many key/value heads as query heads."""


def sizes_of_layout(layout: str, vocab_size: int) -> NetworkSizes:
    """Return the sizes of an embedded model in one of the published layouts."""
    return NetworkSizes(vocab_size, **LAYOUTS[layout])


def shapes(sizes: NetworkSizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight."""
    d, kv = sizes.d_model, sizes.kv_size
    out: dict[str, tuple[int, ...]] = {"wte": (sizes.vocab_size, d), "head": (sizes.vocab_size, d)}
    out["ln_f"] = (d,)
    for i in range(sizes.n_layers):
        block: dict[str, tuple[int, ...]] = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}
        block |= {"ln_1": (d,), "ln_2": (d,), **_mlp_shapes(sizes, i)}
        if sizes.qkv_bias:
            block |= {"q_bias": (d,), "k_bias": (kv,), "v_bias": (kv,)}
        if sizes.qk_norm:
            block |= {"ln_q": (sizes.head_dim,), "ln_k": (sizes.head_dim,)}
        out |= {f"{i}.{name}": shape for name, shape in block.items()}
    return out


def _mlp_shapes(sizes: NetworkSizes, layer: int) -> dict[str, tuple[int, ...]]:
    """Return a dense MLP, or the experts' matrices stacked into one, and the router."""
    d, experts = sizes.d_model, sizes.experts
    sparse = experts is not None and layer >= experts.dense_layers
    size = experts.count * experts.size if experts and sparse else sizes.mlp_size
    out: dict[str, tuple[int, ...]] = {"gate": (size, d), "up": (size, d), "down": (d, size)}
    if experts and sparse:
        out["router"] = (experts.count, d)
        if one := experts.shared_size:
            out |= {"shared_gate": (one, d), "shared_up": (one, d), "shared_down": (d, one)}
    return out


def initial_weights(sizes: NetworkSizes, seed: int, number_ids: list[int]) -> Weights:
    """Random fp32 weights; embeddings of numbers start with Fourier features of their value."""
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(sizes).items():
        if len(shape) == 1:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            std = {"wte": 0.1, "head": 0.02}.get(name, 0.7 / math.sqrt(shape[1]))
            depth = math.sqrt(2 * sizes.n_layers) if name.endswith(("o", "down")) else 1.0
            weights[name] = torch.randn(shape, generator=rng) * std / depth
    ids = torch.tensor(number_ids)
    features = _number_features(len(number_ids))
    mix = torch.randn(features.shape[1], sizes.d_model, generator=rng)
    waves = features @ mix / math.sqrt(features.shape[1])
    weights["wte"][ids] += 0.1 * waves
    weights["head"][ids] += 0.02 * waves
    return weights


def _number_features(count: int) -> Tensor:
    """Cosines and sines of the numbers below `count` at eight periods."""
    periods = torch.tensor([2.0, 5.0, 10.0, 20.0, 25.0, 50.0, 100.0, 200.0])
    angle = 2 * math.pi * torch.arange(count)[:, None] / periods
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def rotary(sizes: NetworkSizes, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (L, head size), for the rotate-half convention, in which the first
    half of the sines is negated.
    """
    inverse = 1.0 / sizes.rope_theta ** (torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    angle = torch.outer(positions_L.float(), inverse)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def hidden_states(
    weights: Weights,
    sizes: NetworkSizes,
    ids_BL: Tensor,
    rope: tuple[Tensor, Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Final normed states (B, L, H), of the type of the matrix products.

    `rope`: cosines and sines of `rotary`; `bias`: additive attention mask broadcastable to
    (B, heads, L, L), or None for full bidirectional attention.
    """
    x_BLH = F.embedding(ids_BL, weights["wte"])
    for i in range(sizes.n_layers):
        block = {n.partition(".")[2]: w for n, w in weights.items() if n.startswith(f"{i}.")}
        normed = _rms(x_BLH, block["ln_1"], sizes)
        x_BLH = x_BLH + _attention(block, sizes, normed, rope, bias)
        normed = _rms(x_BLH, block["ln_2"], sizes)
        x_BLH = x_BLH + _mlp(block, sizes, normed)
    return _rms(x_BLH, weights["ln_f"], sizes)


def _mlp(block: Weights, sizes: NetworkSizes, x_BLH: Tensor) -> Tensor:
    """Compute SwiGLU; a sparse layer computes all experts, those not chosen with weight 0."""
    gated_BLM = _gated(x_BLH, block["gate"], block["up"])
    if "router" in block and sizes.experts:
        shares_BLE = half(_routed(x_BLH, block["router"], sizes.experts))
        by_expert = gated_BLM.unflatten(-1, (sizes.experts.count, sizes.experts.size))
        gated_BLM = (by_expert * shares_BLE[..., None]).flatten(-2)
    out_BLH = F.linear(gated_BLM, half(block["down"]))
    if "shared_gate" in block:
        shared_BLM = _gated(x_BLH, block["shared_gate"], block["shared_up"])
        out_BLH = out_BLH + F.linear(shared_BLM, half(block["shared_down"]))
    return out_BLH


def _gated(x_BLH: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the hidden layer of SwiGLU, (B, L, M)."""
    return F.silu(F.linear(x_BLH, half(gate))) * F.linear(x_BLH, half(up))


def _routed(x_BLH: Tensor, router: Tensor, experts: Experts) -> Tensor:
    """Weight (B, L, E) of each expert at each position, 0 for those not chosen."""
    logits_BLE = F.linear(x_BLH.float(), router)
    soft = experts.score == "softmax"
    scores_BLE = logits_BLE.softmax(-1) if soft else logits_BLE.sigmoid()
    least_BL1 = scores_BLE.topk(experts.top_k, dim=-1).values[..., -1:]
    kept_BLE = torch.where(scores_BLE >= least_BL1, scores_BLE, 0.0)
    return kept_BLE if soft else experts.scale * kept_BLE / kept_BLE.sum(-1, keepdim=True)


def half(weight: Tensor) -> Tensor:
    """Return the tensor in the type of matrix products: bf16, or fp32 where the CPU multiplies no
    bf16."""
    return weight.to(torch.bfloat16) if HAS_BF16 else weight


def _rms(x: Tensor, weight: Tensor, sizes: NetworkSizes) -> Tensor:
    return half(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + sizes.norm_eps) * weight)


def _attention(
    block: Weights,
    sizes: NetworkSizes,
    x_BLH: Tensor,
    rope: tuple[Tensor, Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Plain softmax attention; at these lengths it is faster on a CPU than the fused kernel."""
    batch, length, d_model = x_BLH.shape
    qkv = F.linear(x_BLH, half(torch.cat([block["q"], block["k"], block["v"]])))
    if sizes.qkv_bias:
        qkv = qkv + half(torch.cat([block["q_bias"], block["k_bias"], block["v_bias"]]))
    heads = qkv.view(batch, length, -1, sizes.head_dim).transpose(1, 2)
    q, k, v = heads.split([sizes.n_heads, sizes.n_kv_heads, sizes.n_kv_heads], dim=1)
    if sizes.qk_norm:
        q, k = _rms(q, block["ln_q"], sizes), _rms(k, block["ln_k"], sizes)
    q, k = _rotate(q, rope), _rotate(k, rope)
    if sizes.n_kv_heads != sizes.n_heads:
        k, v = (t.repeat_interleave(sizes.n_heads // sizes.n_kv_heads, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(sizes.head_dim)
    if bias is not None:
        scores = scores + bias
    mixed = half(torch.softmax(scores, dim=-1)) @ v
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, d_model), half(block["o"]))


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    return half(x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin)
