"""Forward passes and losses that train drafters: blocks of DFlash (2) and DSpark, EAGLE-3's chain.

Both learn from the outputs of one forward of the target over whole texts (`TargetRows`).

Blocks: every anchor of a text starts a block, the anchor's token followed by masks, at the anchor's
own positions. All blocks of a text are computed in one attention, after the target's features; a
slot attends to the features before its anchor and to the slots of its own block (`visibility`),
densely on the CPU and with FlexAttention on CUDA. Losses of DSpark §3.3, Eq. 9-12.

Chain, as in DeepSpec: step 0 pairs the target's feature of position i with token i + 1 and predicts
token i + 2. Each further step moves tokens, rotary positions and labels on by one and reads the
hidden state of the step before. A column attends causally to the columns of step 0, and of later
steps only to itself. Gradients run through all steps.

With a draft vocabulary, logits are those of its tokens and labels are indices in it. The target's
probabilities then sum to less than 1.

Shapes: B texts, L positions of a text, N blocks (anchors) of a text, D slots of a block (draft
tokens), H hidden size, C width of the features, V vocabulary, Q query positions (N times D), T
attended positions (L plus Q), U used columns of a text, M supervised columns of all texts. S slots
of a block: in z-lab's format the first slot predicts nothing and the others their own position, so
D = S - 1; else D = S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from dllm_bench.core.declared import Amount, CheckedFields
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.drafter_networks import (
    BlockDraftNetwork,
    BlockLayer,
    ChainDraftNetwork,
    ChainLayer,
    ContextAttention,
)
from dllm_bench.models.layer_ops import Rotation
from dllm_bench.models.transformer import EMBEDDING_TAP, FULL_ATTENTION, TransformerDenoiser

Visibility = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # row, head, query, key -> bool
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value -> mixed values

EPSILON = 1e-6  # added to denominators
UNROLL_DECAY = 0.8  # weight of each EAGLE-3 step relative to the step before


# --- the target ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetRows:
    """A batch of texts and what the target computed for them in one forward."""

    ids_BL: Tensor
    answer_BL: Tensor
    """Positions of the answer: only these are anchors or predicted."""
    features_BLC: Tensor
    """Outputs of the feature layers, concatenated, float32."""
    last_BLH: Tensor
    """Normalised last hidden states, float32."""
    whole_BL: Tensor | None = None
    """Log of the sum of exp of the target's logits over its vocabulary, where the next token is in
    the answer, else infinite; None without a draft vocabulary."""


@torch.no_grad()
def target_rows(
    target: TransformerDenoiser, ids_BL: Tensor, answer_BL: Tensor, feature_layers: Sequence[int]
) -> TargetRows:
    """Run the target once over whole texts and keep the outputs of `feature_layers`."""
    model, length = target.module.model, ids_BL.shape[1]
    if set(getattr(model.config, "layer_types", None) or [FULL_ATTENTION]) != {FULL_ATTENTION}:
        raise DllmBenchError(
            "The target has layers that see part of the text only, which training of drafters "
            "does not support; choose a target whose layers see the whole text."
        )
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=ids_BL.device).tril()
    hidden_BLH = model.embed_tokens(ids_BL)
    rotation = model.rotary_emb(hidden_BLH, torch.arange(length, device=ids_BL.device)[None])
    outputs = {EMBEDDING_TAP: hidden_BLH}
    for index, layer in enumerate(model.layers):
        hidden_BLH = layer(
            hidden_BLH, attention_mask=causal_LL[None, None], position_embeddings=rotation
        )
        outputs[index] = hidden_BLH
    features_BLC = torch.cat([outputs[tap] for tap in feature_layers], dim=-1)
    return TargetRows(ids_BL, answer_BL, features_BLC.float(), model.norm(hidden_BLH).float())


def whole_vocabulary(target: TransformerDenoiser, rows: TargetRows) -> TargetRows:
    """Return the rows with `whole_BL`."""
    wanted_BL = F.pad(rows.answer_BL[:, 1:], (0, 1))
    whole_BL = rows.last_BLH.new_full(rows.ids_BL.shape, math.inf)
    logits_MV = target.head(rows.last_BLH[wanted_BL].to(target.dtype)).float()
    whole_BL[wanted_BL] = logits_MV.logsumexp(-1)
    return replace(rows, whole_BL=whole_BL)


# --- blocks: what is predicted -------------------------------------------------------------------


@dataclass(frozen=True)
class DraftBlocks:
    """The blocks of every text and the labels of their slots."""

    anchors_BN: Tensor
    """Position of the anchor in its text; 0 in padding."""
    labels_BND: Tensor
    """Position in the text of the token that a slot predicts."""
    supervised_BND: Tensor
    """Slots whose label and all labels before it lie in the answer."""


@dataclass(frozen=True)
class DraftOutputs:
    """What a drafter predicts in its slots."""

    logits_BNDV: Tensor
    survival_BND: Tensor | None
    """Logit that the slot is accepted; None for a drafter without a confidence head."""


def draw_anchors(answer_BL: Tensor, most: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw (anchors_BN, kept_BN): up to `most` distinct anchors of each text, sorted, padded with
    0.

    Drawn uniformly from the positions whose own token and next one belong to the answer.
    """
    possible_BL = answer_BL[:, :-1] & answer_BL[:, 1:]
    chance_BL = torch.rand(possible_BL.shape, generator=rng).to(possible_BL.device)
    chance_BL = chance_BL.masked_fill(~possible_BL, 2.0)
    drawn_BN, none = chance_BL.argsort(dim=1)[:, :most], answer_BL.shape[1]
    anchors_BN = drawn_BN.masked_fill(~possible_BL.gather(1, drawn_BN), none).sort(dim=1).values
    return anchors_BN.masked_fill(anchors_BN == none, 0), anchors_BN < none


