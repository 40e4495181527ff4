"""A decoder: pieces that fit together.

A piece is a frozen dataclass without state; values that a method remembers are in
`DecodeState.memo`. Each piece declares which conditions it needs from other pieces and which it
gives. Combinations are checked in two places: `check_pieces_fit` compares the pieces once, when the
decoder is made, and `check_run_fits` compares the decoder with model, batch, request and hardware.
The contracts of the individual pieces are in `contracts` (masked decoding) and `speculative`. This
module does not import torch, so decoders can be described, estimated and compared without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from dllm_bench.core.declared import CheckedFields
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request

if TYPE_CHECKING:
    from dllm_bench.core.denoiser import Denoiser


class Condition(StrEnum):
    """A property of one piece that another can rely on. The value is the wording in error
    messages."""

    ONE_OPEN_BLOCK = "one open block at a time"
    BLOCKS_IN_ORDER = "blocks that finish in order"
    EQUAL_BLOCKS = "blocks of equal length"
    SUB_BLOCKS = "sub-blocks"  # blocks decoded in parts, from the first position on
    ABSOLUTE_BLOCKS = "absolute blocks"  # at multiples of the block length, for any prompt
    FIXED_CANVAS = "positions that keep their places"  # no piece calls `Round.insert`
    WHOLE_CANVAS = "the whole canvas in every forward"
    RAW_CONFIDENCE = "raw confidence"  # `Scores.raw_KW`, or a confidence without added evidence
    ENTROPY = "the entropy of every position"  # `Scores.neg_entropy_KW`
    HELD_BLOCKS = "one open block at a time, which a reviser can hold open"
    HELD_EACH = "open blocks that a reviser can hold one by one"
    FED_WINDOW = "the window in every forward"  # every position of it has logits
    FULL_ATTENTION = "full attention"
    BLOCK_CAUSAL = "block-causal attention"
    FEED_ORDER = "attention that is causal in the order in which rows are fed"
    KNOWN_ORDER = "an order that is known before the forward"  # told by `on_plan`
    ONE_BRANCH = "one branch"
    ANSWER_GAP = "the gap of the answer's logits"
    WHOLE_GENERATION = "the whole generation as one block"
    DIVERGENCES = "divergences from earlier forwards"
    END_OF_TEXT = "an end as soon as everything before the end of text is committed"
    SURVIVAL_ESTIMATES = "survival estimates"  # `Proposal.survival_N` of a drafter
    DRAFT_TREES = "acceptance along the paths of a tree"  # `Proposal.parents_D`
    LOGITS_ALONE = "scores of the logits alone"  # a `Ranked` score
    PROBABILITIES = "probabilities as confidence"
    ROW_BY_ROW = "scores of each row alone, in every forward"  # from its logits and position only
    TO_LAST_BLOCK = "commits after the open block"  # windows reach to the last block, open or not
    FROM_FIRST_BLOCK = "windows from the first block on"  # finished or not
    NO_CHANGES = "no changes of committed tokens"
    OWN_SPANS = "spans of positions and K/V of this request alone"
    FINAL_KV = "K/V that are final when they are kept"  # the same in all branches
    UNGUIDED = "one prompt"
    NO_CACHE = "no keys and values of earlier forwards"
    DRAFTS = "branches that are drafts of what the base becomes"  # `rate` gets them as the
    # selector's next commit leaves them, and none opens a block before the base
    NEVER_STALLS = "a position in every forward"  # chosen whenever one is masked
    IDLES = "forwards that may commit nothing"  # whose stall rule chooses nothing
    ONE_PER_FORWARD = "one token per forward"  # by construction
    FOR_DRAWN_TOKENS = "steps published for tokens drawn above temperature 0"
    COSTLY_ROWS = "rows worth leaving out"  # even of a small vocabulary
    DRAWS = "random numbers by the request's seed"
    STOPS_ON_END = "an end at an end token"  # a committed one closes or finishes branches
    ONE_REQUEST = "one request at a time"  # not a batch
    # conditions of a model:
    CAUSAL = "causal attention (an autoregressive target)"
    MASKS = (
        "attention to masks (autoregressive models go with decoder=ar and speculative decoders; "
        "weights that were trained to fill masks, with model.attention_form=full)"
    )
    MASK_TOKEN = "a mask token (models of uniform-state diffusion go with decoder=diffusion_gemma)"
    CANVAS = "a canvas of random tokens (uniform-state diffusion)"
    SHIFTED = "shifted logits"  # a row predicts the position after its own
    UNSHIFTED = "logits of each position at its own row"
    CHOSEN_ROWS = (
        "layers that choose the rows they compute (of one norm, attention, one norm and MLP, "
        "neither compiled nor split over processes)"
    )


@dataclass(frozen=True)
class Number:
    """A number that a piece declares; see the subclasses."""

    value: int


class BlockLength(Number):
    """Number of positions of a block."""

    def __str__(self) -> str:
        return f"blocks of {self.value} (decoder.schedule.block)"


class MostBranches(Number):
    """Maximum number of branches in a forward; 1 if no piece declares it."""


class RenewalRounds(Number):
    """Number of rounds between renewals of the cache, used to count as published loops do.

    A round is a forward between renewals, together with the renewal before it, if any.
    """


Conditions = frozenset[Condition | Number]


class Need(NamedTuple):
    """A condition that the piece in a slot has to give."""

    slot: str  # the piece's own field ("inner"), the decoder's ("schedule", ...), "model", "batch"
    condition: Condition | Number


Needs = frozenset[Need]


Wanted = Condition | Number | tuple[Condition | Number, ...]


def needing(*needs: Need | Mapping[str, Wanted]) -> Needs:
    """Return needs as a set: those given, and the condition or conditions that each slot of a
    mapping has to give, as in `needing(ONE_BRANCH, {"score": Condition.ROW_BY_ROW})`.
    """
    found = set[Need]()
    for one in needs:
        for slot, wanted in [one] if isinstance(one, Need) else one.items():
            each = wanted if isinstance(wanted, tuple) else (wanted,)
            found.update(Need(slot, condition) for condition in each)
    return frozenset(found)


Flagged = TypeVar("Flagged", bound=Hashable)


def holding(flags: Mapping[Flagged, bool]) -> frozenset[Flagged]:
    """Return the conditions, or needs, whose flag is true."""
    return frozenset(one for one, flag in flags.items() if flag)


@dataclass(frozen=True)
class DecoderSummary:
    """Properties of a decoder, for estimating, checking or showing a run without decoding.

    The index of stored records holds every field.
    """

    branches: int = 1  # most candidate states in one forward
    block: int | None = None  # block length; None: the whole generation, or no blocks
    one_token_per_forward: bool = False  # by construction, for any text
    caches: bool = True  # whether a forward can read keys and values of earlier ones
    attention: str | None = None  # "full", "block_causal" or "feed_order" (WeDLM: causal in the
    # order in which rows are fed); None: not the masked loop
    uses_seed: bool = False  # whether the request's seed can change a token
    warning: str | None = None  # a combination of pieces that is known to lower the score
    drafts: bool = False  # whether a drafter proposes tokens and the model verifies them
    scores_options: bool = False  # whether it computes likelihoods of options and generates nothing


FIXED_CANVAS = Need("schedule", Condition.FIXED_CANVAS)
"""Needed by pieces that remember values per canvas position from one forward to the next, or that
cut the canvas."""
ONE_BRANCH = Need("explore", Condition.ONE_BRANCH)
ONE_OPEN_BLOCK = Need("schedule", Condition.ONE_OPEN_BLOCK)


class Piece(CheckedFields):
    """Base of all pieces. Where `needs` and `gives` are the same for all pieces of a class, it
    declares them as class variables."""

    @property
    def needs(self) -> Needs:
        """Conditions that others must give."""
        return frozenset()

    @property
    def gives(self) -> Conditions:
        """Conditions that this piece gives."""
        return frozenset()

    def __str__(self) -> str:
        return type(self).__name__

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """Return the request, completed with what this piece needs before decoding begins."""
        return request


def parts_of(piece: Piece) -> Iterator[Piece]:
    """Yield the pieces inside a piece, at any depth."""
    for part in fields(piece):  # type: ignore[arg-type]
        value = getattr(piece, part.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Piece):
                yield one
                yield from parts_of(one)


class Decoder(Protocol):
    """Turns a request into a generation. There are three loops: masked, speculative, canvas."""

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """Return the request, completed with what decoding needs beforehand; not part of the
        measured time."""

    def generate(self, model: Denoiser, request: Request) -> Generation:
        """Decode one request; equal inputs give equal outputs."""

    def summary(self) -> DecoderSummary:
        """Return properties of the decoder that are known without decoding."""


class BatchedDecoder(Decoder, Protocol):
    """A decoder that can decode several requests at a time."""

    def generate_stream(
        self, model: Denoiser, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode `batch` requests at a time and start the next when one ends; yield each when it is
        finished.
        """


