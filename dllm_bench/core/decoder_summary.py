"""What pieces can rely on in each other, and facts of a decoder that are known without decoding.

Imports no torch, unlike the decoders.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


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
    KNOWN_ORDER = "an order that is known before the forward"  # told by `on_plan`
    ONE_BRANCH = "one branch"
    ANSWER_GAP = "the gap of the answer's logits"  # `Scores.answer_gap_K`
    WHOLE_GENERATION = "the whole generation as one block"
    DIVERGENCES = "divergences from earlier forwards"  # `Scores.divergence_KWH`
    END_OF_TEXT = "an end as soon as everything before the end of text is committed"
    SURVIVAL_ESTIMATES = "survival estimates"  # `Proposal.survival_N` of a drafter
    LOGITS_ALONE = "scores of the logits alone"  # a `Ranked` score
    PROBABILITIES = "probabilities as confidence"
    ROW_BY_ROW = "scores of each row alone, in every forward"  # of its logits and position
    TO_LAST_BLOCK = "commits behind the open block"  # windows end with the last block, open or not
    FROM_FIRST_BLOCK = "windows from the first block on"  # finished or not
    NO_CHANGES = "no changes of committed tokens"
    OWN_SPANS = "spans of positions and K/V of this request alone"
    FINAL_KV = "K/V that are final when they are kept"  # the same in all branches
    UNGUIDED = "one prompt"
    NO_CACHE = "no keys and values of earlier forwards"
    DRAFTS = "branches that are drafts of what the base becomes"  # `rate` gets them as the
    # selector's next commit leaves them, and none opens a block before the base
    NEVER_STALLS = "a position in every forward"  # chosen whenever one is masked
    ONE_PER_FORWARD = "one token per forward"  # by construction
    FOR_DRAWN_TOKENS = "steps published for tokens drawn above temperature 0"
    COSTLY_ROWS = "rows worth leaving out"  # even of a small vocabulary
    DRAWS = "random numbers by the request's seed"
    STOPS_ON_END = "an end at an end token"  # a committed one closes or finishes branches
    ONE_REQUEST = "one request at a time"  # of a batch
    # of a model:
    CAUSAL = "causal attention (an autoregressive target)"
    MASKS = (
        "attention to masks (autoregressive models go with decoder=ar and speculative decoders; "
        "weights that were trained to fill masks, with model.attention_form=full)"
    )
    SHIFTED = "shifted logits"  # a row predicts the position after its own
    UNSHIFTED = "logits of each position at its own row"
    CHOSEN_ROWS = (
        "layers that choose the rows they compute (of one norm, attention, one norm and MLP, "
        "neither compiled nor split over processes)"
    )


@dataclass(frozen=True)
class Number:
    """A number that a piece gives; see the subclasses."""

    value: int


@dataclass(frozen=True)
class BlockLength(Number):
    """Blocks have this many positions."""

    def __str__(self) -> str:
        return f"blocks of {self.value}"


@dataclass(frozen=True)
class MostBranches(Number):
    """A forward has at most this many branches; one if no piece says so."""


@dataclass(frozen=True)
class RenewalRounds(Number):
    """Number of rounds of a request between renewals of the cache, for counts of published loops.

    A round is a forward between renewals, with the renewal before it if there is one.
    """


Conditions = frozenset[Condition | Number]


class Need(NamedTuple):
    """A condition that the piece in a slot has to give."""

    slot: str  # the piece's own field ("inner"), the decoder's ("schedule", ...), "model", "batch"
    condition: Condition | Number


@dataclass(frozen=True)
class DecoderSummary:
    """Facts of a decoder for those who estimate, check or show a run without decoding anything."""

    branches: int = 1  # most candidate states in one forward
    block: int | None = None  # positions of a block; None: the whole generation, or no blocks
    one_token_per_forward: bool = False  # by construction, whatever the text is
    caches: bool = True  # whether a forward can read keys and values of earlier ones
    explores: bool = False  # whether a branch other than the base can continue
    stops_on_end_token: bool = False  # whether a committed end token closes or finishes branches
    attention: str | None = None  # "full" or "block_causal"; None: not the masked loop
    uses_seed: bool = False  # whether the request's seed can change a token
    warning: str | None = None  # what the pieces do together that is known to cost score
    drafts: bool = False  # whether a drafter proposes tokens and the model verifies them
    scores_options: bool = False  # whether it gives likelihoods of options, and generates nothing