def blocks_at(anchors_BN: Tensor, kept_BN: Tensor, answer_BL: Tensor, slots: int) -> DraftBlocks:
    """Return blocks with their labels: of `slots` that predict, d predicts the token at anchor + 1
    + d."""
    length = answer_BL.shape[1]
    labels_BND = anchors_BN[..., None] + torch.arange(1, slots + 1, device=anchors_BN.device)
    inside_BND, labels_BND = labels_BND < length, labels_BND.clamp(max=length - 1)
    wanted_BND = inside_BND & at(answer_BL, labels_BND) & kept_BN[..., None]
    return DraftBlocks(anchors_BN, labels_BND, wanted_BND.long().cumprod(-1).bool())


def at(values_BL: Tensor, index_BND: Tensor) -> Tensor:
    """Return the values (B, N, D, …) of each text at the given positions."""
    row_B11 = torch.arange(len(values_BL), device=values_BL.device)[:, None, None]
    return values_BL[row_B11, index_BND]


# --- blocks: the forward pass --------------------------------------------------------------------


def visibility(anchors_BN: Tensor, length: int, slots: int) -> Visibility:
    """Return which keys a query slot attends to; keys are `length` features, then all slots."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // slots
        feature = (key < length) & (key < anchors_BN[row, block])
        return feature | ((key >= length) & ((key - length) // slots == block))

    return visible


def dense(visible: Visibility, rows: int, queries: int, keys: int, device: torch.device) -> Attend:
    """Compute attention with a mask (B, 1, Q, T) held in memory."""
    row_B111 = torch.arange(rows, device=device)[:, None, None, None]
    query_Q1 = torch.arange(queries, device=device)[:, None]
    key_T = torch.arange(keys, device=device)
    mask_B1QT = visible(row_B111, torch.zeros_like(row_B111), query_Q1, key_T)
    return lambda query, key, value: F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask_B1QT, enable_gqa=True
    )


def flex(visible: Visibility, rows: int, queries: int, keys: int, device: torch.device) -> Attend:
    """Compute the same with FlexAttention, which skips tiles in which nothing is visible."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(visible, rows, None, queries, keys, device=device)
    kernel = _flex_kernel(device.type)
    return lambda query, key, value: kernel(query, key, value, block_mask=mask, enable_gqa=True)


@lru_cache
def _flex_kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention


def block_forward(
    network: BlockDraftNetwork, rows: TargetRows, blocks: DraftBlocks, kernel: Callable = dense
) -> DraftOutputs:
    """Return outputs of all slots; each slot is given the text's own tokens before it.

    `kernel` computes the attention: `dense` or `flex`.
    """
    silent = network.drafter_config.silent
    hidden_BNDH = hidden_states(network, rows, blocks, kernel)[:, :, silent:]
    logits_BNDV = network.lm_head(hidden_BNDH)
    before_BND = at(rows.ids_BL, blocks.labels_BND - 1)
    if network.drafter_config.candidates:
        logits_BNDV = logits_BNDV + network.candidate_selector(before_BND, hidden_BNDH)
    elif network.drafter_config.rank:
        logits_BNDV = logits_BNDV + _transitions(network, before_BND, hidden_BNDH)
    survives = network.drafter_config.confidence
    survival_BND = network.survival(before_BND, hidden_BNDH) if survives else None
    return DraftOutputs(logits_BNDV, survival_BND)


