"""Contracts of the parts a decoder is made of, for every piece the four works need.

Shapes: K branches, W window positions, N = ceil(W / B) blocks of B, L canvas positions, V
vocabulary. Pieces are frozen dataclasses without state: what a method must remember lives in
`DecodeState.memo`. `MaskedDecoder` matches once what pieces need and give.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, Progress
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import Kind

Attention = Literal["full", "block_causal"]
Reuse = Literal["none", "exact", "approximate"]


@dataclass(frozen=True)
class Window:
    """The part of the canvas that is being decoded, the same span for all K branches.

    [start, stop) begins with a block, the last block may be cut short; [0, retired) is final in
    every branch; the model sees [0, visible) of the longest branch and [0, visible_K[k]) of branch
    k. Blocks are counted from `origin`, what lies before it is one block. eligible_KW: still masked
    and open for decoding; must_KN: blocks that have to make progress while they have a mask (None:
    all); masks: how many positions are eligible in all branches, where the host knows; rows_M: the
    places in (K, W), laid flat, whose logits a score is given as (1, M, V); None: all.
    """

    start: int
    stop: int
    visible: int
    retired: int
    block: int
    origin: int
    eligible_KW: Tensor
    must_KN: Tensor | None = None
    visible_K: Tensor | None = None
    masks: int | None = None
    rows_M: Tensor | None = None

    def take(self, index: Tensor) -> Window:
        """The window of the branches `index` (int64), in that order."""
        visible_K, must_KN = self.visible_K, self.must_KN
        return replace(
            self,
            eligible_KW=self.eligible_KW.index_select(0, index),
            must_KN=None if must_KN is None else must_KN.index_select(0, index),
            visible_K=None if visible_K is None else visible_K.index_select(0, index),
            masks=None,
        )

    def pick(self, j: Tensor) -> Window:
        """The window of branch `j` alone."""
        return replace(self, visible_K=None).take(j.reshape(1))

    @property
    def width(self) -> int:
        """W."""
        return self.stop - self.start

    def blocks(self, values_KW: Tensor, fill: float = 0.0) -> Tensor:
        """(K, W) -> (K, N, B); places beyond the end of a short last block hold `fill`."""
        short = -self.width % self.block
        if short:
            values_KW = torch.nn.functional.pad(values_KW, (0, short), value=fill)
        return values_KW.reshape(values_KW.shape[0], -1, self.block)

    def flat(self, values_KNB: Tensor) -> Tensor:
        """(K, N, B) -> (K, W), the inverse of `blocks`."""
        values_KX = values_KNB.reshape(values_KNB.shape[0], -1)
        return values_KX[:, : self.width] if values_KX.shape[1] > self.width else values_KX

    def rescued(self, where_KW: Tensor, rescue_KW: Tensor) -> Tensor:
        """(K, W) what of `rescue` lies in blocks that must progress and have nothing in `where`."""
        stalled_KN1 = ~self.blocks(where_KW).any(-1, keepdim=True)
        if self.must_KN is not None:
            stalled_KN1 &= self.must_KN[..., None]
        return self.flat(self.blocks(rescue_KW) & stalled_KN1)

    def of(self, canvas_KL: Tensor) -> Tensor:
        """The window's columns of a canvas-wide tensor."""
        return canvas_KL[:, self.start : self.stop]


@dataclass(frozen=True)
class Scores:
    """What the model proposes at every window position, decoded ones where a piece reads them.

    ids_KW: candidate token; probability_KW: its probability (what thresholds compare);
    confidence_KW: the ranking value, larger is surer (equal to probability, or margin, -entropy …);
    raw_KW: the ranking value before evidence of earlier steps was added, where a score adds some.
    """

    ids_KW: Tensor
    probability_KW: Tensor
    confidence_KW: Tensor
    raw_KW: Tensor | None = None

    def pick(self, j: Tensor) -> Scores:
        """The scores of branch `j` alone."""
        index = j.reshape(1)
        return Scores(
            self.ids_KW.index_select(0, index),
            self.probability_KW.index_select(0, index),
            self.confidence_KW.index_select(0, index),
            None if self.raw_KW is None else self.raw_KW.index_select(0, index),
        )


