"""Blocks of DFlash and DSpark in training: anchors, labels, the block mask, the forward pass.

Every anchor of a row gives a block: the anchor's token and masks behind it, at the anchor's own
positions. All blocks of a row lie behind the target's features in one attention; a slot sees the
features before its anchor and the slots of its block (`sees`), evaluated densely on the CPU and by
FlexAttention on CUDA. Shapes: B rows, S positions, A anchors, N slots. Left out: z-lab's dialect,
whose slots say their own position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from dllm_bench.models.drafter_networks import (
    BlockDraftNetwork,
    BlockLayer,
    ContextAttention,
    Rotation,
)

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # row, head, query, key -> bool
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value -> mixed


@dataclass(frozen=True)
class Rows:
    """Texts and what the target made of them, in one step.

    answer_BS: positions whose token may be an anchor and is worth predicting. features_BSC: outputs
    of the tapped layers; last_BSD: normalised last hidden states.
    """

    ids_BS: Tensor
    answer_BS: Tensor
    features_BSC: Tensor
    last_BSD: Tensor


@dataclass(frozen=True)
class Blocks:
    """Anchors of every row and what their slots should say.

    kept_BA: real anchors, not padding; labels_BAN: positions of the labels inside the text;
    supervised_BAN: slots whose label and all labels before it lie in the answer.
    """

    anchors_BA: Tensor
    kept_BA: Tensor
    labels_BAN: Tensor
    supervised_BAN: Tensor


@dataclass(frozen=True)
class Drafted:
    """What a drafter says in its slots; survival is None without that head."""

    logits_BANV: Tensor
    survival_BAN: Tensor | None


def draw_anchors(answer_BS: Tensor, most: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Up to `most` anchors (B, A) per row, sorted, without repetition, and which are real.

    Uniform over the positions whose own token and next one belong to the answer; padded with 0.
    """
    possible_BS = answer_BS[:, :-1] & answer_BS[:, 1:]
    chance_BS = torch.rand(possible_BS.shape, generator=rng).to(possible_BS.device)
    chance_BS = chance_BS.masked_fill(~possible_BS, 2.0)
    anchors_BA = chance_BS.argsort(dim=1)[:, :most]
    kept_BA = possible_BS.gather(1, anchors_BA)
    ordered_BA = anchors_BA.masked_fill(~kept_BA, answer_BS.shape[1]).sort(dim=1).values
    kept_BA = ordered_BA < answer_BS.shape[1]
    return ordered_BA.masked_fill(~kept_BA, 0), kept_BA


def blocks_at(anchors_BA: Tensor, kept_BA: Tensor, answer_BS: Tensor, slots: int) -> Blocks:
    """Labels of blocks: slot n says the token at anchor + 1 + n."""
    length = answer_BS.shape[1]
    ahead_N = torch.arange(1, slots + 1, device=anchors_BA.device)
    labels_BAN = anchors_BA[..., None] + ahead_N
    inside_BAN, labels_BAN = labels_BAN < length, labels_BAN.clamp(max=length - 1)
    wanted_BAN = inside_BAN & at(answer_BS, labels_BAN) & kept_BA[..., None]
    return Blocks(anchors_BA, kept_BA, labels_BAN, wanted_BAN.long().cumprod(-1).bool())


def at(values_BS: Tensor, index_BAN: Tensor) -> Tensor:
    """Entries (B, A, N, …) of a row's values at the positions of its blocks."""
    row_B11 = torch.arange(len(values_BS), device=values_BS.device)[:, None, None]
    return values_BS[row_B11, index_BAN]


def sees(anchors_BA: Tensor, length: int, slots: int) -> Sees:
    """Which keys, `length` features and then all slots, a query slot sees."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // slots
        feature = (key < length) & (key < anchors_BA[row, block])
        return feature | ((key >= length) & ((key - length) // slots == block))

    return visible


def dense(visible: Sees, rows: int, queries: int, keys: int, device: torch.device) -> Attend:
    """Attention under a mask (B, 1, Q, K) held in memory."""
    row_B111 = torch.arange(rows, device=device)[:, None, None, None]
    query_Q1 = torch.arange(queries, device=device)[:, None]
    key_K = torch.arange(keys, device=device)
    mask_B1QK = visible(row_B111, torch.zeros_like(row_B111), query_Q1, key_K)
    return lambda query, key, value: F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask_B1QK, enable_gqa=True
    )


def flex(visible: Sees, rows: int, queries: int, keys: int, device: torch.device) -> Attend:
    """The same by FlexAttention, which skips what no query of a tile sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(visible, rows, None, queries, keys, device=device)
    kernel = _flex_kernel(device.type)
    return lambda query, key, value: kernel(query, key, value, block_mask=mask, enable_gqa=True)


