"""What a decoder asks of a model: `Denoiser`, its caches, and the plan of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from dllm_bench.core.request import SpecialTokens
from dllm_bench.core.trace import ForwardKind

Attention = Literal["full", "block_causal"]


@dataclass(frozen=True)
class ForwardPlan:
    """What one forward feeds, sees and keeps; positions are absolute.

    Every branch feeds [feed[0], feed[1]); cached positions outside of that span are visible.
    Branch k does not see fed positions at or beyond visible_K[k] (None: sees all).
    Rows may end one past the fed span where logits are shifted (autoregressive decoding).
    Logits are wanted for positions [rows[0], rows[1]). K/V of [store[0], store[1]) are kept once
    the winner is known; a span of length 0 keeps nothing.
    block_causal: a position sees earlier blocks and its own block of `block` positions, counted
    from `origin`; what lies before `origin` is one block. Blocks of 1 from origin 0 are causal
    attention.
    `forward` is the planned forward's index in its request, `clock` what a cache with a clock of
    its own read. `feature_layers` are layers whose outputs a drafter reads, besides the logits.
    `only_M` asks a model that `picks_rows` for these rows alone, as places in (K, rows) laid flat:
    logits are then (1, M, V).
    """

    kind: ForwardKind
    feed: tuple[int, int]
    rows: tuple[int, int]
    store: tuple[int, int]
    attention: Attention = "full"
    block: int = 0
    origin: int = 0
    visible_K: Tensor | None = None
    forward: int = 0
    clock: int = 0
    feature_layers: tuple[int, ...] = ()
    only_M: Tensor | None = None

    def cached(self, held: int) -> int:
        """Positions read from a cache that holds [0, held): all of them that are not fed."""
        return min(self.feed[0], held) + max(0, held - self.feed[1])


class KVCache(Protocol):
    """Keys and values of one request, addressed by absolute position."""

    @property
    def kept(self) -> ForwardPlan | None:
        """The plan whose K/V were stored last."""

    @property
    def length(self) -> int:
        """Positions [0, length) hold valid keys and values."""

    def keep(self, plan: ForwardPlan, branch: Tensor) -> None:
        """Store the last forward's K/V of `branch` (0-d int64) for the positions `plan.store`."""

    def crop(self, length: int) -> None:
        """Forget the keys and values of positions at and beyond `length`."""

    @property
    def features(self) -> Tensor | None:
        """Outputs of `plan.feature_layers` in the last forward, concatenated: (K, F, layers H)."""


class Denoiser(Protocol):
    """Tokens to logits aligned with positions; logit shift, mask form, position ids are hidden.

    picks_rows: whether `forward` computes only the rows `ForwardPlan.only_M` where a plan names
    some; a model that keeps the default, False, is never given such a plan.
    """

    special: SpecialTokens
    device: torch.device
    vocab_size: int
    picks_rows: bool = False

    def new_cache(self, length: int) -> KVCache:
        """An empty cache for a canvas of `length` positions."""

    def reuse_prefix(self, kv: KVCache, prompt_ids: Sequence[int], grid: int, by: object) -> None:
        """Begin the empty cache with the K/V of the request that was begun so before, if by an
        equal decoder (another one's attention gives others): of what both prompts begin with, in
        whole spans of `grid` positions; at least one position of the prompt is left to be fed.
        """

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Logits (K, rows, V) in the model's dtype: entry [k, i] predicts position rows[0] + i."""

    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[ForwardPlan], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """`forward` for several requests at once, of ragged lengths: the logits of each."""
