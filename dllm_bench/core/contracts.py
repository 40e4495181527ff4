"""Contracts of the seven pieces of a masked decoder, and the round that connects them.

In one round of the loop `Explore` makes K branches, `Schedule` opens blocks, `Cache` plans the
forward, `Score` reads its logits, `Explore` picks a branch, `Select` chooses what is committed,
`Revise` changes what was committed, and `Stop` says whether the text is finished.

In addition, every piece can act at four moments of a round: before the only wait (`on_start`),
before the forward (`on_plan`), after its scores (`on_scores`), and after the selector's choice is
committed (`on_commit`). The actions allowed there are methods of `Round`: have values copied to the
host, change the canvas's length, end the open block, revise tokens. A `WorkerGroup` divides the
branches of a round among processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import islice
from typing import Literal, get_args

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.decoder import Condition, Conditions, Needs, Piece
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.request import Request
from dllm_bench.core.state import CUT, DecodeState, MemoKey
from dllm_bench.core.transfer import constant, only

# --- the pieces -----------------------------------------------------------------------------------

Reads = Literal["masked", "window", "fed"]
"""The positions whose logits a piece reads: masked ones, the whole window, or everything fed from
the window's start on. The loop computes the widest that any piece reads."""
READS: tuple[Reads, ...] = get_args(Reads)


class MaskedPiece(Piece):
    """The actions of a piece at the moments of a round; by default none.

    At each moment the loop calls every piece, including pieces inside other pieces, in this order:
    select, explore, revise, cache, score, stop, schedule. A moment that no piece overrides costs
    nothing.
    """

    @property
    def reads_rows(self) -> Reads:
        """The rows whose logits it reads, in any moment; see `Reads`."""
        return "masked"

    def on_start(self, round: Round) -> None:
        """Ask for values that the host needs (`Round.ask`); called before the wait, K branches."""

    def on_plan(self, round: Round) -> None:
        """Replace `round.plan`, for example to limit which positions are visible.

        Called after the cache's plan.
        """

    def on_scores(self, round: Round) -> None:
        """Store information from the logits in `round.state.memo`; called after the scores.

        It is called for all K branches; the memo follows the branch that continues.
        """

    def on_commit(self, round: Round) -> None:
        """Revise, remember, cut, insert, or keep the open block open (`HOLD`).

        Called after the commit, K = 1. Positions committed by this forward have `born_KL` =
        `state.forwards`.
        """


class Score(MaskedPiece, ABC):
    """Turns logits into candidate tokens and confidences."""

    @property
    def gives(self) -> Conditions:
        return frozenset({Condition.RAW_CONFIDENCE})

    @property
    def reads_rows(self) -> Reads:
        """Return "masked" if the scores of a row depend on its own logits and position only, "fed"
        to receive the rows of what was fed after the window, too."""
        return "window"

    @abstractmethod
    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        """Return scores in the precision that the piece names (float32 if none).

        May remember evidence in `state.memo`. Receives logits (1, M, V) instead if `window.rows_M`
        is set.
        """


