"""What decoders expect of a model: `Denoiser`, its caches of keys and values, and `ForwardPlan`.

A decoder says in a plan which positions a forward feeds, sees and keeps. How the model does that
(shifted logits, attention masks, position ids) is hidden behind this contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dllm_bench.core.request import SpecialTokens
from dllm_bench.core.trace import ForwardKind

Attention = Literal["full", "block_causal"]


@dataclass(frozen=True)
class PositionSets:
    """The positions of a forward that are no spans, each int64 and ascending.

    Positions that are neither fed nor read do not exist for this forward.
    """

    feed_F: Tensor
    """What is fed."""
    read_C: Tensor
    """What is read from the cache: (C,), or (N, C) where each of N layers reads positions of its
    own, as many as the others."""
    store_S: Tensor
    """Fed positions whose K/V are kept."""
    counts_rest: bool = field(default=False, kw_only=True)
    """Whether masks that no fed position predicts may be committed, too, by logits of 0 (d2Cache,
    released)."""


class AttentionProbe(Protocol):
    """A function of the queries and keys of every layer."""

    def __call__(
        self, query_AFE: Tensor, key_GXE: Tensor, scaling: float, mask_11FX: Tensor | None, /
    ) -> Tensor:
        """A tensor of one shape in all layers, such as the positions that a layer keeps (C,).

        Of the rotated queries of A heads at the F fed positions and the keys of G heads at the X
        that are read or fed, in this order, each E wide; scale and additive mask of their products.
        """


class RowChoice(Protocol):
    """A rule by which every layer chooses the rows it computes, in a forward that feeds [0, X).

    Its query, key, attention and MLP are computed for these rows. The others take their K, V and
    the outputs of attention and MLP from the cache, and add them to their own hidden states.
    """

    @property
    def also_R(self) -> Tensor | None:
        """Rows (R,) that every layer computes beside those of `spans`, int64 and ascending; None:
        none."""

    def spans(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Two spans of positions, apart from each other: rows that are computed in any case, and
        rows of which `choose` chooses some. V of both is computed and kept.
        """

    def choose(self, old_SC: Tensor, new_SC: Tensor) -> Tensor:
        """Indices (R,) into the second span, the number known to the host.

        Of what the cache held as its V, C wide over all heads, and the new ones.
        """

    def attended(
        self, query_ARE: Tensor, key_GXE: Tensor, scaling: float, mask_11RX: Tensor | None, /
    ) -> None:
        """See what the rows `also_R` of a layer attend to, before the next layer asks for `spans`;
        arguments as those of `AttentionProbe`.
        """


class RowWork(NamedTuple):
    """What a forward did, as a trace counts it."""

    rows: float | None
    """Rows that a layer computed, mean over layers to 4 digits; None: all that were fed."""
    read_bytes: int
    """What the layers took from the cache."""


class Execution(NamedTuple):
    """How a forward ran, as a trace tells it; nothing of it changes what the forward computes."""

    replayed: bool = False
    """Whether it was a recorded CUDA graph."""
    recorded: bool = False
    """Whether its graph was recorded first, which takes several forwards' time."""
    moved: bool = False
    """Whether the cache moved K/V to longer buffers."""


@dataclass(frozen=True, eq=False)
class AddedRows:
    """Rows that every branch feeds beside those of the canvas; no row of the canvas sees them,
    unless `sees_EX` has the rows of the canvas, too.

    An object is the key of the masks made for it: a piece gives equal rows as the same object.
    """

    tokens_E: Tensor
    """What they hold, int64."""
    position_E: Tensor
    """Their canvas positions, int64; several rows may have the same."""
    sees_EX: Tensor
    """Which of the F positions of `ForwardPlan.feed` and of each other they see, bool (E, F + E):
    as far as a row of the canvas at their position does; or (F + E, F + E): what all rows see. Of
    the cache they see what a row of the canvas sees."""