def _transitions(network: BlockDraftNetwork, before_BND: Tensor, hidden_BNDH: Tensor) -> Tensor:
    """Return logits (B, N, D, V) that DSpark's transition head adds, slot after slot."""
    state, added = None, []
    for slot in range(before_BND.shape[-1]):
        bias_BNV, state = network.draft_bias(before_BND[..., slot], hidden_BNDH[:, :, slot], state)
        added.append(bias_BNV)
    return torch.stack(added, dim=2)


def hidden_states(
    network: BlockDraftNetwork, rows: TargetRows, blocks: DraftBlocks, kernel: Callable
) -> Tensor:
    """Return normalised hidden states (B, N, S, H) of all slots."""
    (count, length), slots = rows.ids_BL.shape, network.drafter_config.slots
    anchors_BN, device = blocks.anchors_BN, rows.ids_BL.device
    context_BLH = network.hidden_norm(network.fc(rows.features_BLC))
    ids_BNS = torch.full((*anchors_BN.shape, slots), network.drafter_config.mask, device=device)
    ids_BNS[..., 0] = rows.ids_BL.gather(1, anchors_BN)
    hidden_BNSH = network.embed_tokens(ids_BNS)
    position_BQ = (anchors_BN[..., None] + torch.arange(slots, device=device)).flatten(1)
    position_BL = torch.arange(length, device=device).expand(count, -1)
    position_BT = torch.cat([position_BL, position_BQ], dim=1)
    rotation = network.rotary_emb(hidden_BNSH, position_BT)
    queries, keys = position_BQ.shape[1], position_BT.shape[1]
    attend = kernel(visibility(anchors_BN, length, slots), count, queries, keys, device)
    for layer in network.layers:
        hidden_BNSH = _block_layer(layer, context_BLH, hidden_BNSH, rotation, attend)
    return network.norm(hidden_BNSH)


def _block_layer(
    layer: Any, context_BLH: Tensor, hidden_BNSH: Tensor, rotation: Rotation, attend: Attend
) -> Tensor:
    """Return hidden states (B, N, S, H) of all slots after one layer."""
    assert isinstance(layer, BlockLayer)
    attention = layer.self_attn

    def attended(query_BNSH: Tensor) -> Tensor:
        query_BQH = query_BNSH.flatten(1, 2)
        last = tuple(part[:, -query_BQH.shape[1] :] for part in rotation)
        key, value = _keys_values(attention, torch.cat([context_BLH, query_BQH], dim=1), rotation)
        mixed = attend(_queries(attention, query_BQH, (last[0], last[1])), key, value)
        return attention.o_proj(mixed.transpose(1, 2).flatten(2)).view_as(query_BNSH)

    return layer.apply_to(hidden_BNSH, attended)


def _queries(attention: ContextAttention, states: Tensor, rotation: Rotation) -> Tensor:
    """Return rotated queries (B, heads, positions, head size)."""
    query = attention.q_norm(_heads(attention, attention.q_proj(states))).transpose(1, 2)
    return apply_rotary_pos_emb(query, query, *rotation)[0]


