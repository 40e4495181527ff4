"""Transformer layers of drafters, made of transformers' Qwen3 parts (DFlash, arXiv 2602.06036).

`ContextAttention` takes queries from the last rows only: what lies before them gives keys and
values alone. In DFlash these rows are features of the target, the same for every layer and not
normalised by it; in EAGLE-3 they are the committed positions of its single layer. Parameters have
the names of the published checkpoints. Left out: sliding windows, Gemma's layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.kv import PositionCache

Rotation = tuple[Tensor, Tensor]  # cosines and sines of all rows, (1, F + B, head_dim) each


class ContextAttention(Qwen3Attention):
    """Every query sees the cache, all context rows and all query rows."""

    def __init__(self, config: Any, index: int, width: int) -> None:
        super().__init__(config, index)
        self.is_causal = False
        for name in ("q_proj", "k_proj", "v_proj"):
            made = getattr(self, name).out_features
            setattr(self, name, nn.Linear(width, made, bias=config.attention_bias))

    def forward(  # type: ignore[override] # rows that are no queries come apart
        self, context_1FD: Tensor, query_1BD: Tensor, rotation: Rotation, kv: PositionCache
    ) -> Tensor:
        rows = torch.cat([context_1FD, query_1BD], dim=1)
        query = self.q_norm(self._heads(self.q_proj(query_1BD))).transpose(1, 2)
        key = self.k_norm(self._heads(self.k_proj(rows))).transpose(1, 2)
        value = self._heads(self.v_proj(rows)).transpose(1, 2)
        last = tuple(part[:, -query_1BD.shape[1] :] for part in rotation)
        query, _ = apply_rotary_pos_emb(query, query, *last)
        _, key = apply_rotary_pos_emb(key, key, *rotation)
        key, value = kv.update(key, value, self.layer_idx)
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        mixed, _ = kernel(self, query, key, value, None, scaling=self.scaling, is_causal=False)
        projected: Tensor = self.o_proj(mixed.flatten(2))
        return projected

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head_dim))


class BlockLayer(nn.Module):
    """A layer of DFlash: slots attend to the target's features and to each other."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = ContextAttention(config, index, config.hidden_size)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, context_1FD: Tensor, slots_1BD: Tensor, rotation: Rotation, kv: PositionCache
    ) -> Tensor:
        query = self.input_layernorm(slots_1BD)
        slots_1BD = slots_1BD + self.self_attn(context_1FD, query, rotation, kv)
        after: Tensor = slots_1BD + self.mlp(self.post_attention_layernorm(slots_1BD))
        return after


class ChainLayer(nn.Module):
    """The layer of EAGLE-3: reads a token beside the hidden state before it, both normalised.

    Only the last row goes on; the rows before it are needed as keys and values alone.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = ContextAttention(config, 0, 2 * config.hidden_size)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, token_1FD: Tensor, hidden_1FD: Tensor, rotation: Rotation, kv: PositionCache
    ) -> Tensor:
        rows = torch.cat([self.input_layernorm(token_1FD), self.hidden_norm(hidden_1FD)], dim=-1)
        mixed = self.self_attn(rows[:, :-1], rows[:, -1:], rotation, kv)
        last_11D = hidden_1FD[:, -1:] + mixed
        after: Tensor = last_11D + self.mlp(self.post_attention_layernorm(last_11D))
        return after


def planned(kv: PositionCache, stop: int, stored: int) -> ForwardPlan:
    """Feed all from the end of the cache to `stop`, keep what lies before `stored`."""
    feed = (kv.length, stop)
    plan = ForwardPlan(
        ForwardKind.DRAFT, feed=feed, rows=(stored, stored + 1), store=(kv.length, stored)
    )
    kv.begin(plan, stop)
    return plan


def keep(kv: PositionCache, plan: ForwardPlan, rows_1FD: Tensor) -> None:
    """Store the keys and values of `plan.store`; `rows` are what was fed."""
    kv.hold(plan, rows_1FD)
    kv.keep(plan, torch.zeros((), dtype=torch.long, device=rows_1FD.device))
