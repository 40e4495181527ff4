"""Contracts of the seven pieces of a masked decoder, and the values that pass between them.

In one round of the loop `Explore` makes K branches, `Schedule` opens blocks, `Cache` plans the
forward, `Score` reads its logits, `Explore` picks a branch, `Select` chooses what is committed,
`Revise` changes what was committed, and `Stop` says whether the text is finished.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.decoder import BlockLength, Condition, Piece
from dllm_bench.core.denoiser import Attention, ForwardPlan, KVCache
from dllm_bench.core.state import DecodeState

Reuse = Literal["none", "exact", "approximate"]


@dataclass(frozen=True)
class Scores:
    """What the model proposes at every window position, committed ones where a piece reads them."""

    ids_KW: Tensor  # candidate token, int64
    probability_KW: Tensor  # of the candidate; thresholds compare it
    confidence_KW: Tensor  # the larger, the earlier committed: probability, margin, -entropy ...
    raw_KW: Tensor | None = None  # confidence before evidence of earlier steps was added, if kept
    neg_entropy_KW: Tensor | None = None  # sum of p ln p in nats, if the score gives it
    answer_gap_K: Tensor | None = None  # mean difference of the two largest logits in the answer
    standing_KW: Tensor | None = None  # what a reviser reads of the token at each position
    divergence_KWH: Tensor | None = None  # KL from the forward before in nats, of the last H
    # forwards, newest last, if the score gives it

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by the name of their field."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Scores:
        """Scores of `function` of every tensor that is present."""
        return replace(self, **{name: function(value) for name, value in self.tensors().items()})

    def pick(self, j: Tensor) -> Scores:
        """The scores of branch `j` (0-d or 1-element int64 tensor) alone."""
        return self.map(lambda values: values.index_select(0, j.reshape(1)))


class FilterHead(Protocol):
    """A trained network that judges candidates from the confidences of their block (Learn2PD)."""

    block: int  # P, the block length it was trained for

    def __call__(self, confidence_KNP: Tensor) -> Tensor:
        """Logits (K, N, P), float32; the sigmoid is the probability that a candidate is final."""


class Score(Piece, ABC):
    """Logits to candidate tokens and confidences."""

    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset({Condition.RAW_CONFIDENCE})
    reads_ahead: ClassVar[bool] = False  # gets the rows of all that was fed behind the window too
    row_by_row: ClassVar[bool] = False  # a row's scores depend on its own logits and position only
    costly: ClassVar[bool] = False  # unused rows are worth leaving out even of a small vocabulary

    @abstractmethod
    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        """Scores in the precision that the piece names (float32 if none).

        May remember evidence in `state.memo`. Gets (1, M, V) instead if `window.rows_M` is set.
        """


class Select(Piece, ABC):
    """Scores of the winning branch (K = 1) to the positions that are committed.

    If the explorer verifies drafts, every branch is given as well; none depends on the others.
    """

    never_stalls: ClassVar[bool] = False  # chooses a position whenever one is masked
    one_per_forward: ClassVar[bool] = False  # commits one token per forward by construction
    for_drawn_tokens: ClassVar[bool] = False  # published for tokens drawn above temperature 0
    reaches_beyond: ClassVar[bool] = False  # windows reach to the canvas's end, for `beyond`

    @abstractmethod
    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """where_KW, bool; positions outside of `window.eligible_KW` are ignored."""

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """(where_KW, ids_KW) for blocks that must progress and would commit nothing.

        By default the most confident position of the block.
        """
        confidence_KW = scores.confidence_KW.masked_fill(~window.eligible_KW, -torch.inf)
        confidence_KNP = window.blocks(confidence_KW, -torch.inf)
        best_KN1 = confidence_KNP.argmax(-1, keepdim=True)
        where_KNP = torch.zeros_like(confidence_KNP, dtype=torch.bool).scatter_(2, best_KN1, True)
        return window.flat(where_KNP) & window.eligible_KW, scores.ids_KW

    def beyond(self, state: DecodeState) -> Tensor | None:
        """Positions that the last call commits although they are not eligible, bool (1, W).

        Committed ones stay as they are. None: nothing ever.
        """
        return None

    def due(self, state: DecodeState, window: Window) -> Tensor | None:
        """Where in the window the next forward commits whatever its scores are, first to last,
        int64 (X,), on the host; what is committed already may be there too. None: scores decide.
        """
        return None

    def accepted(self, state: DecodeState) -> Tensor | None:
        """Candidates that a learned filter judged final in the last call, bool (K, W).

        None if this selector has no filter.
        """
        return None

    def visible(self, branches: DecodeState) -> Tensor | None:
        """Ends of what the branches see in the next forward, int64 (K,); None: all that is fed."""
        return None


class Revision(NamedTuple):
    """What a reviser does to the committed positions of the window, in the winning branch (K = 1).

    The prompt is never revised, whatever is true there. The tensors may reach beyond the window.
    """

    remask_KW: Tensor  # bool: masked again
    write_KW: Tensor  # bool: overwritten
    ids_KW: Tensor  # int64: with this token
    show_KW: Tensor | None = None  # bool: masked positions that hold this token from now on and
    # still count as masked, but are committed where `write` is true as well


class Revise(Piece, ABC):
    """Which committed positions are masked again, and which are overwritten with what."""

    revises: ClassVar[bool] = True
    reads_committed: ClassVar[bool] = True
    by_position: ClassVar[bool] = True
    shadow: ClassVar[bool] = False  # reads a shadow row of every window position instead of its own
    whole: ClassVar[bool] = False  # revises finished blocks too: the window begins with the first
    forwards_per_position: ClassVar[int] = 64  # a request that needs more on average is cycling

    def read(
        self, scores: Scores, logits_KWV: Tensor, branches: DecodeState, window: Window
    ) -> Scores:
        """The scores with what this reviser reads of the logits, `Scores.standing_KW`.

        logits_KWV: of the window's rows or, with `shadow`, of their shadow rows.
        """
        return scores

    @abstractmethod
    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Revision | None:
        """What changes, after the commit of the same forward; None: nothing ever.

        Positions that this forward has committed are those with `born_KL` = `state.forwards`.
        """

    def stays(self, branches: DecodeState) -> Tensor | None:
        """int64 (K,): `HELD` if the open block stays open without masks, `LEFT` if it is left with
        masks, 0 if it is open while it has masks. None: always 0.
        """
        return None


class Explore(Piece, ABC):
    """Which candidate states share a forward, and which of them continues."""

    explores: ClassVar[bool] = False  # whether a branch other than the base can continue
    verifies: ClassVar[bool] = False  # branches are drafts of what the base becomes: `rate` gets
    # them as the selector's next commit leaves them, and none opens a block before the base

    @property
    def most_branches(self) -> int:
        """The largest K of a forward."""
        return 1

    @abstractmethod
    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        """K branches of a state with K = 1; the last one is the base, the state as it was.

        last: scores and window of the forward before, None in the first round.
        """

    def valid(self, branches: DecodeState) -> Tensor | None:
        """How many of the branches before the base are worth a forward, 0-d int64; None: all."""
        return None

    @abstractmethod
    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        """Rating of each branch (K,); a branch's rating does not depend on the others."""

    def pick(self, rating_K: Tensor) -> Tensor:
        """Index (0-d int64) of the branch that continues: the first of the best rated."""
        return rating_K.argmax()


