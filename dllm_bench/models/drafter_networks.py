"""DSpark's small heads (§3.1): what the token before a slot says about the slot.

W1 embeds a token in rank r, W2 turns r numbers into logits. Markov: bias = W2 W1[x]. Gated: W1[x]
is scaled by sigmoid(Wg [h; W1[x]]). RNN: z = [s; W1[x]; h] gives gate, candidate and output; the
bias is W2 tanh(o), from the state before the update. `ConfidenceHead`: how likely a token survives.
All work on any leading dimensions, so that training can run them over blocks at once.


Transformer layers of drafters, made of transformers' Qwen3 parts (DFlash, arXiv 2602.06036).

`ContextAttention` takes queries from the last rows only: what lies before them gives keys and
values alone. In DFlash these rows are features of the target, the same for every layer and not
normalised by it; in EAGLE-3 they are the committed positions of its single layer. Parameters have
the names of the published checkpoints. Left out: sliding windows, Gemma's layers.


The networks of DFlash, DSpark and EAGLE-3, with the tensor names of the published checkpoints.

DFlash (arXiv 2602.06036): C = RMSNorm(W_fc [features of the tapped layers]) gives keys and values
to every layer; the anchor and masks behind it are the slots. DSpark (§3) adds heads. EAGLE-3 as in
DeepSpec: feature i beside token i + 1 at rotary position i predicts token i + 2. Rotary positions
are absolute. Training losses and block masks are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.speculative import Context, HeadState, Target
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.drafter_config import DrafterConfig
from dllm_bench.models.kv import PositionCache


class MarkovHead(nn.Module):
    """The default: a transition table of low rank."""

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)

    def forward(
        self, token: Tensor, hidden_D: Tensor, state: HeadState
    ) -> tuple[Tensor, HeadState]:
        """Bias (V,) of a slot with hidden state h after `token`, and the state after the slot."""
        return self.markov_w2(self.markov_w1(token)), None


class GatedHead(MarkovHead):
    """The transition looks at the slot too (released code, not in the paper)."""

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__(vocabulary, rank, hidden)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def gate(self, token: Tensor, hidden_D: Tensor) -> Tensor:
        """How much of each of the r numbers passes."""
        return self.gate_proj(torch.cat([hidden_D, self.markov_w1(token)], dim=-1)).sigmoid()

    def forward(
        self, token: Tensor, hidden_D: Tensor, state: HeadState
    ) -> tuple[Tensor, HeadState]:
        return self.markov_w2(self.gate(token, hidden_D) * self.markov_w1(token)), None


class RnnHead(MarkovHead):
    """A recurrent state sees the whole drafted prefix; it begins at 0."""

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__(vocabulary, rank, hidden)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, token: Tensor, hidden_D: Tensor, state: HeadState
    ) -> tuple[Tensor, HeadState]:
        embedded = self.markov_w1(token)
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat([state, embedded, hidden_D], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return self.markov_w2(output.tanh()), state


HEADS: Mapping[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedHead,
    "rnn": RnnHead,
}


class ConfidenceHead(nn.Module):
    """Logit of survival from [h; W1[x]], or from h alone where rank is 0."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(self, *parts: Tensor) -> Tensor:
        logit: Tensor = self.proj(torch.cat(parts, dim=-1))[..., 0]
        return logit


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


