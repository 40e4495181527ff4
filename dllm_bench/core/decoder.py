"""What a decoder is: pieces that fit together.

A piece is a frozen dataclass without state; what a method has to remember lives in
`DecodeState.memo`. Each piece says which conditions it needs of the others and which it gives, and
a decoder compares them once, when it is made. The contracts of the single pieces are in
`contracts` (masked decoding) and `speculative`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol

from dllm_bench.core.decoder_summary import DecoderSummary
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request


class Condition(StrEnum):
    """What one piece can rely on in another. The value is the wording in error messages."""

    ONE_OPEN_BLOCK = "one open block at a time"
    BLOCKS_IN_ORDER = "blocks that finish in order"
    EQUAL_BLOCKS = "blocks of equal length"
    SUB_BLOCKS = "sub-blocks"  # blocks that are decoded in parts, the first position first
    ABSOLUTE_BLOCKS = "absolute blocks"  # at multiples of the block length, whatever the prompt is
    FIXED_CANVAS = "positions that keep their places"  # no piece calls `Round.insert`
    WHOLE_CANVAS = "the whole canvas in every forward"
    RAW_CONFIDENCE = "raw confidence"  # `Scores.raw_KW`, or a confidence without added evidence
    ENTROPY = "the entropy of every position"  # `Scores.neg_entropy_KW`
    HELD_BLOCKS = "one open block at a time, which a reviser can hold open"
    FED_WINDOW = "the window in every forward"  # every position of it has logits
    FULL_ATTENTION = "full attention"
    KNOWN_ORDER = "an order that is known before the forward"  # `select.drawn.DUE`
    ONE_BRANCH = "one branch"
    ANSWER_GAP = "the gap of the answer's logits"  # `Scores.answer_gap_K`
    WHOLE_GENERATION = "the whole generation as one block"
    DIVERGENCES = "divergences from earlier forwards"  # `Scores.divergence_KWH`
    END_OF_TEXT = "an end as soon as everything before the end of text is committed"
    SURVIVAL_ESTIMATES = "survival estimates"  # `Proposal.survival_N` of a drafter


@dataclass(frozen=True)
class BlockLength:
    """The condition that blocks have this many positions."""

    positions: int

    def __str__(self) -> str:
        return f"blocks of {self.positions}"


class Need(NamedTuple):
    """A condition that the piece in a slot of the decoder has to give."""

    slot: str  # name of the decoder's field: "schedule", "score", ...
    condition: Condition | BlockLength


class Piece:
    """What all pieces have in common. The class variables may be properties of the instance."""

    needs: ClassVar[frozenset[Need]] = frozenset()  # what the other pieces have to give
    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset()  # what this piece gives
    by_position: ClassVar[bool] = False  # whether it knows or remembers something of certain canvas
    # positions from one forward to the next, or cuts the canvas; such a canvas cannot grow

    uses_seed: ClassVar[bool] = False  # whether it draws random numbers by the request's seed

    @property
    def all_needs(self) -> frozenset[Need]:
        """`needs`, and a canvas that stays, if the piece goes by position."""
        fixed = frozenset({Need("schedule", Condition.FIXED_CANVAS)} if self.by_position else ())
        return self.needs | fixed

    def parts(self) -> Iterator[Piece]:
        """The pieces this one is made of, at any depth."""
        for part in fields(self):  # type: ignore[arg-type]
            value = getattr(self, part.name)
            for piece in value if isinstance(value, tuple) else (value,):
                if isinstance(piece, Piece):
                    yield piece
                    yield from piece.parts()

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """The request with what this piece has to know before decoding begins."""
        return request


class Decoder(Protocol):
    """Turns a request into a generation. There are two: masked and speculative."""

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """The request with what decoding needs beforehand; not part of the measured time."""

    def generate(self, model: Denoiser, request: Request) -> Generation:
        """Decode one request; equal inputs give equal outputs."""

    def summary(self) -> DecoderSummary:
        """Facts of the decoder that are known without decoding."""


class BatchedDecoder(Decoder, Protocol):
    """A decoder that can decode several requests at a time."""

    def generate_stream(
        self, model: Denoiser, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode `batch` requests at a time, starting the next when one ends; yield each when it is
        finished.
        """


class ComposedDecoder(ABC):
    """What both decoders have in common: slots with pieces, checked when the decoder is made."""

    def slots(self) -> Mapping[str, Piece]:
        """The pieces by the name of their slot."""
        values = {slot.name: getattr(self, slot.name) for slot in fields(self)}  # type: ignore[arg-type]
        return {name: piece for name, piece in values.items() if isinstance(piece, Piece)}

    def pieces(self) -> Iterator[Piece]:
        """All pieces, at any depth."""
        for piece in self.slots().values():
            yield piece
            yield from piece.parts()

    def prepare_pieces(self, model: Denoiser, request: Request) -> Request:
        """The request with what the pieces have to know beforehand (the oracle's reference)."""
        for piece in self.pieces():
            request = piece.prepare(model, request)
        return request

    @abstractmethod
    def summary(self) -> DecoderSummary:
        """Facts of this decoder, from its pieces."""

    def check_pieces_fit(self) -> None:
        """Raise DllmBenchError if a piece needs what the piece in another slot does not give."""
        slots = self.slots()
        for slot, whole in slots.items():
            for piece in (whole, *whole.parts()):
                for wanted, condition in sorted(
                    piece.all_needs, key=lambda need: (need[0], str(need[1]))
                ):
                    if condition not in slots[wanted].gives:
                        raise DllmBenchError(
                            f"{slot} {type(piece).__name__} needs a {wanted} with {condition}, "
                            f"which {type(slots[wanted]).__name__} does not give; choose another "
                            f"{wanted} or {slot}."
                        )
