"""What follows a request from round to round: its open blocks with the window, its log, a clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import END, HOLD, INSERTED, Round, Schedule
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.request import Generation, cut_reasons
from dllm_bench.core.state import CUT, MASKED, DecodeState
from dllm_bench.core.trace import AGAIN_MASKED, Change, Forward, ForwardKind, Trace
from dllm_bench.core.transfer import constant, to_device

MASKS = "masks"  # host: `WindowTracker.masks_left`, flattened
CLOSED = "closed"  # host: whether each branch may open no further block


@dataclass
class WindowTracker:
    """Follows the blocks of one request from round to round."""

    schedule: Schedule
    grid: BlockGrid
    whole: bool = False  # whether windows begin with the first block
    to_end: bool = False  # whether windows end with the last block, open or not
    opened: Sequence[int] = (0,)  # how many blocks each branch of the last round had open
    first: int = 0  # block with which that window begins

    def masks_left(self, round: Round) -> Tensor:
        """Count the masks left in the blocks of the last window, int64 (K, N); none before the
        first."""
        state = round.state
        if not state.forwards:
            return state.tokens_KL.new_empty(0)
        # blocks after the window may have moved, too
        window = replace(round.window, stop=state.length) if self.to_end else round.window
        masked_KW = window.of(state.masked_KL)
        if window.end is not None:
            masked_KW = masked_KW & window.eligible_KW
        return window.blocks(masked_KW).sum(-1)

    def progress(self, round: Round, winner: int) -> list[BlockProgress]:
        """Return the progress of every branch at the beginning of a round; `winner`: the branch of
        the last round that continued."""
        host, branches = round.host, round.state.branches
        ends = tuple(host.get(END, ()))
        if ends:  # of the window's block; those before it may have ended unasked
            ends = (*(self.grid.start(n + 1) for n in range(self.first)), *ends)
        self.grid = replace(self.grid, length=round.state.length, ends=ends or self.grid.ends)
        opened, closed = self.opened[winner], host.get(CLOSED, [0] * branches)
        masks, held = (in_parts(host.get(key, ()), branches) for key in (MASKS, HOLD))
        return [
            BlockProgress(self.grid, self.first, masks[k], opened, bool(closed[k]), held[k])
            for k in range(branches)
        ]

    def move(
        self, branches: Sequence[BlockProgress], opened: Sequence[int], state: DecodeState
    ) -> Window:
        """Return the next window: from the base's first unfinished block to the last open block.

        opened: how many blocks are open in each branch.
        """
        grid, masked_KL = self.grid, state.masked_KL
        ends = [grid.start(n) for n in opened]
        first = BlockProgress(grid).finished if self.whole else branches[-1].finished
        start, stop = grid.start(first), grid.length if self.to_end else max(ends)
        blocks = range(first, grid.blocks if self.to_end else max(opened))
        eligible_KW, end_K = masked_KL[:, start:stop], None
        if min(ends) < stop:
            end_K = to_device(ends, masked_KL.device)
            position_W = constant(range(start, stop), masked_KL.device)
            eligible_KW = eligible_KW & (position_W < end_K[:, None])
        self.opened, self.first = opened, first
        musts = [[self.schedule.must_progress(branch, n) for n in blocks] for branch in branches]
        return Window(
            start=start,
            stop=stop,
            visible=grid.length if grid.sees_future else stop,
            block=grid.block,
            origin=grid.origin,
            eligible_KW=eligible_KW,
            must_KN=None if all(map(all, musts)) else to_device(musts, masked_KL.device),
            visible_K=None if grid.sees_future else end_K,
            masks=sum(map(BlockProgress.open_masks, branches, opened)),
            end_known=first < len(grid.ends),
        )


def in_parts(values: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Cut values into parts of equal length."""
    size = len(values) // parts
    return [values[k * size : (k + 1) * size] for k in range(parts)]


# --- the log --------------------------------------------------------------------------------------

WINNER = "winner"  # host: branch that continued from the last round
FORCED = "forced"  # host: whether the stall rule committed each position, or how many it did


