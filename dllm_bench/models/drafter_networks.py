"""The networks of DFlash, DFlash 2, DSpark and EAGLE-3, with the published tensor names.

DFlash (arXiv 2602.06036): C = RMSNorm(W_fc [outputs of the feature layers]) gives keys and values
to every layer; the slots are the anchor and the masks after it. DSpark (§3) adds a Markov head and
a confidence head. DFlash 2 (z-lab/dflash@07ebd93, dflash/model.py): convolutions over the slots
around attention and MLP, and a path selector. EAGLE-3 as in DeepSpec: feature i joined with token
i + 1, at rotary position i, predicts token i + 2. Rotary positions are absolute. Layers are made of
transformers' Qwen3 parts, which training runs; in decoding `layers.PlainLayer` computes them. Rows
of context give every layer keys and values first, and the slots then attend to the cache. A network
with a draft vocabulary computes logits of its N tokens; decoding gets logits over the target's
vocabulary, -inf for the others.
Not here: training losses, block masks, Gemma's layers.

Shapes: F fed rows of context, S slots of a block, D slots that predict, H hidden size, V
vocabulary, N draft vocabulary (V where there is none), C = H x (number of feature layers), T taps
of a convolution, X keys, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RotaryEmbedding

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.speculative import Context, HeadState, Target
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant
from dllm_bench.models.attention import AttentionInputs
from dllm_bench.models.drafter_config import DrafterConfig
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.layer_ops import Rotation
from dllm_bench.models.layers import PlainLayer
from dllm_bench.models.plain_module import RMSNorm

HiddenLogits = tuple[Tensor, Tensor]
"""Hidden states of slots, and their logits."""
HeadOutput = tuple[Tensor, HeadState]
"""What a sequential head computes for a slot, and its next state."""


class MarkovHead(nn.Module):
    """DSpark's default head (§3.1): the bias W2 W1[x] on a slot's logits, x the previous token.

    W1 embeds a token in `rank` numbers, W2 turns them into logits (V,). This and the other heads
    accept any leading dimensions, so that training runs them over whole blocks.
    """

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)

    def code(self, token: Tensor, hidden_H: Tensor, state: HeadState) -> HeadOutput:
        """Return, for a slot with hidden state h after `token`, the `rank` numbers that W2 turns
        into the bias, and the head's next state."""
        return self.markov_w1(token), None


class GatedHead(MarkovHead):
    """Also reads the slot: W1[x] is scaled by sigmoid(Wg [h; W1[x]]).

    In DeepSpec's released code, not in the paper.
    """

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__(vocabulary, rank, hidden)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def code(self, token: Tensor, hidden_H: Tensor, state: HeadState) -> HeadOutput:
        embedded = self.markov_w1(token)
        scale = self.gate_proj(torch.cat([hidden_H, embedded], dim=-1)).sigmoid()
        return scale * embedded, None


class RnnHead(MarkovHead):
    """Carries a recurrent state s over the drafted prefix, 0 at its start.

    z = [s; W1[x]; h] gives gate, candidate and output o; the bias is W2 tanh(o), computed from the
    state before the update.
    """

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__(vocabulary, rank, hidden)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def code(self, token: Tensor, hidden_H: Tensor, state: HeadState) -> HeadOutput:
        embedded = self.markov_w1(token)
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat([state, embedded, hidden_H], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return output.tanh(), state


class PathSelector(nn.Module):
    """DFlash 2's bias on a slot's logits after a token a: sum_r A[a]_r (P h)_r B[c]_r.

    A and B embed tokens in `rank` numbers, P projects the slot's hidden state h.
    """

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, token: Tensor, hidden: Tensor) -> Tensor:
        """Return the bias (..., V) of all tokens after `token` (...)."""
        before = nn.functional.embedding(token, self.predecessor_codebook)
        return (before * self.hidden_projection(hidden)) @ self.successor_codebook.mT

    def between(self, tokens_NK: Tensor, hidden_NH: Tensor, ids_NK: Tensor) -> Tensor:
        """Return the biases (N, K, K) of each slot's candidates after each token of its row."""
        before_NKR = nn.functional.embedding(tokens_NK, self.predecessor_codebook)
        codes_NKR = nn.functional.embedding(ids_NK, self.successor_codebook)
        return (before_NKR * self.hidden_projection(hidden_NH)[:, None]) @ codes_NKR.mT


