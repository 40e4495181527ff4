"""The contract of a model: `Denoiser`, its K/V caches, and `ForwardPlan`.

With a plan, a decoder says which positions a forward feeds, attends to and keeps. This contract
hides how the model does that (shifted logits, attention masks, position ids).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dllm_bench.core.request import SpecialTokens
from dllm_bench.core.trace import ForwardKind

Attention = Literal["full", "block_causal"]


@dataclass(frozen=True)
class PositionSets:
    """Sets of positions of a forward that are not spans; each is int64 and ascending.

    Positions that are neither fed nor read do not exist for this forward.
    """

    feed_F: Tensor
    """Positions that are fed."""
    read_C: Tensor
    """Positions that are read from the cache: (C,), or (N, C) if each of N layers reads its own C
    positions."""
    store_S: Tensor
    """Fed positions whose K/V are kept."""
    counts_rest: bool = field(default=False, kw_only=True)
    """Whether masks that no fed position predicts may also be committed, from logits of 0 (as in
    d2Cache's released code)."""


AttentionProbe = Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
"""A function of the queries and keys of every layer. It returns a tensor with the same shape in all
layers, such as the positions that a layer keeps (C,).

It gets query_AFE, the rotated queries of A heads at the F positions that the layer computes;
key_GXE, the keys of G heads at the X that are read or fed, in this order, each E wide; scale and
additive mask (1, 1, F, X) of their products.
"""


class LayerRows(Protocol):
    """A layer and the rows that pass through it, before it computes some of them."""

    index: int

    def span(self, first: int, last: int) -> Tensor:
        """Return rows [first, last), int64 (R,)."""

    def compared(self, first: int, last: int, choose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return rows (R,) of [first, last) that `choose` names by their V, as indices of the span.

        It gets what the cache held as V of these S rows, (S, C) over all heads, and their new V,
        which are kept from now on.
        """


class RowChoice(Protocol):
    """A rule by which every layer chooses the rows it computes, in a forward that feeds [0, X).

    Query, key, attention and MLP are computed for these rows only. For the other rows, K, V and the
    outputs of attention and MLP come from the cache, and the outputs are added to their hidden
    states.
    """

    def rows(self, layer: LayerRows, /) -> Tensor | None:
        """Return the rows that the layer computes, int64 (R,), R known to the host; None: all."""


class RowWork(NamedTuple):
    """Work of a forward, as counted in a trace."""

    rows: float | None
    """Rows that a layer computed, averaged over layers, to 4 digits; None: all fed rows."""
    read_bytes: int
    """Bytes that the layers read from the cache."""


class Execution(NamedTuple):
    """How a forward was executed, for the trace; it does not affect the results."""

    replayed: bool = False
    """Whether a recorded CUDA graph was replayed."""
    recorded: bool = False
    """Whether the graph was recorded first, which takes as long as several forwards."""
    moved: bool = False
    """Whether the cache moved K/V to larger buffers."""


@dataclass(frozen=True, eq=False)
class AddedRows:
    """Rows that every branch feeds in addition to those of the canvas. Canvas rows do not attend to
    them, unless `sees_EX` also has rows for the canvas.

    The object's identity is the cache key of its attention masks, so a piece must pass equal rows
    as the same object.
    """

    tokens_E: Tensor
    """Their token ids, int64."""
    position_E: Tensor
    """Their canvas positions, int64; several rows may have the same."""
    sees_EX: Tensor
    """Which of the F positions of `ForwardPlan.feed`, then of the added rows, they attend to: bool
    (E, F + E), limited to what a canvas row at their position sees; or (F + E, F + E), for all
    rows. In the cache they see what a canvas row sees."""


@dataclass(frozen=True)
class ForwardPlan:
    """Which positions one forward feeds, attends to and keeps. Spans [first, stop) are canvas
    positions.

    With "block_causal" attention a position sees earlier blocks and its own block; blocks of 1
    position from origin 0 are causal attention.
    """

    kind: ForwardKind
    feed: tuple[int, int]  # span every branch feeds; cached positions outside of it are visible
    rows: tuple[int, int]  # R positions that get logits; with shifted logits (AR decoding)
    # they may end one position after `feed`
    store: tuple[int, int]  # span of the winning branch whose K/V are kept; empty: none
    attention: Attention = "full"
    block: int = 0  # block length, for "block_causal"
    origin: int = 0  # position from which blocks are counted; all before it is one block
    visible_K: Tensor | None = None  # branch k sees fed positions below visible_K[k]; None: all
    forward: int = 0  # index of this forward in its request
    clock: int = 0  # round number of a cache that counts its own rounds (`PrefixCache`)
    feature_layers: tuple[int, ...] = ()  # layers whose outputs a drafter reads; -1: embedding
    added: AddedRows | None = None  # fed after `feed`; their logits follow those of `rows`, and
    # with shifted logits (causal attention only) predict the token after each
    alone: int | None = None  # fed positions from here on see only themselves; None: none
    only_M: Tensor | None = None  # indices into flattened (K, R) of the rows to compute, for a
    # model that `picks_rows`: its logits are (1, M, V) then; None: all rows, (K, R, V)
    sets: PositionSets | None = None  # positions in place of the spans `feed` and `store`, for one
    # branch with full attention; rows that no fed position predicts have logits of 0
    scored_M: Tensor | None = None  # with masks left out: those that this forward predicts, as
    # indices into `rows`; no other mask is committed. None: every mask is predicted
    added_KFH: Tensor | None = None  # added to the embeddings of the fed positions; None: nothing
    probe: AttentionProbe | None = None  # makes `KVCache.probed`; only with sets or `recompute`
    recompute: RowChoice | None = None  # for one branch that feeds [0, X), stores it and has full
    # attention, and a model that `chooses_rows`; None: every layer computes all that is fed

    @property
    def fed(self) -> int:
        """Positions that every branch feeds, added rows included."""
        if self.sets is not None:
            return self.sets.feed_F.shape[0]
        added = 0 if self.added is None else self.added.tokens_E.shape[0]
        return self.feed[1] - self.feed[0] + added

    @property
    def stores(self) -> bool:
        """Whether any K/V are stored."""
        return self.store[0] < self.store[1]

    def positions(self, device: torch.device) -> Tensor:
        """Return the canvas position of every row that a branch feeds, int64 (fed,)."""
        if self.sets is not None:
            return self.sets.feed_F
        return fed_positions(self.feed, self.added, device)

    def cached(self, held: int) -> int:
        """Return positions read from a cache that holds [0, held): those that are not fed."""
        if self.sets is not None:
            return self.sets.read_C.shape[-1]
        return min(self.feed[0], held) + max(0, held - self.feed[1])

    def kept(self, held: int) -> int:
        """Return the number of positions that the cache keeps after this forward, if it then holds
        [0, held)."""
        if self.sets is not None:
            return self.sets.read_C.shape[-1] + self.sets.store_S.shape[0]
        return held


def fed_positions(feed: tuple[int, int], added: AddedRows | None, device: torch.device) -> Tensor:
    """Return the positions of the span, then of the added rows, int64."""
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
        """Store the K/V that the last forward computed for `branch` (0-d int64) at `plan.store`.

        Call it before the model's next forward with any cache, which may overwrite these K/V.
        """

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep the K/V of rows of the last forward as those of the positions from `length` on. The
        rows are given as indices among all fed rows; `keep` has already stored the positions before
        `length`.
        """

    @property
    def probed(self) -> Tensor | None:
        """Results of `plan.probe` in each of N layers, from the last forward that had a probe: (N,
        ...)."""

    @property
    def bytes_per_position(self) -> int:
        """Bytes per position over all layers; 0 as long as nothing is stored."""

    @property
    def work(self) -> RowWork | None:
        """Work of the last forward, if its plan had a `RowChoice`."""

    @property
    def execution(self) -> Execution:
        """How the last forward ran."""

    def predicting(self, where_KL: Tensor) -> Tensor:
        """Return the rows that predict the positions `where`, bool (K, L)."""

    def predicted(self, rows_KL: Tensor) -> Tensor:
        """Return the positions that `rows` predict, bool (K, L)."""

    def crop(self, length: int) -> None:
        """Forget the keys and values of positions at and beyond `length`."""

    @property
    def features(self) -> Tensor | None:
        """Outputs of `plan.feature_layers` in the last forward, concatenated, at the X positions
        that were fed: (K, X, layers * H).
        """


class Denoiser(Protocol):
    """A model that maps tokens to logits aligned with positions."""

    special: SpecialTokens
    device: torch.device
    vocab_size: int  # V
    picks_rows: bool = False  # whether `forward` computes only the rows `ForwardPlan.only_M` if
    # a plan names some; models with the default never receive such a plan

    chooses_rows: bool = False  # whether `forward` follows plans with `recompute`

    position_bytes: int = 0  # minimum bytes that a forward holds per position it feeds

    def expect_canvas(self, length: int, branches: int = 1) -> None:
        """Receive the longest canvas of a run and the most branches of a forward; models whose
        shapes do not depend on them do nothing.

        Without this call, memory for longer canvases and other shapes is allocated when they occur.
        """
        return  # an empty body would make it abstract

    def new_cache(self, length: int) -> KVCache:
        """Return an empty cache for a canvas of `length` positions."""

    def reuse_prefix(self, kv: KVCache, prompt_ids: Sequence[int], grid: int, by: object) -> None:
        """Fill an empty cache with K/V of the previous request for the common prefix of both
        prompts.

        This happens only if that request was decoded by a decoder equal to `by`, because another
        decoder's attention computes other K/V. It takes whole spans of `grid` positions and leaves
        at least one position of the prompt to be fed.
        """

    def embed(self, ids: Tensor) -> Tensor:
        """Return rows (..., H) of the embedding table."""

    def mean_embeddings(self, logits_KRV: Tensor) -> Tensor:
        """Return the mean input embedding (K, R, H) of the distribution of each row of logits."""

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Return logits (K, R, V) in the model's dtype; entry [k, i] predicts position rows[0] +
        i."""

    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[ForwardPlan], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """Run `forward` for B requests of different lengths; return the logits of each.

        A model that does not define it runs one request after another.
        """
        return [self.forward(*each) for each in zip(tokens, plans, caches, strict=True)]