@dataclass
class RoundLog:
    """The facts of one request's rounds, for its trace.

    Winner and forced positions of a round reach the host with the next round's copy.
    """

    kv: KVCache
    verifies: bool  # whether branches are drafts
    moves: bool  # whether positions may move
    renewal_rounds: int | None  # `RenewalRounds`
    ticks: list[float] = field(default_factory=list)  # times of the copies to the host
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Fields of `Forward` of each forward, as far as they are known."""
    kept: list[int] = field(default_factory=list)  # positions in the cache after each forward
    winner: int = 0  # the branch that continued from the last round
    masks: int = 0  # of the open blocks
    canvas: int = 0  # new positions, of a canvas that grows
    open_end: int = 0  # canvas position at which the open blocks end

    def learn(self, round: Round) -> None:
        """Record what the last round left for this wait. Called right after the copy to the host,
        when the device has caught up."""
        self.ticks.append(time.perf_counter())
        host, prompt = round.host, round.state.prompt_len
        if self.moves:
            self.canvas = round.state.length - prompt
        if not self.rows:
            return
        self.winner, forced = host.get(WINNER, [0])[0], sum(host.get(FORCED, ()))
        # draft j is branch j - 1, the base the last one
        accepted = (self.winner + 1) % (self.rows[-1]["proposed"] + 1)
        self.rows[-1] |= {"winner": self.winner, "forced": forced, "accepted": accepted}
        at, count = host.get(INSERTED, (0, 0))
        if count:
            self.rows[-1]["inserted"] = (at - prompt, count)

    def begin(self, plan: ForwardPlan, branches: DecodeState, copies: int) -> None:
        """Record a forward before it is made: its plan, branches, and positions it reads."""
        row = {
            "kind": plan.kind,
            "branches": branches.branches * copies,
            "fed": plan.fed,
            "cached": plan.cached(min(self.kv.length, branches.length)),
            "masks": self.masks,
            "proposed": branches.branches - 1 if self.verifies else 0,
            "canvas": self.canvas,
        }
        self.rows.append(row)

    def end(self, plan: ForwardPlan, branches: DecodeState) -> None:
        """Record what the forward left in the cache, and the work of layers that chose rows."""
        self.kept.append(plan.kept(min(self.kv.length, branches.length)))
        self.rows[-1] |= self.kv.execution._asdict()
        if self.kv.work is not None:
            self.rows[-1] |= self.kv.work._asdict()

    def trace(self, span: slice, revised: Sequence[Tensor]) -> Trace:
        """Return one row per forward; a round lasts from its copy to the host to the next one.

        revised: `Round.revised`, of a decoder that revises after every forward.
        """
        each = self.kv.bytes_per_position
        for row, kept, (start, end) in zip(self.rows, self.kept, pairwise(self.ticks), strict=True):
            row["ms"], row["kept_bytes"] = 1000 * (end - start), each * kept
            row.setdefault("read_bytes", each * row["cached"])
        for row, changes in zip(self.rows, changes_of(revised, span), strict=False):
            row["changes"] = changes
        return Trace([Forward(**row) for row in self.rows])

    def generation(self, round: Round) -> Generation:
        """Return all tokens of opened blocks, including those after the first end token."""
        request, state = round.request, round.state
        span = slice(state.prompt_len, self.open_end)
        ids, born = map(tuple, state.canvas_2KL[:, -1, span].tolist())
        cut = cut_reasons(ids, request.max_new_tokens, state.special)
        trace = self.trace(span, round.revised)
        return Generation(request.id, ids, born, cut, trace, renewal_rounds=self.renewal_rounds)


def changes_of(revised: Sequence[Tensor], span: slice) -> Iterator[tuple[Change, ...]]:
    """Yield what each round changed on the canvas positions `span`, given the canvas after each."""
    if not revised:
        return
    tokens_XG, born_XG = torch.stack([canvas_2L[:, span] for canvas_2L in revised], 1).cpu()
    yield ()
    differs_XG = (born_XG[:-1] >= 0) & (born_XG[:-1] != born_XG[1:]) & (born_XG[1:] != CUT)
    for index, differs_G in enumerate(differs_XG):
        at_X = differs_G.nonzero()[:, 0]
        masked_X = born_XG[index + 1, at_X] == MASKED
        after_X = tokens_XG[index + 1, at_X].masked_fill(masked_X, AGAIN_MASKED)
        columns = at_X, tokens_XG[index, at_X], born_XG[index, at_X], after_X
        yield tuple(Change(*row) for row in torch.stack(columns, 1).tolist())


class Clock:
    """Milliseconds between marks: by events of a CUDA device, for which the host does not have to
    wait, else by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []  # events, or seconds
        self.mark()

    def mark(self) -> None:
        """End one span and begin the next."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)

    def spans_ms(self) -> list[float]:
        """Return one span per pair of neighbouring marks."""
        if self.device.type != "cuda":
            return [1000 * (after - before) for before, after in pairwise(self.marks)]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairwise(self.marks)]


OF_DRAFTERS = (ForwardKind.DRAFT, ForwardKind.SELF_DRAFT, ForwardKind.HEAD)


def with_costs(forwards: Sequence[Forward], clock: Clock, kv: KVCache) -> Iterator[Forward]:
    """Yield the forwards with their times, and the bytes that they read from the model's cache and
    that it keeps after them; a drafter's cache is not counted."""
    per_position = kv.bytes_per_position
    for forward, ms in zip(forwards, clock.spans_ms(), strict=True):
        each = 0 if forward.kind in OF_DRAFTERS else per_position
        fed = 0 if forward.kind == ForwardKind.DENOISE else forward.fed
        read, kept = each * forward.cached, each * (forward.cached + fed)
        yield replace(forward, ms=ms, read_bytes=read, kept_bytes=kept)