class Select(MaskedPiece, ABC):
    """Chooses the positions to commit from the scores of the winning branch (K = 1).

    If the explorer's branches are drafts, it is called with all branches; they must not affect each
    other.
    """

    @abstractmethod
    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        """Return where_KW, bool; positions outside of `window.eligible_KW` are ignored."""

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Return (where_KW, ids_KW) for blocks that must progress and would commit nothing.

        By default it is the most confident position of the block, or none if a forward may commit
        nothing (`Condition.IDLES`).
        """
        if Condition.IDLES in self.gives:
            return torch.zeros_like(window.eligible_KW), scores.ids_KW
        confidence_KW = only(scores.confidence_KW, window.eligible_KW)
        best_KN1 = window.blocks(confidence_KW, -torch.inf).argmax(-1, keepdim=True)
        where_KNP = best_KN1 == constant(range(window.block), best_KN1.device)
        return window.flat(where_KNP) & window.eligible_KW, scores.ids_KW


class Revise(MaskedPiece, ABC):
    """Masks committed positions again or overwrites them, once per round, in `on_commit`.

    It calls `Round.revise` with the changes, and sets `HOLD` to keep a block open or close it
    early.
    """


class Explore(MaskedPiece, ABC):
    """Decides which candidate states share a forward, and which of them continues."""

    @abstractmethod
    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        """Return K branches of a state with K = 1; the last one is the base, the unchanged state.

        Each of the others commits one more position than those before it could: as many are fed as
        the base has masks left in its open blocks.

        last: scores and window of the previous forward, None in the first round.
        """

    @abstractmethod
    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        """Return the rating of each branch (K,); it must not depend on the other branches."""

    def pick(self, rating_K: Tensor) -> Tensor:
        """Return the index (0-d int64) of the branch that continues: the first with the highest
        rating."""
        return rating_K.argmax()


class Schedule(MaskedPiece, ABC):
    """Decides how many blocks of the canvas, counted from the first, are open; the number never
    falls."""

    block: int | None  # block length; None: the whole generation is one block

    @abstractmethod
    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        """Return the blocks of the first canvas; the grid's length is the canvas length.

        Raises DllmBenchError if they do not fit `new` tokens.
        """

    @abstractmethod
    def opened(self, branch: BlockProgress) -> int:
        """Return the number of open blocks in this round; a closed branch opens no further
        block."""

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        """Return whether open block `n` must commit something in every forward."""
        return True


@dataclass(frozen=True)
class StopFlags:
    """Decisions of a stop rule for each branch; None for a decision that it never makes."""

    closed_K: Tensor | None = None  # bool: opens no further block
    finished_K: Tensor | None = None  # bool: finished although positions are masked


class Stop(MaskedPiece, ABC):
    """Decides when a branch opens no further block, and when a request is finished.

    A rule may discard the end of the canvas after a commit (`Round.cut`).
    """

    def ended(self, branches: DecodeState) -> StopFlags:
        """Return which branches open no further block, and which are finished."""
        return StopFlags()


class Cache(MaskedPiece, ABC):
    """Decides what a forward feeds, and which keys and values of earlier forwards it reads."""

    @abstractmethod
    def plan(self, round: Round) -> ForwardPlan:
        """Return the plan of the next forward; state, window and K/V are those of the round."""


# --- a round --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The model's proposals at every window position; at committed ones only if a piece reads
    them."""

    ids_KW: Tensor  # candidate token, int64
    probability_KW: Tensor  # probability of the candidate; thresholds compare it
    confidence_KW: Tensor  # higher is committed earlier: probability, margin, -entropy ...
    raw_KW: Tensor | None = None  # confidence without the evidence of earlier steps, if kept
    neg_entropy_KW: Tensor | None = None  # sum of p ln p in nats, if the score computes it

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by the name of their field."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Scores:
        """Apply `function` to every tensor that is present, once to each, and return the scores."""
        once = cache(function)  # tensors are equal as keys if they are the same
        return replace(self, **{name: once(value) for name, value in self.tensors().items()})

    def pick(self, j: Tensor) -> Scores:
        """Return the scores of branch `j` (0-d or 1-element int64 tensor) alone."""
        return self.map(lambda values: values.index_select(0, j.reshape(1)))

    def spread(self, plan: ForwardPlan, shape: torch.Size, mask: int) -> Scores:
        """Return scores (K, W) of a window from those of the rows `plan.only_M`, (1, M). Others are
        0; if they are masks that the forward left out, they are ranked last and stay masked."""
        only_M, left_out = plan.only_M, plan.scored_M is not None
        assert only_M is not None

        def place(values_1M: Tensor, others: float) -> Tensor:
            whole_X = values_1M.new_full((shape.numel(),), others)
            return whole_X.index_copy_(0, only_M, values_1M[0]).view(shape)

        return self._without(place, mask) if left_out else self.map(lambda v: place(v, 0))

    def without_unfed(self, plan: ForwardPlan, mask: int) -> Scores:
        """Return the scores; masks that the forward left out are ranked last and stay masked."""
        if plan.scored_M is None or (plan.sets is not None and plan.sets.counts_rest):
            return self
        unfed_W = torch.ones_like(self.ids_KW[0], dtype=torch.bool)
        unfed_W = unfed_W.index_fill_(0, plan.scored_M, False)
        return self._without(lambda v, other: v.masked_fill(unfed_W, other), mask)

    def _without(self, put: Callable[[Tensor, float], Tensor], mask: int) -> Scores:
        """Return `put(values, other)` of every tensor. `other` is its value at a mask that the
        forward left out: ranked last, and still a mask."""
        others, once = {"ids_KW": mask, "probability_KW": 0}, cache(put)
        values = {name: once(v, others.get(name, -torch.inf)) for name, v in self.tensors().items()}
        return replace(self, **values)


HOLD = MemoKey[Tensor]("round.hold")
"""int64 (K,): `HELD` if the open block stays open without masks (the whole text, before a block was
opened), `LEFT` if it is left with masks, 0 or nothing remembered if it is open while it has masks.
(K, N): of each of the last N open blocks; `LAST` if one stays open and none opens after it. Any
piece may set it; the next wait reads it."""
END = "end"  # host: where the open block ends, if a piece ended it
INSERTED = "inserted"  # host: where positions were inserted, and how many
LENGTH = "length"  # host: length of a canvas that was cut or inserted into


