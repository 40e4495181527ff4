"""The networks of DFlash, DSpark and EAGLE-3, with the tensor names of the published checkpoints.

DFlash (arXiv 2602.06036): C = RMSNorm(W_fc [features of the tapped layers]) gives keys and values
to every layer; the anchor and masks behind it are the slots. DSpark (§3) adds heads. EAGLE-3 as in
DeepSpec: feature i beside token i + 1 at rotary position i predicts token i + 2. Rotary positions
are absolute. Training losses and block masks are left out.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from dllm_bench.core.speculative import Context, HeadState, Target
from dllm_bench.models.drafter_facts import NetFacts
from dllm_bench.models.drafter_heads import HEADS, ConfidenceHead
from dllm_bench.models.drafter_layers import BlockLayer, ChainLayer, Rotation, keep, planned
from dllm_bench.models.kv import PositionCache


class DraftNetwork(nn.Module):
    """What both kinds share: features in, the target's vocabulary out."""

    layers: nn.ModuleList

    def __init__(self, config: Any, facts: NetFacts) -> None:
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


class BlockNet(DraftNetwork):
    """DFlash, and DSpark where its config gives it heads."""

    def __init__(self, config: Any, facts: NetFacts) -> None:
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


class ChainNet(DraftNetwork):
    """EAGLE-3: one layer, its own output fed back before the last norm."""

    def __init__(self, config: Any, facts: NetFacts) -> None:
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