@lru_cache
def _flex_kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention


def forward(
    network: BlockDraftNetwork, rows: Rows, blocks: Blocks, kernel: Callable = dense
) -> Drafted:
    """Logits of all slots, the tokens before them given; `kernel`: dense or flex."""
    hidden_BAND = hidden_states(network, rows, blocks, kernel)
    logits_BANV = network.lm_head(hidden_BAND)
    before_BAN = at(rows.ids_BS, blocks.labels_BAN - 1)
    if network.facts.rank:
        logits_BANV = logits_BANV + _transitions(network, before_BAN, hidden_BAND)
    survives = network.facts.confidence
    survival_BAN = network.survival(before_BAN, hidden_BAND) if survives else None
    return Drafted(logits_BANV, survival_BAN)


def _transitions(network: BlockDraftNetwork, before_BAN: Tensor, hidden_BAND: Tensor) -> Tensor:
    """What the head of transitions adds, slot after slot."""
    state, added = None, []
    for slot in range(before_BAN.shape[-1]):
        bias_BAV, state = network.transition(before_BAN[..., slot], hidden_BAND[:, :, slot], state)
        added.append(bias_BAV)
    return torch.stack(added, dim=2)


def hidden_states(
    network: BlockDraftNetwork, rows: Rows, blocks: Blocks, kernel: Callable
) -> Tensor:
    """Normalised hidden states (B, A, N, D) of all slots."""
    (count, length), slots = rows.ids_BS.shape, network.facts.slots
    anchors_BA, device = blocks.anchors_BA, rows.ids_BS.device
    context_BSD = network.hidden_norm(network.fc(rows.features_BSC))
    ids_BAN = torch.full((*anchors_BA.shape, slots), network.facts.mask, device=device)
    ids_BAN[..., 0] = rows.ids_BS.gather(1, anchors_BA)
    hidden_BQD = network.embed_tokens(ids_BAN.flatten(1))
    position_BQ = (anchors_BA[..., None] + torch.arange(slots, device=device)).flatten(1)
    position_BS = torch.arange(length, device=device).expand(count, -1)
    position_BK = torch.cat([position_BS, position_BQ], dim=1)
    rotation = network.rotary_emb(hidden_BQD, position_BK)
    queries, keys = position_BQ.shape[1], position_BK.shape[1]
    attend = kernel(sees(anchors_BA, length, slots), count, queries, keys, device)
    for layer in network.layers:
        hidden_BQD = _layer(layer, context_BSD, hidden_BQD, rotation, attend)
    hidden_BAND: Tensor = network.norm(hidden_BQD).unflatten(1, (-1, slots))
    return hidden_BAND


def _layer(
    layer: Any, context_BSD: Tensor, hidden_BQD: Tensor, rotation: Rotation, attend: Attend
) -> Tensor:
    """One layer over all blocks at once."""
    assert isinstance(layer, BlockLayer)
    attention, query_BQD = layer.self_attn, layer.input_layernorm(hidden_BQD)
    last = tuple(part[:, -query_BQD.shape[1] :] for part in rotation)
    key, value = keys_values(attention, torch.cat([context_BSD, query_BQD], dim=1), rotation)
    mixed = attend(queries_of(attention, query_BQD, (last[0], last[1])), key, value)
    hidden_BQD = hidden_BQD + joined(attention, mixed)
    after: Tensor = hidden_BQD + layer.mlp(layer.post_attention_layernorm(hidden_BQD))
    return after


def queries_of(attention: ContextAttention, rows: Tensor, rotation: Rotation) -> Tensor:
    """Rotated queries (B, heads, rows, head size)."""
    query = attention.q_norm(_heads(attention, attention.q_proj(rows))).transpose(1, 2)
    rotated: Tensor = apply_rotary_pos_emb(query, query, *rotation)[0]
    return rotated


def keys_values(
    attention: ContextAttention, rows: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """Rotated keys and values."""
    key = attention.k_norm(_heads(attention, attention.k_proj(rows))).transpose(1, 2)
    value = _heads(attention, attention.v_proj(rows)).transpose(1, 2)
    return apply_rotary_pos_emb(key, key, *rotation)[0], value


def joined(attention: ContextAttention, mixed: Tensor) -> Tensor:
    """The attention's output (B, rows, D)."""
    projected: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return projected


def _heads(attention: ContextAttention, rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (-1, attention.head_dim))


def slot_weights(supervised_BAN: Tensor, decay: float | None) -> Tensor:
    """exp(-n / decay) where a slot is supervised, 0 elsewhere; no decay: 1."""
    slot_N = torch.arange(supervised_BAN.shape[-1], device=supervised_BAN.device)
    return supervised_BAN * torch.exp(-slot_N / (decay or math.inf))