@dataclass(frozen=True)
class Growth:
    """Positions that a schedule inserts into the canvas after a commit (K = 1); see
    `DecodeState.insert`.
    """

    at: Tensor  # 0-d int64: canvas position in front of which they are inserted
    count: Tensor  # 0-d int64: how many; 0: none
    ends: Tensor  # 0-d bool: they are end tokens instead of masks
    most: int  # the largest count


class Schedule(Piece, ABC):
    """Which blocks of the canvas are open: the first ones, up to a number that never falls.

    One that `grows` may insert positions, up to the request's new tokens. Windows are then the
    whole generation, so that the rule reads all of its scores.
    """

    block: int | None  # positions of a block; None: the whole generation is one block
    sees_future = True  # whether the model sees the masks behind the open blocks
    sees_rest = True  # whether it sees positions that only round the canvas up to whole blocks; if
    # not, each of them still sees itself
    grows: ClassVar[bool] = False  # whether `grow` inserts positions

    def length(self, prompt_len: int, new: int) -> int:
        """Canvas length for `new` tokens; raises DllmBenchError if blocks do not fit it."""
        return prompt_len + new

    @abstractmethod
    def grid(self, prompt_len: int, length: int) -> BlockGrid:
        """Where the blocks lie on a canvas of `length` positions."""

    @abstractmethod
    def opened(self, branch: BlockProgress) -> int:
        """How many blocks are open in this round; a closed branch begins no new one."""

    def end(self, scores: Scores, window: Window, state: DecodeState) -> Tensor | None:
        """Canvas position at which a new block ends, 0-d int64, by the scores of its first forward.

        At most `window.stop`. None: blocks end where the grid says.
        """
        return None

    def sizing(self, state: DecodeState) -> Tensor | None:
        """Whether the next forward only finds the canvas's length, 0-d bool. None: never."""
        return None

    def grow(self, scores: Scores, window: Window, state: DecodeState) -> Growth | None:
        """What is inserted after the commit of a forward; None: nothing this time."""
        return None

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        """Whether the open block `n` has to commit something in every forward."""
        return True