@dataclass(frozen=True)
class Plan:
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
    its own read. `taps` are layers whose outputs are wanted beside the logits, for a drafter.
    `only_M` asks a model that `picks_rows` for these rows alone, as places in (K, rows) laid flat:
    logits are then (1, M, V).
    """

    kind: Kind
    feed: tuple[int, int]
    rows: tuple[int, int]
    store: tuple[int, int]
    attention: Attention = "full"
    block: int = 0
    origin: int = 0
    visible_K: Tensor | None = None
    forward: int = 0
    clock: int = 0
    taps: tuple[int, ...] = ()
    only_M: Tensor | None = None

    def cached(self, held: int) -> int:
        """Positions read from a cache that holds [0, held): all of them that are not fed."""
        return min(self.feed[0], held) + max(0, held - self.feed[1])


class KVCache(Protocol):
    """Keys and values of one request, addressed by absolute position."""

    @property
    def kept(self) -> Plan | None:
        """The plan whose K/V were stored last."""

    @property
    def length(self) -> int:
        """Positions [0, length) hold valid keys and values."""

    def keep(self, plan: Plan, branch: Tensor) -> None:
        """Store the last forward's K/V of `branch` (0-d int64) for the positions `plan.store`."""

    def crop(self, length: int) -> None:
        """Forget the keys and values of positions at and beyond `length`."""

    @property
    def features(self) -> Tensor | None:
        """Outputs of the layers `plan.taps` of the last forward, side by side: (K, F, taps * D)."""


class Denoiser(Protocol):
    """Tokens to logits aligned with positions; logit shift, mask form, position ids are hidden."""

    special: SpecialTokens
    device: torch.device
    vocab_size: int

    def new_cache(self, length: int) -> KVCache:
        """An empty cache for a canvas of `length` positions."""

    def recall(self, kv: KVCache, prompt_ids: Sequence[int], grid: int, by: Decoder) -> None:
        """Begin the empty cache with the K/V of the request that was begun so before, if by an
        equal decoder (another one's attention gives others): of what both prompts begin with, in
        whole spans of `grid` positions; at least one position of the prompt is left to be fed.
        """

    def forward(self, tokens_KL: Tensor, plan: Plan, kv: KVCache) -> Tensor:
        """Logits (K, rows, V) in the model's dtype: entry [k, i] predicts position rows[0] + i."""

    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[Plan], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """`forward` for several requests at once, of ragged lengths: the logits of each."""


class Decoder(Protocol):
    """A request becomes a generation. There are exactly two: masked and speculative."""

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """The request with what decoding it needs beforehand; not part of the measured time."""

    def generate(self, model: Denoiser, request: Request) -> Generation:
        """Decode one request; equal inputs give equal outputs."""


