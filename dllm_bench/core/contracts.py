"""Contracts of the seven pieces of a masked decoder, and the values that pass between them.

In one round of the loop `Explore` makes K branches, `Schedule` opens blocks, `Cache` plans the
forward, `Score` reads its logits, `Explore` picks a branch, `Select` chooses what is committed,
`Revise` changes what was committed, and `Stop` says whether the text is finished. What a method
does beyond that it does in the moments of a round, which every piece has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.decoder import Condition, Conditions, Piece
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.round import Round, Scores
from dllm_bench.core.state import DecodeState

Reads = Literal["masked", "window", "fed"]
"""Whose logits a piece reads: of masked positions, of all of the window, of all that was fed from
the window's start on. The loop computes the widest."""
READS: tuple[Reads, ...] = get_args(Reads)


class MaskedPiece(Piece):
    """What any piece may do in a round; nothing by default.

    The loop calls the moments of every piece, those that others are made of included, in this
    order: select, explore, revise, cache, score, stop, schedule. A moment that no piece has costs
    nothing.
    """

    reads_rows: ClassVar[Reads] = "masked"  # see `Reads`; in any moment

    def on_start(self, round: Round) -> None:
        """Before the wait, K branches: ask for what the host has to know (`Round.ask`)."""

    def on_plan(self, round: Round) -> None:
        """After the cache's plan: replace `round.plan`, for example to limit what is seen."""

    def on_scores(self, round: Round) -> None:
        """After the scores, for all K branches: remember in `round.state.memo` what logits say; it
        follows the branch that continues.
        """

    def on_commit(self, round: Round) -> None:
        """After the commit, K = 1: revise, remember, cut, insert, hold the open block (`HOLD`).

        Positions that this forward has committed are those with `born_KL` = `state.forwards`.
        """


class FilterHead(Protocol):
    """A trained network that judges candidates from the confidences of their block (Learn2PD)."""

    block: int  # P, the block length it was trained for

    def __call__(self, confidence_KNP: Tensor) -> Tensor:
        """Logits (K, N, P), float32; the sigmoid is the probability that a candidate is final."""


class Score(MaskedPiece, ABC):
    """Logits to candidate tokens and confidences."""

    gives: ClassVar[Conditions] = frozenset({Condition.RAW_CONFIDENCE})
    reads_rows: ClassVar[Reads] = "window"  # "masked": a row's scores depend on its own logits and
    # position only; "fed": it gets the rows of all that was fed behind the window too

    @abstractmethod
    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        """Scores in the precision that the piece names (float32 if none).

        May remember evidence in `state.memo`. Gets (1, M, V) instead if `window.rows_M` is set.
        """


class Select(MaskedPiece, ABC):
    """Scores of the winning branch (K = 1) to the positions that are committed.

    If the explorer gives drafts, every branch is given as well; none depends on the others.
    """

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


class Revise(MaskedPiece, ABC):
    """Masks committed positions again or overwrites them, once a round, in `on_commit`.

    It calls `Round.revise` with what changes, and sets `HOLD` if blocks are held open or left.
    """


class Explore(MaskedPiece, ABC):
    """Which candidate states share a forward, and which of them continues."""

    @abstractmethod
    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        """K branches of a state with K = 1; the last one is the base, the state as it was.

        `Round.keep_first` says in `on_start` how many of the others are worth a forward.

        last: scores and window of the forward before, None in the first round.
        """

    @abstractmethod
    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        """Rating of each branch (K,); a branch's rating does not depend on the others."""

    def pick(self, rating_K: Tensor) -> Tensor:
        """Index (0-d int64) of the branch that continues: the first of the best rated."""
        return rating_K.argmax()


class Schedule(MaskedPiece, ABC):
    """Which blocks of the canvas are open: the first ones, up to a number that never falls."""

    block: int | None  # positions of a block; None: the whole generation is one block

    @abstractmethod
    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        """Where the blocks of the first canvas lie, whose length is that of the grid.

        Raises DllmBenchError if they do not fit `new` tokens.
        """

    @abstractmethod
    def opened(self, branch: BlockProgress) -> int:
        """How many blocks are open in this round; a closed branch begins no new one."""

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        """Whether the open block `n` has to commit something in every forward."""
        return True


@dataclass(frozen=True)
class StopFlags:
    """What a stop rule decides for each branch; None where it never decides that."""

    closed_K: Tensor | None = None  # bool: opens no further block
    finished_K: Tensor | None = None  # bool: is finished although positions are masked


class Stop(MaskedPiece, ABC):
    """When a branch opens no further block, and when a request is finished.

    A rule may give up a part of the canvas after a commit (`Round.cut`).
    """

    def ended(self, branches: DecodeState) -> StopFlags:
        """Which branches open no further block, and which are finished."""
        return StopFlags()


class Cache(MaskedPiece, ABC):
    """What a forward feeds, and which keys and values of earlier forwards it reads."""

    @abstractmethod
    def plan(self, round: Round) -> ForwardPlan:
        """The plan of the next forward; state, window and K/V are those of the round."""