@dataclass(frozen=True)
class StopFlags:
    """What a stop rule decides for each branch; None where it never decides that."""

    closed_K: Tensor | None = None  # bool: opens no further block
    finished_K: Tensor | None = None  # bool: is finished although positions are masked


class Stop(Piece, ABC):
    """When a branch opens no further block, and when a request is finished."""

    reads_ahead: ClassVar[bool] = False  # `shorten` reads candidates ahead of the window too
    stops_on_end_token: ClassVar[bool] = False  # a committed end token closes or finishes branches

    def ended(self, branches: DecodeState) -> StopFlags:
        """Which branches open no further block, and which are finished."""
        return StopFlags()

    def shorten(
        self, state: DecodeState, scores: Scores, window: Window, accepted_KW: Tensor | None
    ) -> Tensor | None:
        """New canvas length after a commit, 0-d int64; None if this rule never cuts the canvas.

        scores: (1, A), the window and, with `reads_ahead`, all that was fed behind it.
        accepted_KW: `Select.accepted` of the last forward.
        """
        return None


class Cache(Piece, ABC):
    """What a forward feeds, and which keys and values of earlier forwards it reads.

    reuse: whether the keys and values of a prompt's beginning (few-shot examples) are taken from an
    earlier request: "exact" where they cannot depend on what follows, "approximate" where they saw
    the rest of that request's prompt.
    """

    attention: Attention
    reuse: Reuse = "none"
    by_position: ClassVar[bool] = True
    caches: ClassVar[bool] = True  # whether forwards read keys and values of earlier ones
    leaves_masks_out: ClassVar[bool] = False  # whether forwards may predict some masks only
    over_spans: ClassVar[bool] = True  # whether its plans name spans alone
    reads_ahead: ClassVar[bool] = False  # `note` gets scores of what lies behind the window too

    @property
    def renewal_rounds(self) -> int | None:
        """Rounds of a request between renewals, for counts of published loops; None: not by rounds.

        A round is a forward between renewals, with the renewal before it if there is one.
        """
        return None

    def grid(self, block: int) -> int:
        """Reused spans are multiples of this many positions; `block` is the schedule's."""
        return block if self.reuse == "exact" else 1

    def on_host(self, branches: DecodeState) -> Tensor | None:
        """What `plan` reads on the host as `DecodeState.host_L`, integers (L,); None: nothing."""
        return None

    def note(
        self,
        scores: Scores,
        ahead: Sequence[Scores],
        window: Window,
        state: DecodeState,
        kv: KVCache,
    ) -> None:
        """Remember what later plans need of a forward, after its commit and revision.

        Positions that it has committed are those with `born_KL` = `state.forwards`.
        """

    @abstractmethod
    def plan(self, branches: DecodeState, window: Window, kv: KVCache) -> ForwardPlan:
        """The plan of the next forward."""