HEADS: Mapping[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RnnHead}


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot's token is accepted, from [h; W1[x]].

    From h alone where `rank` is 0.
    """

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.proj(torch.cat(inputs, dim=-1))[..., 0]


ANGLES = 1024  # positions by whose multiples the tables of rotary embeddings grow


@lru_cache(maxsize=4)
def angles(rotary_emb: Any, length: int, device: torch.device, dtype: torch.dtype) -> Rotation:
    """Return cosines and sines (1, L, E) of the first positions."""
    position_1L = torch.arange(length, device=device)[None]
    return cast(Rotation, rotary_emb(torch.empty(0, dtype=dtype, device=device), position_1L))


class ContextAttention(Qwen3Attention):
    """Attention of the query rows to the context rows and to all query rows: weights and mask.

    Context rows have no queries. In DFlash the context rows are features of the target, the same
    for every layer and not normalised by it; in EAGLE-3 they are committed positions. `width` is
    the size of a row. A sliding `window` hides what is as far away or further, in both directions
    unless `causal` hides all later rows.
    """

    def __init__(
        self, config: Any, index: int, width: int, window: int = 0, causal: bool = False
    ) -> None:
        super().__init__(config, index)
        self.is_causal = False
        self.window, self.causal = window, causal
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self, name).out_features
            setattr(self, name, nn.Linear(width, size, bias=config.attention_bias))

    def mask(self, slots: int, keys: int, like: Tensor) -> Tensor | None:
        """Return what the last `slots` of `keys` positions see, additive (1, 1, S, X); None:
        all."""
        if not (self.window or self.causal):
            return None
        key_X = torch.arange(keys, device=like.device)
        ahead_SX = key_X - key_X[-slots:, None]
        reach = self.window or keys
        hidden_SX = (ahead_SX <= -reach) | (ahead_SX >= (1 if self.causal else reach))
        return like.new_zeros(hidden_SX.shape).masked_fill(hidden_SX, -torch.inf)[None, None]


class SlotConvolution(nn.Module):
    """DFlash 2's causal convolutions over the slots, one before a sublayer and one after it.

    Tap t of slot i reads slot i - t, 0 before the first. Its weight is learned for each channel,
    plus a correction that a group of channels shares and that is computed from the sublayer's
    input.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def around(self, sublayer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return outputs (..., S, H) of the sublayer for the slots `rows` (..., S, H)."""
        delta = self.kernel_projection(rows).unflatten(-1, (2, self.taps, -1, 1))
        kernels = (self.base_kernel.unflatten(-1, (-1, self.group)) + delta).flatten(-2)
        before, after = kernels.flip(-2).unbind(-3)  # the earliest tap first
        return self._mix(sublayer(self._mix(rows, before)), after)

    def _mix(self, rows: Tensor, kernel: Tensor) -> Tensor:
        """Return rows (..., S, H) convolved with the weights (..., S, T, H)."""
        earlier = nn.functional.pad(rows, (0, 0, self.taps - 1, 0)).unfold(-2, self.taps, 1)
        return (kernel * earlier.mT).sum(-2)


class BlockLayer(nn.Module):
    """A layer of DFlash: slots attend to the target's features and to each other."""

    def __init__(self, config: Any, index: int, drafter_config: DrafterConfig) -> None:
        super().__init__()
        window = drafter_config.windows[index] if drafter_config.windows else 0
        causal = bool(drafter_config.causal) and drafter_config.causal[index]
        self.self_attn = ContextAttention(config, index, config.hidden_size, window, causal)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        taps, group = drafter_config.conv_taps, drafter_config.conv_group
        if taps:
            self.attention_conv = SlotConvolution(config.hidden_size, taps, group)
            self.mlp_conv = SlotConvolution(config.hidden_size, taps, group)
        self.convolves = taps > 0

    def forward(
        self, own: PlainLayer, slots_1SH: Tensor, rotation: Rotation, kv: PositionCache
    ) -> Tensor:
        """Return the slots after the layer; they attend to the cached context, then to each other.
        `own` computes its parts."""
        slots = slots_1SH.shape[1]
        mask = self.self_attn.mask(slots, kv.length + slots, slots_1SH)
        inputs = AttentionInputs(mask, rotation, kv)
        if not self.convolves:
            return own(slots_1SH, inputs)
        return self.apply_to(slots_1SH, lambda query: own.attended(query, inputs))

    def apply_to(self, slots: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the slots (..., S, H) after attention and MLP; `attention` computes the former."""
        query, mlp = self.input_layernorm(slots), self.mlp
        if not self.convolves:
            slots = slots + attention(query)
            return slots + mlp(self.post_attention_layernorm(slots))
        slots = slots + self.attention_conv.around(attention, query)
        return slots + self.mlp_conv.around(mlp, self.post_attention_layernorm(slots))


class ChainLayer(nn.Module):
    """The layer of EAGLE-3: each row is a token's embedding and the hidden state before it.

    Both are normalised and concatenated. Only the last row is computed to its end; the rows before
    it only give keys and values.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = ContextAttention(config, 0, 2 * config.hidden_size)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def rows(self, token_1FH: Tensor, hidden_1FH: Tensor) -> Tensor:
        """Return the input of attention, (1, F, 2 H)."""
        return torch.cat([self.input_layernorm(token_1FH), self.hidden_norm(hidden_1FH)], dim=-1)


def begin_draft(kv: PositionCache, stop: int, stored: int) -> ForwardPlan:
    """Return a plan that feeds from the end of the cache to `stop` and keeps positions before
    `stored`."""
    feed = (kv.length, stop)
    plan = ForwardPlan(ForwardKind.DRAFT, feed, (stored, stored + 1), (kv.length, stored))
    kv.begin(plan, stop)
    return plan


def finish_draft(kv: PositionCache, plan: ForwardPlan, rows_1FH: Tensor) -> None:
    """Store the keys and values of `plan.store`; `rows` are the context rows that were fed."""
    kv.hold(plan, rows_1FH)
    kv.keep(plan, constant(0, rows_1FH.device))


class DraftNetwork(nn.Module):
    """Base of both networks: reads the target's features, gives logits over its vocabulary.

    `config` is transformers' Qwen3Config.
    """

    layers: nn.ModuleList
    draft_ids: Tensor
    """The draft vocabulary (N,); empty where all tokens can be drafted."""

    def __init__(self, config: Any, drafter_config: DrafterConfig) -> None:
        super().__init__()
        self.drafter_config = drafter_config
        self.vocabulary: int = config.vocab_size
        self._bound: Callable[[], Target | None] = lambda: None
        width = config.hidden_size
        self.fc = nn.Linear(len(drafter_config.feature_layers) * width, width, bias=False)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if drafter_config.tables:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
            self.lm_head = nn.Linear(width, self.drafted, bias=False)

    @property
    def drafted(self) -> int:
        """N, the number of tokens that can be drafted."""
        return len(self.drafter_config.draft_ids) or self.vocabulary

    def bind(self, target: Target) -> None:
        """Copy the rows of the target's head that are drafted, unless they are from this target."""
        if self.drafter_config.draft_ids and self._bound() is not target:
            self._head_rows_NH = target.head_rows(self.draft_ids)
            self._bound = ref(target)

    def places(self, ids: Tensor) -> Tensor:
        """Return the indices of tokens in the draft vocabulary; N for tokens that are not in it."""
        if not self.drafter_config.draft_ids:
            return ids
        place = torch.searchsorted(self.draft_ids, ids.contiguous())
        return place.where(self.draft_ids[place.clamp(max=self.drafted - 1)] == ids, self.drafted)

    def spread(self, values: Tensor, others: float) -> Tensor:
        """Return values (..., V) of all tokens from those (..., N) of the draft vocabulary."""
        if not self.drafter_config.draft_ids:
            return values
        every = values.new_full((*values.shape[:-1], self.vocabulary), others)
        return every.index_copy_(-1, self.draft_ids, values)

    @cached_property
    def own_layers(self) -> list[PlainLayer]:
        """What computes the layers in decoding, in few launches, from their weights."""
        joined = self.fc.weight.is_cuda
        return [PlainLayer(layer, index, joined) for index, layer in enumerate(self.layers)]

    def new_cache(self, length: int) -> PositionCache:
        """Return an empty cache for a canvas of `length` positions."""
        return PositionCache(len(self.layers), length, shifted=False)

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """Return embeddings of tokens, by the drafter's own table if it has one, else by the
        target's."""
        embedded = self.embed_tokens(ids) if self.drafter_config.tables else target.embed(ids)
        scale = self.drafter_config.input_scale
        return embedded if scale == 1 else embedded * scale

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Return logits of normalised hidden states, by the drafter's own head if it has one."""
        if self.drafter_config.tables:
            logits = self.lm_head(hidden)
        elif self.drafter_config.draft_ids:
            logits = nn.functional.linear(hidden, self._head_rows_NH)
        else:
            logits = target.head(hidden)
        logits = self.spread(logits, -torch.inf)
        scale, softcap = self.drafter_config.output_scale, self.drafter_config.softcap
        if scale != 1:
            logits = logits * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def give_context(self, rows_1FX: Tensor, kv: PositionCache, stop: int) -> None:
        """Store the keys and values of rows before position `stop`, which attend to nothing."""
        plan, rotation = begin_draft(kv, stop, stored=stop), self.rotation(rows_1FX, kv.length)
        for own in self.own_layers:
            own.give_context(rows_1FX, AttentionInputs(None, rotation, kv))
        finish_draft(kv, plan, rows_1FX)

    def rotation(self, like_1FX: Tensor, first: int) -> Rotation:
        """Return cosines and sines of F positions from `first` on, in the dtype and on the device
        of `like`: views of those of many positions."""
        last = first + like_1FX.shape[1]
        length = last + -last % ANGLES
        cos_1LE, sin_1LE = angles(self.rotary_emb, length, like_1FX.device, like_1FX.dtype)
        return cos_1LE[:, first:last], sin_1LE[:, first:last]


class BlockDraftNetwork(DraftNetwork):
    """DFlash, DFlash 2 if its config has a path selector, or DSpark if it has heads."""

    def __init__(self, config: Any, drafter_config: DrafterConfig) -> None:
        super().__init__(config, drafter_config)
        width = config.hidden_size
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        indices = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(BlockLayer(config, i, drafter_config) for i in indices)
        if drafter_config.candidates:
            self.candidate_selector = PathSelector(config.vocab_size, drafter_config.rank, width)
        elif drafter_config.rank:
            self.markov_head = HEADS[drafter_config.head](self.drafted, drafter_config.rank, width)
            if drafter_config.draft_ids:  # the last row is that of all other tokens
                self.markov_head.markov_w1 = nn.Embedding(self.drafted + 1, drafter_config.rank)
        if drafter_config.confidence:
            rank = drafter_config.rank if drafter_config.confidence_reads_token else 0
            self.confidence_head = ConfidenceHead(width, rank)

    def block(self, context: Context, slots: int, first: int | None = None) -> HiddenLogits:
        """Return hidden states (D, H) and logits (D, V) of the slots that predict, slot `first` and
        those after it if given; stores K/V of the new context."""
        kv, anchor = context.kv, context.anchor
        assert isinstance(kv, PositionCache)
        assert context.features_1FC is not None
        self.give_context(self.hidden_norm(self.fc(context.features_1FC)), kv, anchor)
        masks = context.tokens_L.new_full((slots - 1,), self.drafter_config.mask)
        slots_1SH = self.embed(torch.cat([context.tokens_L[-1:], masks])[None], context.target)
        begin_draft(kv, anchor + slots, stored=anchor)
        rotation = self.rotation(slots_1SH, anchor)
        for layer, own in zip(self.layers, self.own_layers, strict=True):
            slots_1SH = layer(own, slots_1SH, rotation, kv)
        start = self.drafter_config.silent if first is None else first
        hidden_DH = self.norm(slots_1SH)[0, start:]
        return hidden_DH, self.logits(hidden_DH, context.target)

    def transition(
        self, logits_1V: Tensor, token: Tensor, hidden_H: Tensor, state: HeadState
    ) -> HeadState:
        """Add to a slot's logits (1, V), in place, what the token before it contributes; return the
        head's next state."""
        code_R, state = self.markov_head.code(self.places(token), hidden_H, state)
        if self.drafter_config.draft_ids:
            logits_1V.index_add_(1, self.draft_ids, self.markov_head.markov_w2(code_R)[None])
        else:
            logits_1V.addmm_(code_R[None], self.markov_head.markov_w2.weight.mT)
        return state

    def draft_bias(self, token: Tensor, hidden_H: Tensor, state: HeadState) -> HeadOutput:
        """Return what the previous token adds to a slot's logits (N,) of the draft vocabulary, and
        the head's next state."""
        code, state = self.markov_head.code(self.places(token), hidden_H, state)
        return self.markov_head.markov_w2(code), state

    def path_biases(self, tokens_NK: Tensor, hidden_NH: Tensor, ids_NK: Tensor) -> Tensor:
        """Return what the path selector adds to the logits of each slot's candidates (N, K) after
        each token of its row, (N, K, K)."""
        return self.candidate_selector.between(tokens_NK, hidden_NH, ids_NK)

    def survival(self, token: Tensor, hidden: Tensor) -> Tensor:
        """Return the logit (...) of the probability that a slot's token is accepted, of slots with
        hidden states (..., H) after the tokens (...)."""
        reads_token = self.drafter_config.rank and self.drafter_config.confidence_reads_token
        embedded = [self.markov_head.markov_w1(self.places(token))] if reads_token else []
        return cast(Tensor, self.confidence_head(hidden, *embedded))


class ChainDraftNetwork(DraftNetwork):
    """EAGLE-3: one layer, whose output before the last norm is its next input."""

    def __init__(self, config: Any, drafter_config: DrafterConfig) -> None:
        super().__init__(config, drafter_config)
        self.layers = nn.ModuleList([ChainLayer(config)])

    def extend(self, context: Context) -> HiddenLogits:
        """Feed the newly committed tokens; return the next hidden state and logits.

        Shapes: (1, 1, H) and (1, V).
        """
        assert context.features_1FC is not None
        rows = context.features_1FC.shape[1]
        return self._feed(context.tokens_L[-rows:], self.fc(context.features_1FC), context)

    def step(self, token: Tensor, hidden_11H: Tensor, context: Context) -> HiddenLogits:
        """Feed one drafted token with the hidden state before it; returns as `extend`."""
        return self._feed(token.reshape(1), hidden_11H, context)

    def _feed(self, tokens_F: Tensor, hidden_1FH: Tensor, context: Context) -> HiddenLogits:
        kv = context.kv
        assert isinstance(kv, PositionCache)
        (layer,), (own,) = self.layers, self.own_layers
        assert isinstance(layer, ChainLayer)
        rows_1FX = layer.rows(self.embed(tokens_F[None], context.target), hidden_1FH)
        last = kv.length + len(tokens_F) - 1
        if last > kv.length:
            self.give_context(rows_1FX[:, :-1], kv, last)
        plan = begin_draft(kv, last + 1, stored=last + 1)
        inputs = AttentionInputs(None, self.rotation(rows_1FX[:, -1:], last), kv)
        last_11H = own.after(hidden_1FH[:, -1:], rows_1FX[:, -1:], inputs)
        finish_draft(kv, plan, last_11H)
        return last_11H, self.logits(self.norm(last_11H)[0], context.target)


def build_network(settings: dict[str, Any], drafter_config: DrafterConfig) -> DraftNetwork:
    """Return the network with its parameters on the meta device.

    `settings` are the arguments of transformers' Qwen3Config.
    """
    config = Qwen3Config(**{**settings, "attn_implementation": "sdpa"})
    kind = ChainDraftNetwork if drafter_config.chain else BlockDraftNetwork
    with torch.device("meta"):
        network: DraftNetwork = kind(config, drafter_config)
    network.rotary_emb = Qwen3RotaryEmbedding(config)  # computed buffers, on the CPU
    ids_N = torch.tensor(drafter_config.draft_ids, dtype=torch.long)
    network.register_buffer("draft_ids", ids_N, persistent=False)
    return network
