"""Contracts of the six pieces of a masked decoder, and the values that pass between them.

In one round of the loop `Explore` makes K branches, `Schedule` opens blocks, `Cache` plans the
forward, `Score` reads its logits, `Explore` picks a branch, `Select` chooses what is committed, and
`Stop` says whether the text is finished.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

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

    def pick(self, j: Tensor) -> Scores:
        """The scores of branch `j` (0-d or 1-element int64 tensor) alone."""
        index = j.reshape(1)
        return Scores(
            self.ids_KW.index_select(0, index),
            self.probability_KW.index_select(0, index),
            self.confidence_KW.index_select(0, index),
            None if self.raw_KW is None else self.raw_KW.index_select(0, index),
        )


class FilterHead(Protocol):
    """A trained network that judges candidates from the confidences of their block (Learn2PD)."""

    block: int  # P, the block length it was trained for

    def __call__(self, confidence_KNP: Tensor) -> Tensor:
        """Logits (K, N, P), float32; the sigmoid is the probability that a candidate is final."""


class Score(Piece, ABC):
    """Logits to candidate tokens and confidences."""

    gives: ClassVar[frozenset[Condition | BlockLength]] = frozenset({Condition.RAW_CONFIDENCE})
    row_by_row: ClassVar[bool] = False  # a row's scores depend on its own logits and position only
    costly: ClassVar[bool] = False  # unused rows are worth leaving out even of a small vocabulary

    @abstractmethod
    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        """Scores in the precision that the piece names (float32 if none).

        May remember evidence in `state.memo`. Gets (1, M, V) instead if `window.rows_M` is set.
        """


class Select(Piece, ABC):
    """Scores of the winning branch (K = 1) to the positions that are committed."""

    never_stalls: ClassVar[bool] = False  # chooses a position whenever one is masked
    one_per_forward: ClassVar[bool] = False  # commits one token per forward by construction

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

    def accepted(self, state: DecodeState) -> Tensor | None:
        """Candidates that a learned filter judged final in the last call, bool (K, W).

        None if this selector has no filter.
        """
        return None


class Explore(Piece, ABC):
    """Which candidate states share a forward, and which of them goes on."""

    explores: ClassVar[bool] = False  # whether a branch other than the base can go on

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
        """Index (0-d int64) of the branch that goes on: the first of the best rated."""
        return rating_K.argmax()


class Schedule(Piece, ABC):
    """Which blocks of the canvas are open: the first ones, up to a number that never falls."""

    block: int | None  # positions of a block; None: the whole generation is one block
    sees_future = True  # whether the model sees the masks behind the open blocks

    def length(self, prompt_len: int, new: int) -> int:
        """Canvas length for `new` tokens; raises DllmBenchError if blocks do not fit it."""
        return prompt_len + new

    @abstractmethod
    def grid(self, prompt_len: int, length: int) -> BlockGrid:
        """Where the blocks lie on a canvas of `length` positions."""

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
    caches: ClassVar[bool] = True  # whether forwards read keys and values of earlier ones

    def grid(self, block: int) -> int:
        """Reused spans are multiples of this many positions; `block` is the schedule's."""
        return block if self.reuse == "exact" else 1

    @abstractmethod
    def plan(self, branches: DecodeState, window: Window, kv: KVCache) -> ForwardPlan:
        """The plan of the next forward."""