class DraftNetwork(nn.Module):
    """What both kinds share: features in, the target's vocabulary out."""

    layers: nn.ModuleList

    def __init__(self, config: Any, facts: DrafterConfig) -> None:
        super().__init__()
        self.facts = facts
        width = config.hidden_size
        self.fc = nn.Linear(len(facts.feature_layers) * width, width, bias=False)
        self.norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if facts.tables:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def new_cache(self, length: int) -> PositionCache:
        """An empty cache for a canvas of `length` positions."""
        return PositionCache(len(self.layers), length, shifted=False)

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """Embeddings, the checkpoint's own or the target's."""
        embedded: Tensor = self.embed_tokens(ids) if self.facts.tables else target.embed(ids)
        return embedded

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Logits of normalised hidden states."""
        logits: Tensor = self.lm_head(hidden) if self.facts.tables else target.head(hidden)
        return logits

    def rotation(self, like: Tensor, first: int, last: int) -> Rotation:
        """Cosines and sines of the positions [first, last)."""
        position_1F = torch.arange(first, last, device=like.device)[None]
        return cast(Rotation, self.rotary_emb(like, position_1F))


class BlockDraftNetwork(DraftNetwork):
    """DFlash, and DSpark where its config gives it heads."""

    def __init__(self, config: Any, facts: DrafterConfig) -> None:
        super().__init__(config, facts)
        width = config.hidden_size
        self.hidden_norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, i) for i in range(config.num_hidden_layers))
        if facts.rank:
            self.markov_head = HEADS[facts.head](config.vocab_size, facts.rank, width)
        if facts.confidence:
            rank = facts.rank if facts.confidence_reads_token else 0
            self.confidence_head = ConfidenceHead(width, rank)

    def block(self, context: Context, slots: int) -> tuple[Tensor, Tensor]:
        """Hidden states (n, D) and logits (n, V) of the slots that predict."""
        masks = context.tokens_L.new_full((slots - 1,), self.facts.mask)
        ids_1B = torch.cat([context.tokens_L[-1:], masks])[None]
        hidden_BD = self.hidden(context, self.embed(ids_1B, context.target))[0]
        hidden_ND = hidden_BD[self.facts.silent :]
        return hidden_ND, self.logits(hidden_ND, context.target)

    def hidden(self, context: Context, slots_1BD: Tensor) -> Tensor:
        """Normalised hidden states of the slots; the new features enter the cache."""
        kv, anchor = context.kv, context.anchor
        assert isinstance(kv, PositionCache)
        assert context.features_1FC is not None
        context_1FD = self.hidden_norm(self.fc(context.features_1FC))
        plan = planned(kv, anchor + slots_1BD.shape[1], stored=anchor)
        rotation = self.rotation(slots_1BD, *plan.feed)
        for layer in self.layers:
            slots_1BD = layer(context_1FD, slots_1BD, rotation, kv)
        keep(kv, plan, context_1FD)
        normalised: Tensor = self.norm(slots_1BD)
        return normalised

    def transition(
        self, token: Tensor, hidden_D: Tensor, state: HeadState
    ) -> tuple[Tensor, HeadState]:
        """What the token before a slot adds to its logits (V,), and the head's next state."""
        return cast(tuple[Tensor, HeadState], self.markov_head(token, hidden_D, state))

    def survival(self, token: Tensor, hidden_D: Tensor) -> Tensor:
        """Logit (0-d) of the probability that the slot's token is accepted."""
        reads_token = self.facts.rank and self.facts.confidence_reads_token
        known = [self.markov_head.markov_w1(token)] if reads_token else []
        return cast(Tensor, self.confidence_head(hidden_D, *known))


class ChainDraftNetwork(DraftNetwork):
    """EAGLE-3: one layer, its own output fed back before the last norm."""

    def __init__(self, config: Any, facts: DrafterConfig) -> None:
        super().__init__(config, facts)
        self.layers = nn.ModuleList([ChainLayer(config)])

    def extend(self, context: Context) -> tuple[Tensor, Tensor]:
        """Feed what was committed since: hidden state (1, 1, D), logits (1, V) of what follows."""
        assert context.features_1FC is not None
        rows = context.features_1FC.shape[1]
        hidden_1FD = self.fc(context.features_1FC)
        return self._feed(context.tokens_L[-rows:], hidden_1FD, context)

    def step(self, token: Tensor, hidden_11D: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Feed one drafted token with the hidden state before it."""
        return self._feed(token.reshape(1), hidden_11D, context)

    def _feed(
        self, tokens_F: Tensor, hidden_1FD: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        kv = context.kv
        assert isinstance(kv, PositionCache)
        stop = kv.length + len(tokens_F)
        plan = planned(kv, stop, stored=stop)
        embedded_1FD = self.embed(tokens_F[None], context.target)
        rotation = self.rotation(embedded_1FD, *plan.feed)
        last_11D = self.layers[0](embedded_1FD, hidden_1FD, rotation, kv)
        keep(kv, plan, hidden_1FD)
        return last_11D, self.logits(self.norm(last_11D)[0], context.target)