def _keys_values(
    attention: ContextAttention, states: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """Return rotated keys, and values, both (B, key/value heads, positions, head size)."""
    key = attention.k_norm(_heads(attention, attention.k_proj(states))).transpose(1, 2)
    value = _heads(attention, attention.v_proj(states)).transpose(1, 2)
    return apply_rotary_pos_emb(key, key, *rotation)[0], value


def _heads(attention: ContextAttention, states: Tensor) -> Tensor:
    return states.unflatten(-1, (-1, attention.head_dim))


# --- blocks: the loss ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LossShares(CheckedFields):
    """Weights of the loss terms: L = ce * CE + l1 * |p_draft - p_target|_1 + confidence * BCE.

    Each term is a weighted mean over supervised slots. DFlash is (1, 0, 0).
    """

    ce: Amount = 0.1
    """Of the cross-entropy with the tokens of the text."""
    l1: Amount = 0.9
    """Of the full L1 norm between both distributions at temperature 1 (twice their total
    variation)."""
    confidence: Amount = 1.0
    """Of the confidence head's binary cross-entropy with the label 1 - l1 / 2 (no gradient)."""
    decay: float | None = 4.0
    """Slot d has the weight exp(-d / decay); None: all slots weigh the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ce + self.l1 <= 0:
            raise DllmBenchError(
                f"The loss weighs CE with {self.ce:g} and L1 with {self.l1:g}; give two shares, "
                "one of them above 0."
            )


@dataclass(frozen=True)
class DraftLosses:
    """Loss terms of one batch as 0-d tensors, and the acceptance that they imply."""

    terms: dict[str, Tensor]
    """Name in `LossShares` -> weighted sum over the slots; without the L1 norm where it was not
    asked for."""
    weight: Tensor
    """Sum of the weights."""
    length: Tensor | None
    """Expected tokens of a round, the target's own token included; None without the L1 norm."""

    def total(self, shares: LossShares) -> Tensor:
        """Return the loss that is minimised."""
        total: Any = sum(getattr(shares, name) * term for name, term in self.terms.items())
        return total / (self.weight + EPSILON)

    def numbers(self, shares: LossShares) -> dict[str, float]:
        """Return a point of the training curve."""
        means = {name: term / (self.weight + EPSILON) for name, term in self.terms.items()}
        length = {} if self.length is None else {"length": self.length}
        numbers = {"loss": self.total(shares), **means, **length}
        return {name: number.item() for name, number in numbers.items()}


def slot_weights(supervised_BND: Tensor, decay: float | None) -> Tensor:
    """Return exp(-d / decay) where slot d is supervised (1 without decay), 0 elsewhere."""
    slot_D = torch.arange(supervised_BND.shape[-1], device=supervised_BND.device)
    return supervised_BND * torch.exp(-slot_D / (decay or math.inf))


def target_law(logits: Tensor, whole: Tensor | None) -> Tensor:
    """Return the target's probabilities (..., V) from its logits.

    whole: the log of the sum of exp over the whole vocabulary (...), where the logits are those of
    a draft vocabulary.
    """
    return logits.softmax(-1) if whole is None else (logits - whole[..., None]).exp()


def block_losses(
    drafted: DraftOutputs,
    target_BNDV: Tensor | None,
    ids_BL: Tensor,
    blocks: DraftBlocks,
    decay: float | None,
    whole_BND: Tensor | None = None,
) -> DraftLosses:
    """Return all terms of one batch; without L1 and what it gives where `target_BNDV` is None.

    target_BNDV, whole_BND: the target's logits for the labels, see `target_law`. ids_BL: places of
    the tokens in the draft vocabulary; those outside of it add no cross-entropy.
    """
    weight_BND = slot_weights(blocks.supervised_BND, decay)
    labels_BND = at(ids_BL, blocks.labels_BND)
    draft_BNDV = drafted.logits_BNDV.float()
    ce_BND = F.cross_entropy(
        draft_BNDV.movedim(-1, 1), labels_BND, reduction="none", ignore_index=draft_BNDV.shape[-1]
    )
    ce, weight = (ce_BND * weight_BND).sum(), weight_BND.sum()
    confidence = torch.zeros((), device=weight_BND.device)
    if target_BNDV is None:
        return DraftLosses({"ce": ce, "confidence": confidence}, weight, None)
    law_BNDV = target_law(target_BNDV.float(), whole_BND)
    l1_BND = (draft_BNDV.softmax(-1) - law_BNDV).abs().sum(-1)
    if whole_BND is not None:
        l1_BND = l1_BND + (1 - law_BNDV.sum(-1)).clamp(min=0)
    survives_BND, among_BND = (1 - l1_BND.detach() / 2).clamp(0, 1), blocks.supervised_BND
    if drafted.survival_BND is not None:
        bce_BND = F.binary_cross_entropy_with_logits(
            drafted.survival_BND.float(), survives_BND, reduction="none"
        )
        confidence = (bce_BND * weight_BND).sum()
    terms = {"ce": ce, "l1": (l1_BND * weight_BND).sum(), "confidence": confidence}
    accepted_BN = (survives_BND * among_BND).cumprod(-1).sum(-1)
    length = 1 + accepted_BN.sum() / among_BND[..., 0].sum().clamp(min=1)  # of blocks with a label
    return DraftLosses(terms, weight, length)


# --- EAGLE-3's chain -----------------------------------------------------------------------------


def shifted(values_BL: Tensor, by: int) -> Tensor:
    """Return the columns moved left by `by`, filled with zeros (False) on the right."""
    return torch.cat([values_BL[:, by:], torch.zeros_like(values_BL[:, :by])], dim=1)


def supervised_columns(answer_BL: Tensor) -> Tensor:
    """Return columns of step 0 whose next two tokens, anchor and label, are in the answer."""
    return shifted(answer_BL, 1) & shifted(answer_BL, 2)


def chain_forward(
    network: ChainDraftNetwork, rows: TargetRows, supervised_BL: Tensor
) -> list[Tensor]:
    """Return logits of every step in its supervised columns, (M, V), text after text.

    Those of step s are `supervised_BL` moved left by s. All columns give step 0 keys and values;
    the rest is computed for columns that a step supervises.
    """
    layer, slots = network.layers[0], network.drafter_config.slots
    assert isinstance(layer, ChainLayer)
    counts = [shifted(supervised_BL, step) for step in range(slots)]
    used_BL = torch.stack(counts).any(0)
    most = int(used_BL.sum(1).max())
    column_BU = used_BL.int().sort(dim=1, descending=True, stable=True).indices[:, :most]
    text_B1 = torch.arange(len(column_BU), device=column_BU.device)[:, None]
    every_L = torch.arange(used_BL.shape[1], device=column_BU.device)
    own_UU = torch.eye(most, dtype=torch.bool, device=column_BU.device)

    def pairs(hidden_BXH: Tensor, position_BX: Tensor, step: int) -> tuple[Tensor, Rotation]:
        tokens_BX = shifted(rows.ids_BL, step + 1)[text_B1, position_BX]
        embedded_BXH = network.embed_tokens(tokens_BX)
        rotation = network.rotary_emb(embedded_BXH, position_BX + step)
        return layer.rows(embedded_BXH, hidden_BXH), rotation

    features_BLH = network.fc(rows.features_BLC)
    pair_BL2H, rotation = pairs(features_BLH, every_L.expand_as(used_BL), 0)
    key, value = _keys_values(layer.self_attn, pair_BL2H, rotation)
    mask_BUT, hidden_BUH = every_L <= column_BU[..., None], features_BLH[text_B1, column_BU]
    logits: list[Tensor] = []
    for step, count_BL in enumerate(counts):
        pair_BU2H, rotation = pairs(hidden_BUH, column_BU, step)
        if step:
            more = _keys_values(layer.self_attn, pair_BU2H, rotation)
            key, value = (torch.cat(both, 2) for both in zip((key, value), more, strict=True))
            mask_BUT = torch.cat([mask_BUT, own_UU.expand(len(column_BU), -1, -1)], dim=2)
        query = _queries(layer.self_attn, pair_BU2H, rotation)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask_BUT[:, None], enable_gqa=True
        )
        hidden_BUH = hidden_BUH + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden_BUH = hidden_BUH + layer.mlp(layer.post_attention_layernorm(hidden_BUH))
        here_MH = hidden_BUH[count_BL[text_B1, column_BU]]
        logits.append(network.lm_head(network.norm(here_MH)))
    return logits


def chain_losses(
    logits: Sequence[Tensor],
    target_MV: Tensor,
    supervised_BL: Tensor,
    whole_M: Tensor | None = None,
) -> list[Tensor]:
    """Return the soft cross-entropy of every step, each divided by B * L.

    `target_MV` and `whole_M` (see `target_law`) are the target's, after the token that follows a
    supervised column of step 0. The same tokens are the labels of all steps, as far as a column is
    that far before them.
    """
    law_MV, column_M = target_law(target_MV.float(), whole_M), supervised_BL.nonzero()[:, 1]
    losses = []
    for step, draft_MV in enumerate(logits):
        ce_M = -(law_MV[column_M >= step] * draft_MV.float().log_softmax(-1)).sum(-1)
        losses.append(ce_M.sum() / supervised_BL.numel())
    return losses


def decayed_sum(steps: Sequence[Tensor]) -> Tensor:
    """Return the sum of the steps' losses, each weighted 0.8 times the one before."""
    return torch.stack([UNROLL_DECAY**step * loss for step, loss in enumerate(steps)]).sum()