@dataclass(frozen=True)
class ForwardPlan:
    """What one forward feeds, sees and keeps. Spans [first, stop) are canvas positions.

    With "block_causal" attention a position sees earlier blocks and its own block; blocks of 1
    position from origin 0 are causal attention.
    """

    kind: ForwardKind
    feed: tuple[int, int]  # span every branch feeds; cached positions outside of it are visible
    rows: tuple[int, int]  # R positions whose logits are wanted; with shifted logits (AR decoding)
    # they may end one position after `feed`
    store: tuple[int, int]  # span whose K/V are kept of the winning branch; empty: none
    attention: Attention = "full"
    block: int = 0  # positions of a block, for "block_causal"
    origin: int = 0  # position from which blocks are counted; what lies before it is one block
    visible_K: Tensor | None = None  # branch k sees fed positions below visible_K[k]; None: all
    forward: int = 0  # index of this forward in its request
    clock: int = 0  # round of a cache that counts rounds itself (`PrefixCache`)
    feature_layers: tuple[int, ...] = ()  # layers whose outputs a drafter reads; -1: embedding
    added: AddedRows | None = None  # fed after `feed`; their logits follow those of `rows`, and
    # with shifted logits, under causal attention only, are of the token after each
    alone: int | None = None  # fed positions from here on are seen by themselves only; None: none
    only_M: Tensor | None = None  # indices into flattened (K, R) of the rows to compute, for a
    # model that `picks_rows`: its logits are (1, M, V) then; None: all rows, (K, R, V)
    sets: PositionSets | None = None  # positions in place of the spans `feed` and `store`, for one
    # branch with full attention; rows that no fed position predicts have logits of 0
    scored_M: Tensor | None = None  # where masks are left out: those that this forward predicts, as
    # indices into `rows`; no other mask is committed. None: every mask is predicted
    added_KFH: Tensor | None = None  # added to the embeddings of the fed positions; None: nothing
    probe: AttentionProbe | None = None  # makes `KVCache.probed`; only with sets
    recompute: RowChoice | None = None  # for one branch that feeds [0, X), stores it and has full
    # attention, and a model that `chooses_rows`; None: every layer computes all that is fed

    @property
    def fed(self) -> int:
        """Positions that every branch feeds, added rows included."""
        if self.sets is not None:
            return self.sets.feed_F.shape[0]
        added = 0 if self.added is None else self.added.tokens_E.shape[0]
        return self.feed[1] - self.feed[0] + added

    def limited_to(self, end_K: Tensor) -> ForwardPlan:
        """The plan whose branch k sees no fed position at or beyond `end_K[k]` either."""
        known_K = self.visible_K
        return replace(self, visible_K=end_K if known_K is None else torch.minimum(known_K, end_K))

    @property
    def stores(self) -> bool:
        """Whether any K/V are stored."""
        return self.store[0] < self.store[1]

    def positions(self, device: torch.device) -> Tensor:
        """Canvas position of every row that a branch feeds, int64 (fed,)."""
        if self.sets is not None:
            return self.sets.feed_F
        return fed_positions(self.feed, self.added, device)

    def cached(self, held: int) -> int:
        """Positions read from a cache that holds [0, held): those that are not fed."""
        if self.sets is not None:
            return self.sets.read_C.shape[-1]
        return min(self.feed[0], held) + max(0, held - self.feed[1])

    def kept(self, held: int) -> int:
        """Positions that the cache keeps after this forward; `held`: it holds [0, held) then."""
        if self.sets is not None:
            return self.sets.read_C.shape[-1] + self.sets.store_S.shape[0]
        return held


def fed_positions(feed: tuple[int, int], added: AddedRows | None, device: torch.device) -> Tensor:
    """The positions of the span and of the rows added to it, one after the other, int64."""
    feed_X = torch.arange(*feed, device=device)
    return feed_X if added is None else torch.cat([feed_X, added.position_E])


class KVCache(Protocol):
    """Keys and values of one request, addressed by canvas position."""

    @property
    def kept(self) -> ForwardPlan | None:
        """The plan of the last forward that stored K/V, or that was a prefill or a renewal."""

    @property
    def length(self) -> int:
        """Positions [0, length) have valid keys and values."""

    def keep(self, plan: ForwardPlan, branch: Tensor) -> None:
        """Store the K/V that the last forward computed for `branch` (0-d int64) at `plan.store`."""

    def keep_rows(self, rows_S: Tensor) -> None:
        """Keep the K/V of rows of the last forward, by their places among all that were fed, as
        those of the positions from `length` on; `keep` has stored what lies before them.
        """

    @property
    def probed(self) -> Tensor | None:
        """What `plan.probe` gave in each of N layers of the last forward that had one, (N, ...)."""

    @property
    def bytes_per_position(self) -> int:
        """Bytes that all layers keep of a position; 0 while nothing was stored."""

    @property
    def work(self) -> RowWork | None:
        """What the last forward did, if its plan had a `RowChoice`."""

    @property
    def execution(self) -> Execution:
        """How the last forward ran."""

    def predicting(self, where_KL: Tensor) -> Tensor:
        """The rows that predict the positions `where`, bool (K, L)."""

    def predicted(self, rows_KL: Tensor) -> Tensor:
        """The positions that `rows` predict, bool (K, L)."""

    def crop(self, length: int) -> None:
        """Forget the keys and values of positions at and beyond `length`."""

    @property
    def features(self) -> Tensor | None:
        """Outputs of `plan.feature_layers` in the last forward, concatenated, at the X positions
        that were fed: (K, X, layers * H).
        """


class Denoiser(Protocol):
    """A model: tokens to logits that are aligned with positions."""

    special: SpecialTokens
    device: torch.device
    vocab_size: int  # V
    picks_rows: bool = False  # whether `forward` computes only the rows `ForwardPlan.only_M` where
    # a plan names some; a model that keeps the default is never given such a plan

    chooses_rows: bool = False  # whether `forward` follows plans with `recompute`

    position_bytes: int = 0  # bytes that a forward holds at least for every position it feeds

    def expect_canvas(self, length: int, branches: int = 1) -> None:
        """Learn the longest canvas of a run and the most branches of a forward; a model whose
        shapes do not depend on them does nothing.

        Without it, longer canvases and other shapes are made room for as they come.
        """
        return  # an empty body would make it abstract

    def new_cache(self, length: int) -> KVCache:
        """An empty cache for a canvas of `length` positions."""

    def reuse_prefix(self, kv: KVCache, prompt_ids: Sequence[int], grid: int, by: object) -> None:
        """Fill an empty cache with K/V of the previous request, as far as both prompts begin alike.

        Only if that request was decoded by a decoder equal to `by`, since another one's attention
        computes other K/V. Takes whole spans of `grid` positions, and leaves at least one position
        of the prompt to be fed.
        """

    def embed(self, ids: Tensor) -> Tensor:
        """Rows (..., H) of the embedding table."""

    def mean_embeddings(self, logits_KRV: Tensor) -> Tensor:
        """The mean input embedding (K, R, H) of the distribution of each row of logits."""

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Logits (K, R, V) in the model's dtype; entry [k, i] predicts position rows[0] + i."""

    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[ForwardPlan], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """`forward` of B requests of different lengths at once: the logits of each."""