class ManyDecoder(Decoder, Protocol):
    """A decoder that takes several requests at a time."""

    def generate_many(
        self, model: Denoiser, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode `batch` requests at a time, the next one as one ends; each as it is finished."""


class Piece:
    """What all pieces share: plain-word conditions, checked once when a decoder is put together.

    `needs` holds pairs of a slot of the decoder ("schedule", "score", …) and what the piece in that
    slot has to give; `gives` is what this piece offers. Either may be a property of the instance.
    """

    needs: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    reads_decoded: ClassVar[bool] = False  # scores of decoded positions are wanted as well

    def parts(self) -> Iterator[Piece]:
        """The pieces this one is made of, at any depth."""
        for part in fields(self):  # type: ignore[arg-type]
            value = getattr(self, part.name)
            for piece in value if isinstance(value, tuple) else (value,):
                if isinstance(piece, Piece):
                    yield piece
                    yield from piece.parts()

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """The request with what this piece has to know beforehand."""
        return request


class FilterHead(Protocol):
    """A trained network from the confidences of a block to one logit per position (Learn2PD)."""

    block: int

    def __call__(self, confidence_KNB: Tensor) -> Tensor:
        """Logits (K, N, B), float32; sigmoid is the probability that a candidate is final."""


class Score(Piece, ABC):
    """logits -> candidate ids and confidences for every window position (committed ones too)."""

    gives: ClassVar[frozenset[str]] = frozenset({"raw confidence"})
    row_by_row: ClassVar[bool] = False  # a row's scores follow from its own logits and its place
    costly = False  # rows nobody reads are worth leaving out, however small the vocabulary

    @abstractmethod
    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        """Scores in the precision the piece names (float32 if none); may remember evidence in
        `state.memo`."""


class Select(Piece, ABC):
    """Scores of the winning branch (K = 1) -> positions to commit."""

    never_stalls = False  # every call chooses something while a mask is left: no `on_stall` then

    @abstractmethod
    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """where_KW, bool; positions outside `window.eligible_KW` are ignored."""

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """(where_KW, ids_KW) for blocks that must progress and got nothing: the surest position."""
        confidence_KW = scores.confidence_KW.masked_fill(~window.eligible_KW, -torch.inf)
        confidence_KNB = window.blocks(confidence_KW, -torch.inf)
        best_KN1 = confidence_KNB.argmax(-1, keepdim=True)
        where_KNB = torch.zeros_like(confidence_KNB, dtype=torch.bool).scatter_(2, best_KN1, True)
        return window.flat(where_KNB) & window.eligible_KW, scores.ids_KW


class Explore(Piece, ABC):
    """Which candidate states are evaluated in one forward, and which of them goes on."""

    @abstractmethod
    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        """K branches of a K = 1 state, the unchanged state (base) last; `last` is None at start."""

    def valid(self, branches: DecodeState) -> Tensor | None:
        """How many of the branches before the base are worth a forward, 0-d int64; None: all."""
        return None

    @abstractmethod
    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        """What speaks for each branch, (K,); of one branch whatever the others are."""

    def pick(self, rating_K: Tensor) -> Tensor:
        """0-d int64 index of the branch that goes on, the first of the best rated."""
        return rating_K.argmax()


class Schedule(Piece, ABC):
    """Which blocks of the canvas are open: those that lead, up to a number that never falls."""

    block: int | None
    sees_future = True  # the model sees masks behind the open blocks

    def length(self, prompt_len: int, new: int) -> int:
        """Canvas length of a request for `new` tokens; a sentence where blocks do not fit it."""
        return prompt_len + new

    @abstractmethod
    def grid(self, prompt_len: int, length: int) -> BlockGrid:
        """Where the blocks lie on a canvas of `length` positions."""

    @abstractmethod
    def opened(self, branch: Progress) -> int:
        """How many leading blocks are open in this round; a closed branch begins none."""

    def pushes(self, branch: Progress, n: int) -> bool:
        """Whether the open block `n` commits something in every forward."""
        return True


@dataclass(frozen=True)
class Ended:
    """What a stop rule says of branches, bool (K,) each; None where it never says so."""

    closed_K: Tensor | None = None
    finished_K: Tensor | None = None


class Stop(Piece, ABC):
    """When a branch opens no more blocks, and when a request is finished."""

    reads_ahead: ClassVar[bool] = False  # `shorten` wants candidates beyond the window too

    def ended(self, branches: DecodeState) -> Ended:
        """Which branches open no further block, and which are finished although masks are left."""
        return Ended()

    def shorten(self, state: DecodeState, seen: Scores, window: Window) -> Tensor | None:
        """New canvas length, 0-d int64; None: this rule never cuts. Asked after a commit; `seen`
        (1, A) begins with the window and goes as far as was fed.
        """
        return None


class Cache(Piece, ABC):
    """What a forward feeds and reuses.

    reuse: K/V of a prompt's beginning (few-shot examples) are taken from an earlier request:
    "exact" where they cannot depend on what follows, "approximate" where they saw the rest of that
    request's prompt.
    """

    attention: Attention
    reuse: Reuse = "none"

    def grid(self, block: int) -> int:
        """Reused spans are multiples of this many positions; `block` is the schedule's."""
        return block if self.reuse == "exact" else 1

    @abstractmethod
    def plan(self, branches: DecodeState, window: Window, kv: KVCache) -> Plan:
        """The plan of the next forward."""


Turns = Sequence[Mapping[str, str]]  # chat turns: [{"role": "user", "content": "..."}, ...]
Encode = Callable[[str | Turns], list[int]]


@dataclass(frozen=True)
class SampleScore:
    """Outcome of one sample: `value` in [0, 1]; `verdict` names how ("correct", "timeout", …)."""

    value: float
    verdict: str
    metrics: Mapping[str, float]


class Benchmark(Protocol):
    """What to ask and how to grade; scoring is pure and repeatable from stored text."""

    name: str

    def requests(self, encode: Encode) -> Sequence[Request]:
        """All requests in a fixed order; `encode` turns text or chat turns into prompt ids."""

    def dataset_hash(self) -> str:
        """sha256 of the items, templates and few-shot examples behind the requests."""

    def score(self, texts: Mapping[str, str]) -> Mapping[str, SampleScore]:
        """Grade texts by request id."""
