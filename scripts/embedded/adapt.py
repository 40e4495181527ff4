"""Turn one embedded model's weights into the start of another whose layout differs.

New words get new rows, key/value heads are repeated, biases dropped or begun at zero, norms per
head set to the size that the projections give or multiplied into them, and an MLP is cut into
experts: neurons are ordered by importance, the strongest form the shared expert, the others are
dealt to the routed experts in turn, some twice where there is room. Biases, dropped norms and
experts change the function; training makes up for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.embedded.network import Experts, NetworkSizes, Weights, shapes

COPY_NOISE = 0.05
"""Relative noise on the experts' weights, since a neuron may be dealt to two of them."""
NEW_ROW_STD = {"wte": 0.1, "head": 0.02}  # as for random weights


def adapted(weights: Weights, source: NetworkSizes, target: NetworkSizes, seed: int) -> Weights:
    """Return the weights of a `source` network, fitted to a `target` network."""
    rng = torch.Generator().manual_seed(seed)
    wanted = shapes(target)
    out = {n: w for n, w in weights.items() if n in wanted}
    out |= {n: torch.zeros(s) for n, s in wanted.items() if n.endswith("bias") and n not in out}
    for name, std in NEW_ROW_STD.items():
        rows = target.vocab_size - source.vocab_size
        new = torch.randn(rows, target.d_model, generator=rng) * std
        out[name] = torch.cat([weights[name], new])
    for index in range(target.n_layers):
        block = {n: out[f"{index}.{n}"] for n in ("k", "v", "q", "ln_1", "gate", "up", "down")}
        made = {n: _repeated(block[n], source, target) for n in ("k", "v")}
        if target.qk_norm and not source.qk_norm:
            made |= {f"ln_{n}": _norm_of(block[n], block["ln_1"], target) for n in "qk"}
        if source.qk_norm and not target.qk_norm:
            made |= {n: _scaled(made.get(n, block[n]), weights, index, n, target) for n in "qk"}
        if target.experts and index >= target.experts.dense_layers:
            made |= _split(block, target.experts, rng)
        out |= {f"{index}.{name}": weight for name, weight in made.items()}
    return out


def _repeated(weight: Tensor, source: NetworkSizes, target: NetworkSizes) -> Tensor:
    """Key or value heads, repeated until the target has its number of them."""
    heads = weight.view(source.n_kv_heads, source.head_dim, -1)
    repeat = target.n_kv_heads // source.n_kv_heads
    return heads.repeat_interleave(repeat, dim=0).reshape(-1, weight.shape[1])


def _norm_of(weight: Tensor, ln_H: Tensor, sizes: NetworkSizes) -> Tensor:
    """Return the weight of a norm per head that keeps the usual size of the projection's output."""
    size = (weight * ln_H).pow(2).sum(1).mean().sqrt()
    return size.expand(sizes.head_dim).clone()


def _scaled(weight: Tensor, weights: Weights, index: int, name: str, sizes: NetworkSizes) -> Tensor:
    """Return a projection whose heads have the size that the source's norm per head gave them."""
    heads = weight.view(-1, sizes.head_dim, sizes.d_model)
    size = (heads * weights[f"{index}.ln_1"]).pow(2).sum(2).mean(1).sqrt()
    norm_E = weights[f"{index}.ln_{name}"]
    return (heads * norm_E[:, None] / size[:, None, None]).reshape(weight.shape)


def _split(block: Weights, experts: Experts, rng: torch.Generator) -> Weights:
    """Return an MLP's neurons dealt to the experts; outputs are divided by the router's first
    weight."""
    gate, up, down = block["gate"], block["up"], block["down"]
    importance = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    order = importance.argsort(descending=True)
    shared, pool = order[: experts.shared_size], order[experts.shared_size :]
    wanted = experts.count * experts.size
    dealt = torch.cat([pool, pool.roll(1)])[:wanted]  # rolled: never twice in one expert
    dealt = dealt.view(experts.size, experts.count).T.reshape(-1)
    fresh = {"gate": gate[dealt], "up": up[dealt], "down": down[:, dealt]}
    made = {n: _noisy(w, rng) for n, w in fresh.items()}
    made["down"] = made["down"] / experts.first_weight
    made["router"] = torch.randn(experts.count, gate.shape[1], generator=rng) * 0.02
    if experts.shared_size:
        made |= {"shared_gate": gate[shared], "shared_up": up[shared]}
        made["shared_down"] = down[:, shared]
    return made


def _noisy(weight: Tensor, rng: torch.Generator) -> Tensor:
    """Return the weight with `COPY_NOISE`, so that copies of a neuron differ."""
    noise = torch.randn(weight.shape, generator=rng) * weight.std() * COPY_NOISE
    return weight + noise
