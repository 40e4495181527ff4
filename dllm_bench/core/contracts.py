"""Contracts of the parts a decoder is made of, for every piece the four works need.

Shapes: K branches, W window positions, N = ceil(W / B) blocks of B, L canvas positions, V
vocabulary. Pieces are frozen dataclasses without state: what a method must remember lives in
`DecodeState.memo`. `MaskedDecoder` matches once what pieces need and give.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.denoiser import Attention, Denoiser, ForwardPlan, KVCache
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState

Reuse = Literal["none", "exact", "approximate"]


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


class Decoder(Protocol):
    """A request becomes a generation. There are exactly two: masked and speculative."""

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """The request with what decoding it needs beforehand; not part of the measured time."""

    def generate(self, model: Denoiser, request: Request) -> Generation:
        """Decode one request; equal inputs give equal outputs."""


class BatchedDecoder(Decoder, Protocol):
    """A decoder that takes several requests at a time."""

    def generate_stream(
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
    def opened(self, branch: BlockProgress) -> int:
        """How many leading blocks are open in this round; a closed branch begins none."""

    def pushes(self, branch: BlockProgress, n: int) -> bool:
        """Whether the open block `n` commits something in every forward."""
        return True


@dataclass(frozen=True)
class StopFlags:
    """What a stop rule says of branches, bool (K,) each; None where it never says so."""

    closed_K: Tensor | None = None
    finished_K: Tensor | None = None


class Stop(Piece, ABC):
    """When a branch opens no more blocks, and when a request is finished."""

    reads_ahead: ClassVar[bool] = False  # `shorten` wants candidates beyond the window too

    def ended(self, branches: DecodeState) -> StopFlags:
        """Which branches open no further block, and which are finished although masks are left."""
        return StopFlags()

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
    def plan(self, branches: DecodeState, window: Window, kv: KVCache) -> ForwardPlan:
        """The plan of the next forward."""
