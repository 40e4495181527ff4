"""What a decoder is: pieces that fit together.

A piece is a frozen dataclass without state; what a method has to remember lives in
`DecodeState.memo`. Each piece says which conditions it needs of the others and which it gives.
Combinations are refused in two places: `check_pieces_fit` compares the pieces once, when the
decoder is made, and `check_run_fits` the decoder with model, batch, request and hardware. The
contracts of the single pieces are in `contracts` (masked decoding) and `speculative`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import ClassVar, NamedTuple, Protocol

from dllm_bench.core.declared import CheckedFields
from dllm_bench.core.decoder_summary import BlockLength as BlockLength
from dllm_bench.core.decoder_summary import (
    Condition,
    Conditions,
    DecoderSummary,
    Need,
    Number,
)
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request

FIXED_CANVAS = Need("schedule", Condition.FIXED_CANVAS)
"""Need of pieces that remember something of certain canvas positions from one forward to the next,
or that cut the canvas."""
ONE_BRANCH = Need("explore", Condition.ONE_BRANCH)
ONE_OPEN_BLOCK = Need("schedule", Condition.ONE_OPEN_BLOCK)
CAUSAL_MODEL = Need("model", Condition.CAUSAL)


class Piece(CheckedFields):
    """What all pieces have in common. The class variables may be properties of the instance."""

    needs: ClassVar[frozenset[Need]] = frozenset()  # what others have to give
    gives: ClassVar[Conditions] = frozenset()  # what this piece gives

    def __str__(self) -> str:
        return type(self).__name__

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """The request with what this piece has to know before decoding begins."""
        return request


def parts_of(piece: Piece) -> Iterator[Piece]:
    """The pieces that a piece is made of, at any depth."""
    for part in fields(piece):  # type: ignore[arg-type]
        value = getattr(piece, part.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Piece):
                yield one
                yield from parts_of(one)


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


class ComposedDecoder(CheckedFields, ABC):
    """What both decoders have in common: slots with pieces, checked when the decoder is made."""

    needs: ClassVar[frozenset[Need]] = frozenset()  # what all pieces together need of a model

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pieces_fit()

    def slots(self) -> Mapping[str, Piece]:
        """The pieces by the name of their slot."""
        values = {slot.name: getattr(self, slot.name) for slot in fields(self)}  # type: ignore[arg-type]
        return {name: piece for name, piece in values.items() if isinstance(piece, Piece)}

    def pieces(self) -> Iterator[Piece]:
        """All pieces, at any depth."""
        for piece in self.slots().values():
            yield piece
            yield from parts_of(piece)

    def prepare_pieces(self, model: Denoiser, request: Request) -> Request:
        """The request with what the pieces have to know beforehand (the oracle's reference)."""
        for piece in self.pieces():
            request = piece.prepare(model, request)
        return request

    def any_gives(self, condition: Condition) -> bool:
        """Whether a piece gives the condition."""
        return any(condition in piece.gives for piece in self.pieces())

    def number(self, kind: type[Number]) -> int | None:
        """The number of this kind that the piece of a slot gives; None if none does."""
        given = (one for piece in self.slots().values() for one in piece.gives)
        return next((one.value for one in given if isinstance(one, kind)), None)

    @abstractmethod
    def summary(self) -> DecoderSummary:
        """Facts of this decoder, from its pieces."""

    def check_pieces_fit(self) -> None:
        """Raise DllmBenchError if a piece needs what the piece in another slot does not give."""
        slots = self.slots()
        for slot, whole in slots.items():
            for piece in (whole, *parts_of(whole)):
                own = {n.slot: getattr(piece, n.slot, None) for n in piece.needs}
                inner = {name: one for name, one in own.items() if isinstance(one, Piece)}
                require(f"{slot} {piece}", piece.needs, {**slots, **inner}, slot)

    def check_run_fits(
        self, model: object, batch: int = 1, asked: Mapping[str, frozenset[Need]] | None = None
    ) -> None:
        """Raise DllmBenchError if model, batch or a piece does not give what a run needs.

        model: a denoiser, or what its settings say before it is loaded; see `abilities`.
        batch: requests that share a forward.
        asked: by the request or the setting of hardware that needs it.
        """
        alone = frozenset({Condition.ONE_REQUEST} if batch == 1 else ())
        given = {"model": abilities(model), "batch": Given(str(batch), alone)}
        require(type(self).__name__, self.needs, given, "decoder")
        for slot, whole in self.slots().items():
            for piece in (whole, *parts_of(whole)):
                require(f"{slot} {piece}", piece.needs, given, slot)
        for asker, needs in (asked or {}).items():
            other = asker.partition("=")[0] if "=" in asker else "run"
            require(asker, needs, {**self.slots(), **given}, other)


class Given(NamedTuple):
    """What the pieces of a decoder can rely on in something that is none of them."""

    name: str
    gives: Conditions

    def __str__(self) -> str:
        return self.name


def abilities(model: object) -> Given:
    """What decoders can rely on in a model, by its attributes; whatever is not known is given."""
    form, shifted = getattr(model, "attention_form", None), getattr(model, "shifted", None)
    is_given = {
        Condition.CAUSAL: form in ("causal", None),
        Condition.MASKS: form != "causal",
        Condition.SHIFTED: shifted is not False,
        Condition.UNSHIFTED: shifted is not True,
        Condition.CHOSEN_ROWS: getattr(model, "chooses_rows", True),
    }
    name = f"{getattr(model, 'name', '')} of {form} attention".lstrip()
    return Given(name, frozenset(one for one, given in is_given.items() if given))


def require(
    asker: str, needs: frozenset[Need], given: Mapping[str, Piece | Given], other: str
) -> None:
    """Raise DllmBenchError for the first need that `given`, by slot, does not give.

    Needs of slots that are not in `given` are left out. other: what may be chosen instead of the
    wanted slot.
    """
    for wanted, condition in sorted(needs, key=lambda need: (need.slot, str(need.condition))):
        if wanted in given and condition not in given[wanted].gives:
            choices = " or ".join(dict.fromkeys((wanted, other)))
            raise DllmBenchError(
                f"{asker} needs a {wanted} with {condition}, which {wanted} {given[wanted]} does "
                f"not give; choose another {choices}."
            )