class ComposedDecoder(CheckedFields, ABC):
    """Base of the decoders of all loops: slots with pieces, checked when the decoder is made."""

    @property
    def needs(self) -> Needs:
        """Needs of all pieces from a model."""
        return frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pieces_fit()

    def slots(self) -> Mapping[str, Piece]:
        """Return the pieces by the name of their slot."""
        values = {slot.name: getattr(self, slot.name) for slot in fields(self)}  # type: ignore[arg-type]
        return {name: piece for name, piece in values.items() if isinstance(piece, Piece)}

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces, at any depth."""
        for piece in self.slots().values():
            yield piece
            yield from parts_of(piece)

    def prepare(self, model: Any, request: Request) -> Request:
        """Return the request, completed with what the pieces need beforehand (such as the oracle's
        reference)."""
        for piece in self.pieces():
            request = piece.prepare(model, request)
        return request

    def any_gives(self, condition: Condition) -> bool:
        """Return whether any piece gives the condition."""
        return any(condition in piece.gives for piece in self.pieces())

    def number(self, kind: type[Number]) -> int | None:
        """Return the number of this kind that a piece declares; None if none does."""
        given = (one for piece in self.slots().values() for one in piece.gives)
        return next((one.value for one in given if isinstance(one, kind)), None)

    @abstractmethod
    def summary(self) -> DecoderSummary:
        """Return properties of this decoder, from its pieces."""

    def check_pieces_fit(self) -> None:
        """Raise DllmBenchError if a piece needs what the piece in another slot does not give."""
        slots = self.slots()
        for slot, whole in slots.items():
            for piece in (whole, *parts_of(whole)):
                own = {n.slot: getattr(piece, n.slot, None) for n in piece.needs}
                inner = {name: one for name, one in own.items() if isinstance(one, Piece)}
                require(f"{slot} {piece}", piece.needs, {**slots, **inner}, slot)

    def check_run_fits(
        self, model: object, batch: int = 1, asked: Mapping[str, Needs] | None = None
    ) -> None:
        """Raise DllmBenchError if model, batch or a piece does not give what a run needs.

        model: a denoiser or, before it is loaded, its settings; see `abilities`.
        batch: requests that share a forward.
        asked: further needs, by the request or the hardware setting that has them.
        """
        alone = holding({Condition.ONE_REQUEST: batch == 1})
        given = {"model": abilities(model), "batch": Given(str(batch), alone)}
        require(type(self).__name__, self.needs, given, "decoder")
        for slot, whole in self.slots().items():
            for piece in (whole, *parts_of(whole)):
                require(f"{slot} {piece}", piece.needs, given, slot)
        for asker, needs in (asked or {}).items():
            other = asker.partition("=")[0] if "=" in asker else "run"
            require(asker, needs, {**self.slots(), **given}, other)


class Given(NamedTuple):
    """Conditions given to the pieces by something outside the decoder, such as the model."""

    name: str
    gives: Conditions

    def __str__(self) -> str:
        return self.name


def abilities(model: object) -> Given:
    """Return the conditions that a model gives, by its attributes; unknown attributes count as
    given."""
    form, shifted = getattr(model, "attention_form", None), getattr(model, "shifted", None)
    is_given: dict[Condition | Number, bool] = {
        Condition.CAUSAL: form in ("causal", None),
        Condition.MASKS: form != "causal",
        Condition.MASK_TOKEN: form != "canvas",
        Condition.CANVAS: form in ("canvas", None),
        Condition.SHIFTED: shifted is not False,
        Condition.UNSHIFTED: shifted is not True,
        Condition.CHOSEN_ROWS: getattr(model, "chooses_rows", True),
    }
    return Given(f"{getattr(model, 'name', '')} of {form} attention".lstrip(), holding(is_given))


def require(asker: str, needs: Needs, given: Mapping[str, Piece | Given], other: str) -> None:
    """Raise DllmBenchError for the first need that `given`, by slot, does not give.

    Needs of slots that are not in `given` are ignored. other: settings that can be changed instead
    of the wanted slot.
    """
    for wanted, condition in sorted(needs, key=lambda need: (need.slot, str(need.condition))):
        if wanted in given and condition not in given[wanted].gives:
            choices = " or ".join(dict.fromkeys((wanted, other)))
            raise DllmBenchError(
                f"{asker} needs a {wanted} with {condition}, which {wanted} {given[wanted]} does "
                f"not give; choose another {choices}."
            )
