"""EAGLE-3 in training: the layer unrolled on its own output, as in DeepSpec.

Step 0 pairs the target's feature of position i with token i + 1 and predicts token i + 2. Every
further step moves tokens, rotary positions and labels on by one and reads what the last one gave.
A column sees step 0 causally, and of later steps itself alone. Gradients run through all steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_bench.models.drafter_networks import ChainDraftNetwork, ChainLayer
from dllm_bench.training.drafter_blocks import Rows, joined, keys_values, queries_of


def shifted(values: Tensor, by: int) -> Tensor:
    """Columns moved to the left, zeros (False) from the right."""
    if by >= values.shape[1]:
        return torch.zeros_like(values)
    return torch.cat([values[:, by:], torch.zeros_like(values[:, :by])], dim=1)


def unroll(network: ChainDraftNetwork, rows: Rows) -> list[Tensor]:
    """Logits (B, S, V) of every step."""
    layer = network.layers[0]
    assert isinstance(layer, ChainLayer)
    hidden_BSD, found = network.fc(rows.features_BSC), []
    count, length = rows.ids_BS.shape
    position_BS = torch.arange(length, device=rows.ids_BS.device).expand(count, -1)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(network.facts.slots):
        embedded_BSD = network.embed_tokens(shifted(rows.ids_BS, step + 1))
        rotation = network.rotary_emb(embedded_BSD, position_BS + step)
        pair = [layer.input_layernorm(embedded_BSD), layer.hidden_norm(hidden_BSD)]
        pair_BSW = torch.cat(pair, dim=-1)
        key, value = keys_values(layer.self_attn, pair_BSW, rotation)
        keys, values = [*keys, key], [*values, value]
        query = queries_of(layer.self_attn, pair_BSW, rotation)
        mixed = _mixed(query, torch.cat(keys, dim=2), torch.cat(values, dim=2))
        hidden_BSD = hidden_BSD + joined(layer.self_attn, mixed)
        hidden_BSD = hidden_BSD + layer.mlp(layer.post_attention_layernorm(hidden_BSD))
        found.append(network.lm_head(network.norm(hidden_BSD)))
    return found


def _mixed(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention to the first step's columns up to one's own, and to one's own of later steps."""
    length, steps = query.shape[2], keys.shape[2] // query.shape[2]
    first = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=query.device)
    mask = torch.cat([first, *[own] * (steps - 1)], dim=1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def countable(answer_BS: Tensor) -> Tensor:
    """Columns of step 0 whose next two tokens, anchor and label, are in the answer."""
    return shifted(answer_BS, 1) & shifted(answer_BS, 2)