@dataclass
class Round:
    """State of one request that the pieces share; between the pick and the next `on_start` it has
    one branch."""

    request: Request
    """Prompt, limits and seed from the caller."""
    state: DecodeState
    """Tokens and memo of the branches; with several workers, only this worker's between plan and
    pick."""
    kv: KVCache
    """Keys and values of the request."""
    model: Denoiser
    """The model that makes the forwards."""
    decoder: object
    """The decoder; equal decoders compute equal keys and values."""
    window: Window = field(init=False)
    """The part being decoded. Until blocks are opened it is the last round's; unset in the first
    `on_start`."""
    plan: ForwardPlan = field(init=False)
    """Plan of this round's forward; set from `on_plan` on."""
    logits_KXV: Tensor = field(init=False)
    """Logits of the plan's R rows, then of the rows that a piece added; (1, M, V) if the plan names
    `only_M`. Set from `on_scores` on, for all branches, even after the pick."""
    scores: Scores = field(init=False)
    """Scores of the window; set from `on_scores` on."""
    host: dict[Hashable, list[int]] = field(default_factory=dict)
    """Answers to `ask`, as of this round's wait."""
    revised: list[Tensor] = field(default_factory=list)
    """Tokens and `born` after every revision, int64 (2, L), for the trace."""
    _asked: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def rows_KRV(self) -> Tensor:
        """Logits of the plan's own rows, without those that a piece added."""
        rows = self.plan.rows[1] - self.plan.rows[0]
        picked = self.plan.only_M is not None or self.logits_KXV.shape[1] == rows
        return self.logits_KXV if picked else self.logits_KXV[:, :rows]

    @property
    def added_KEV(self) -> Tensor:
        """Logits of the rows that a piece added to the plan."""
        return self.logits_KXV[:, self.plan.rows[1] - self.plan.rows[0] :]

    @property
    def ahead_KXV(self) -> Tensor:
        """Logits of the computed rows after the window, for pieces with `reads_rows` = "fed"."""
        return self.rows_KRV[:, self.window.width :]

    def ask(self, key: Hashable, values: Tensor | None) -> None:
        """Have integers copied to the host at the next wait; `host` holds them flat under `key`.

        None: there are none, and `host` will not have the key.
        """
        if values is not None:
            self._asked[key] = values

    def question(self) -> Tensor:
        """Return all requested values, int64 or shorter (X,)."""
        return torch.cat([values.reshape(-1) for values in self._asked.values()])

    def answer(self, values: list[int]) -> None:
        """Store the values of `question` in `host`."""
        each = iter(values)
        self.host = {key: [*islice(each, part.numel())] for key, part in self._asked.items()}
        self._asked = {}

    def on_host(self, key: Hashable) -> Tensor:
        """Return requested values of all canvas positions, on the host (L,)."""
        return torch.tensor(self.host[key])[: self.state.length]

    def revise(
        self,
        write_KW: Tensor,
        ids_KW: Tensor | None,
        show_KW: Tensor | None = None,
        *,
        counts: bool = True,
    ) -> None:
        """Change committed positions from the window's start on; see `DecodeState.revise`."""
        state, start = self.state, self.window.start
        may_mask = state.may_choose_mask or ids_KW is not self.scores.ids_KW
        state.revise(write_KW, ids_KW, show_KW, start, counts=counts, may_mask=may_mask)
        self.revised.append(state.canvas_2KL[:, -1].clone())

    def end_block(self, end: Tensor) -> None:
        """End the open block at a canvas position (0-d int64), at most the window's end."""
        span, eligible_KW = range(self.window.start, self.window.stop), self.window.eligible_KW
        eligible_KW = eligible_KW & (constant(span, eligible_KW.device) < end)
        self.window = replace(self.window, eligible_KW=eligible_KW, masks=None, end=end)
        self.ask(END, end)

    def cut(self, length: Tensor) -> None:
        """Discard all positions from `length` (0-d int64) on."""
        self.state.cut(length)
        self.ask(LENGTH, (self.state.born_KL[-1] != CUT).sum())

    def insert(self, at: Tensor, count: Tensor, ends: Tensor | None, most: int) -> None:
        """Insert `count` positions, at most `most`, before `at`. The canvas grows at most to the
        request's new tokens; see `DecodeState.insert`.
        """
        most = min(most, self.state.wanted - self.state.length)
        if most > 0:
            self.ask(LENGTH, self.state.insert(at, count, ends, most))
            self.ask(INSERTED, torch.stack([at, count]))


class WorkerGroup:
    """The processes that decode a request; this class is the group of one process.

    A group divides the branches of a round among its workers. Every worker holds the same state and
    makes the same decisions from the same values: the ratings of all branches, and state and scores
    of the winner. Scores and the memo of a score depend on logits, so the worker that computed them
    sends them; logits are never sent.
    """

    needs: Mapping[str, Needs] = {}
    """What the group requires of a decoder, by the setting that requires it."""

    def divide(
        self, branches: DecodeState, window: Window, plan: ForwardPlan
    ) -> tuple[DecodeState, Window, ForwardPlan]:
        """Return the branches of a round that this worker feeds and scores."""
        return branches, window, plan

    def gather(self, rating_K: Tensor) -> Tensor:
        """Return a number of each branch of the round, in order, such as its rating.

        rating_K: those of this worker's branches.
        """
        return rating_K

    def keep(self, kv: KVCache, plan: ForwardPlan, winner: Tensor) -> None:
        """Store the winner's K/V of `plan.store` (as divided) in the cache of every worker."""
        kv.keep(plan, winner)

    def collect_winner(
        self, winner: Tensor, branches: DecodeState, own: DecodeState, scores: Scores, drafts: bool
    ) -> tuple[DecodeState, Scores]:
        """Return state and scores of the winner; `own` are this worker's branches after scoring,
        and after the commit if they are `drafts`."""
        if branches.branches == 1:
            return own, scores
        return own.pick(winner), scores.pick(winner)


ONE_WORKER = WorkerGroup()
