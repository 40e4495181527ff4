"""The only denoising loop: a request becomes a generation by masked diffusion decoding.

One round: make branches, open blocks, plan, forward, score, pick a branch, select, commit, revise.
Each of these words is a call of the piece of that name, and a paper's method is a choice of seven
pieces. The loop makes sure of progress (a block that must progress and would commit nothing commits
what the selector's stall rule says) and copies to the host once per round. It is a coroutine, so
that several requests can share copies and forwards (`batching`). Text is left to the runner.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, zip_longest

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockProgress, Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import (
    Cache,
    Explore,
    Growth,
    Revise,
    Schedule,
    Score,
    Scores,
    Select,
    Stop,
)
from dllm_bench.core.decoder import ComposedDecoder
from dllm_bench.core.decoder_summary import DecoderSummary
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache, RowWork
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import EndTokens, Generation, Request, SpecialTokens, cut_reasons
from dllm_bench.core.state import CUT, MASKED, DecodeState
from dllm_bench.core.trace import AGAIN_MASKED, Change, Forward, ForwardKind, Trace
from dllm_bench.core.transfer import to_device
from dllm_bench.core.workers import ONE_WORKER, WorkerGroup
from dllm_bench.decoding.batching import Answer, DecodeSteps, Step, host_values, run_batched
from dllm_bench.decoding.explore.greedy import Greedy
from dllm_bench.decoding.guidance import check_guidance, guided_forward
from dllm_bench.decoding.numerics import forbid, top1
from dllm_bench.decoding.revise.none import NoRevision
from dllm_bench.decoding.smoothing import check_smoothing, remember_expected, with_expected
from dllm_bench.decoding.stop.filled import Filled
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

LARGE = 8192  # a vocabulary from which leaving rows out of head and softmax saves time


@register("decoder.masked")
@dataclass(frozen=True)
class MaskedDecoder(ComposedDecoder):
    """Seven pieces and four switches; equal decoders produce equal tokens."""

    score: Score
    select: Select
    schedule: Schedule
    cache: Cache
    explore: Explore = field(default_factory=Greedy)
    stop: Stop = field(default_factory=Filled)
    revise: Revise = field(default_factory=NoRevision, metadata=DEFAULT_LEFT_OUT)
    forbid_mask: bool = True  # takes the mask token out of the model's distribution, so that no
    # position is "decoded" to a mask; published samplers leave it in
    guidance: float = 0.0  # scale of classifier-free guidance, 0 for none
    forbid: EndTokens | None = None  # takes end tokens out too (LLaDA's `logits_eos_inf`: eos)

    smoothing: float = field(default=0.0, metadata=DEFAULT_LEFT_OUT)  # largest weight of the mean
    # embeddings that are added at masks (dInfer's cont_weight: 0.3), 0 for none

    def __post_init__(self) -> None:
        if self.forbid is not None:
            check_choice(self, "forbid", self.forbid, EndTokens)
        self.check_pieces_fit()
        check_guidance(self.guidance, self.cache)
        check_smoothing(self.smoothing, self.guidance, self.cache)
        check_reach(self.select)
        check_rows(self.score, self.cache)
        check_growth(self)

    def summary(self) -> DecoderSummary:
        return DecoderSummary(
            branches=self.explore.most_branches,
            block=self.schedule.block,
            one_token_per_forward=self.select.one_per_forward,
            attention=self.cache.attention,
            caches=self.cache.caches,
            explores=self.explore.explores,
            stops_on_end_token=self.stop.stops_on_end_token,
            uses_seed=any(piece.uses_seed for piece in self.pieces()),
            warning=self._warning(),
        )

    def _warning(self) -> str | None:
        """What is known to cost score: a whole generation that is filled by the most probable
        tokens, in a schedule that was published for drawn ones.
        """
        whole = self.schedule.block is None
        if not (whole and self.select.for_drawn_tokens) or self.score.uses_seed:
            return None
        return (
            f"{type(self.select).__name__} over a whole generation was published for drawn tokens, "
            "and this decoder takes the most probable ones (temperature 0), which can end texts "
            "early and cost much of the score; draw them with decoder/score=sampled "
            "decoder.score.temperature=0.2."
        )

    def prepare(self, model: Denoiser, request: Request) -> Request:
        return self.prepare_pieces(model, request)

    def generate(
        self, model: Denoiser, request: Request, workers: WorkerGroup = ONE_WORKER
    ) -> Generation:
        """Decode `request`; `workers` divide its branches among them."""
        (generation,) = run_batched(model, [self.decode(model, request, workers)], 1)
        return generation

    def generate_stream(
        self, model: Denoiser, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode `batch` requests at a time; yield each as soon as it is finished.

        Batched and unbatched decoding produce identical tokens. The time of a forward is what
        passed for its request, waiting for the others included.
        """
        return run_batched(model, (self.decode(model, request) for request in requests), batch)

    def decode(
        self, model: Denoiser, request: Request, workers: WorkerGroup = ONE_WORKER
    ) -> DecodeSteps:
        """The loop: yields the copies and forwards it wants, returns the generation."""
        request = self.prepare(model, request)
        check_pins(self.schedule, request)
        length = self.schedule.length(len(request.prompt_ids), request.max_new_tokens)
        state = DecodeState.start(request, model.special, model.device, length)
        if self.revise.revises:
            state.changes_KL = torch.zeros_like(state.born_KL)
        kv = model.new_cache(state.length)
        if self.cache.reuse != "none":
            grid = self.cache.grid(self.schedule.block or 1)
            model.reuse_prefix(kv, request.prompt_ids, grid, by=self)
        tracker, log = self._follow(state, kv)
        only = torch.zeros((), dtype=torch.long, device=model.device)  # index of a single branch
        last: tuple[Scores, Window] | None = None
        while True:
            branches = self.explore.spawn(state, last)
            branches, window = yield from self._open_blocks(branches, tracker, log)
            if window is None:
                return log.generation(request, branches)
            plan = self._plan(branches, window, kv)
            log.begin(plan, branches, copies=2 if self.guidance else 1)
            own, own_window, plan = workers.divide(branches, window, plan)
            plan = with_expected(self._choose_rows(model, plan, own_window), own)
            logits_KRV = yield from guided_forward(own, plan, kv, self.guidance)
            forbid(logits_KRV, self._forbidden(model.special))
            logits_KRV, read_KWV = without_shadow(logits_KRV, plan, own_window)
            if self.smoothing:
                remember_expected(model, logits_KRV, plan, own, self.smoothing)
            scores = self._score(logits_KRV, own, own_window, plan)
            scores = self.revise.read(scores, read_KWV, own, own_window)
            ahead = self._score_ahead(logits_KRV, window)
            winner, several = only, branches.branches > 1
            if several:
                rating_K = self._rate(own, scores, own_window)
                winner = self.explore.pick(workers.gather(rating_K))
            workers.keep(kv, plan, winner)
            log.end(plan, branches)
            state, (scores, *ahead) = workers.collect_winner(
                winner, branches, own, (scores, *ahead)
            )
            window = window.pick(winner) if several else window
            window = tracker.size_block(scores, window, state)
            forced = None if window.sizing else self._commit(state, scores, window)
            revision = self.revise(scores, window, state)
            if revision is not None:
                state.revise(*revision, start=window.start)
                log.canvases.append((state.tokens_KL[-1].clone(), state.born_KL[-1].clone()))
            self.cache.note(scores, ahead, window, state, kv)
            state.forwards += 1
            log.outcome = winner if several else None, forced
            log.cut = self._shorten(state, window, scores, *ahead)
            log.grown = self._grow(state, window, scores)
            log.check_progress(request, self.revise)
            last = (scores, window)

    def _follow(self, state: DecodeState, kv: KVCache) -> tuple[WindowTracker, _RoundLog]:
        """What follows the blocks and the rounds of a request."""
        grows, start = self.schedule.grows, state.prompt_len
        whole, to_end = self.revise.whole or grows, self.select.reaches_beyond or grows
        longest = max(state.length, state.wanted) if grows else state.length
        tracker = WindowTracker(self.schedule, start, whole, to_end)
        log = _RoundLog(kv, longest - start, self.explore.verifies, self.cache.renewal_rounds)
        return tracker, log

    def _forbidden(self, special: SpecialTokens) -> list[int]:
        """Tokens that are taken out of the model's distribution."""
        mask = [special.mask] if self.forbid_mask else []
        return [*mask, *(special.named(self.forbid) if self.forbid else ())]

    def _open_blocks(
        self, branches: DecodeState, tracker: WindowTracker, log: _RoundLog
    ) -> Generator[Step, Answer, tuple[DecodeState, Window | None]]:
        """Learn on the host what shapes the next forward, and open blocks.

        Returns the branches that are worth a forward and their window, None if decoding is over.
        """
        masked_KL = branches.masked_KL
        host = yield from self._copy_to_host(branches, masked_KL, tracker.window, log)
        length = host.length[0] if host.length else branches.length
        branches.truncate(length)
        branches.host_L = torch.tensor(host.cache)[:length] if host.cache else None
        if self.schedule.grows:
            log.canvas_lengths.append(length - branches.prompt_len)
        tracker.ends += tuple(host.end)
        closed = host.closed or [False] * branches.branches
        sizing = bool(host.sizing and host.sizing[0])
        progress = tracker.progress(length, log.winner, host.masks, closed, host.stays, sizing)
        opened = list(map(self.schedule.opened, progress))
        masks = progress[-1].open_masks(opened[-1])
        log.tick(masks, progress[-1].grid.start(opened[-1]))
        if progress[-1].all_finished(opened[-1]) or (host.finished and host.finished[-1]):
            return branches, None
        base = branches.branches - 1
        if host.valid and host.valid[0] < base:
            kept = [*range(host.valid[0]), base]
            index = to_device(kept, masked_KL.device)
            branches, masked_KL = branches.take(index), masked_KL.index_select(0, index)
            progress, opened = [progress[k] for k in kept], [opened[k] for k in kept]
        if self.explore.verifies:
            opened = opened[-1:] * len(opened)
        return branches, tracker.move(progress, opened, masked_KL)

    def _copy_to_host(
        self, branches: DecodeState, masked_KL: Tensor, window: Window | None, log: _RoundLog
    ) -> Generator[Step, Answer, _HostValues]:
        """The round's only copy to the host, of what the pieces in use decide."""
        flags, (winner, forced) = self.stop.ended(branches), log.outcome or (None, None)
        if window and self.schedule.grows:  # blocks behind the window may have moved, too
            window = replace(window, stop=branches.length)
        wanted = {
            "masks": masks_per_block(masked_KL, window),
            "closed": flags.closed_K,
            "finished": flags.finished_K,
            "end": window.end if window else None,
            "stays": self.revise.stays(branches),
            "valid": self.explore.valid(branches),
            "length": (branches.born_KL[-1] != CUT).sum() if log.cut or log.grown else None,
            "grown": torch.stack([log.grown.at, log.grown.count]) if log.grown else None,
            "sizing": self.schedule.sizing(branches),
            "winner": winner,
            "forced": forced,
            "cache": self.cache.on_host(branches),
        }
        parts = {name: part.reshape(-1) for name, part in wanted.items() if part is not None}
        values = iter((yield from host_values(torch.cat(list(parts.values())))))
        host = _HostValues(**{k: list(islice(values, part.shape[0])) for k, part in parts.items()})
        log.learn(host)
        return host

    def _plan(self, branches: DecodeState, window: Window, kv: KVCache) -> ForwardPlan:
        """The cache's plan, with what the other pieces see and read."""
        due_X = self.select.due(branches, window)
        if due_X is not None:
            window = replace(window, due_X=due_X)
        plan = self.cache.plan(branches, window, kv)
        if window.sizing:
            plan = replace(plan, kind=ForwardKind.SIZE)
        visible_K = self.select.visible(branches)
        if visible_K is not None:
            plan = plan.limited_to(visible_K)
        if not self.schedule.sees_rest:
            plan = replace(plan, alone=branches.wanted)
        ahead = self.stop.reads_ahead or self.score.reads_ahead or self.smoothing > 0
        if plan.sets is None and ahead:
            plan = replace(plan, rows=(plan.rows[0], max(plan.rows[1], plan.feed[1])))
        if self.revise.shadow:
            plan = replace(plan, shadow=(window.start, window.stop))
        return plan

    def _commit(self, state: DecodeState, scores: Scores, window: Window) -> Tensor | None:
        """Write what the selector chose.

        Returns how many positions the stall rule added (0-d), None if it was not needed.
        """
        where_KW, ids_KW, forced = self.select(scores, window, state), scores.ids_KW, None
        where_KW = where_KW & window.eligible_KW
        if not (self.select.never_stalls and self.forbid_mask):
            fallback_KW, fallback_ids_KW = self.select.on_stall(scores, window, state)
            forced_KW = window.forced(where_KW, fallback_KW)
            if fallback_ids_KW is not ids_KW:
                ids_KW = torch.where(forced_KW, fallback_ids_KW, ids_KW)
            where_KW, forced = where_KW | forced_KW, forced_KW.sum()
        beyond_KW = self.select.beyond(state)
        if beyond_KW is not None:
            where_KW = where_KW | beyond_KW
        state.commit(where_KW, ids_KW, window.start)
        return forced

    def _rate(self, branches: DecodeState, scores: Scores, window: Window) -> Tensor:
        """The explorer's rating (K,); of drafts, with what the selector would commit to them."""
        if self.explore.verifies:
            every_K = torch.arange(branches.branches, device=branches.tokens_KL.device)
            branches = branches.take(every_K)  # a copy
            self._commit(branches, scores, window)
        return self.explore.rate(scores, window, branches)

    def _choose_rows(self, model: Denoiser, plan: ForwardPlan, window: Window) -> ForwardPlan:
        """The plan, with logits of masked positions only where nothing else is read.

        Gathering rows costs more than it saves if the vocabulary is small and the score cheap.
        """
        if window.masks is None or not model.picks_rows:
            return plan
        if not ((self.score.costly or model.vocab_size >= LARGE) and self._reads_masked_only):
            return plan
        if plan.rows[1] > window.stop or (plan.sets is not None and plan.sets.counts_rest):
            return plan
        if plan.scored_M is not None:
            return replace(plan, only_M=plan.scored_M)
        eligible_X = window.eligible_KW.flatten().byte()
        only_M = eligible_X.sort(descending=True, stable=True).indices[: window.masks]
        return replace(plan, only_M=only_M)

    @cached_property
    def _reads_masked_only(self) -> bool:
        """Whether logits of committed positions change nothing."""
        if self.guidance or self.smoothing or self.schedule.grows:
            return False
        if self.stop.reads_ahead or not self.score.row_by_row:
            return False
        return not any(piece.reads_committed for piece in self.pieces())

    def _score(
        self, logits_KRV: Tensor, branches: DecodeState, window: Window, plan: ForwardPlan
    ) -> Scores:
        """Scores of the window; 0 at positions whose logits were not computed."""
        if plan.only_M is None:
            if logits_KRV.shape[1] > window.width and not self.score.reads_ahead:
                logits_KRV = logits_KRV[:, : window.width]
            scores = self.score(logits_KRV, branches, window)
            return without_unfed(scores, plan, branches.special.mask)
        only_M = plan.only_M
        scores = self.score(logits_KRV, branches, replace(window, rows_M=only_M))
        shape = window.eligible_KW.shape
        scores = scores.map(
            lambda v: v.new_zeros(shape.numel()).index_copy_(0, only_M, v[0]).view(shape)
        )
        return without_unfed(scores, plan, branches.special.mask)

    def _score_ahead(self, logits_KRV: Tensor, window: Window) -> list[Scores]:
        """Scores of what was fed behind the window, if the stop rule or the cache reads them."""
        if not (self.stop.reads_ahead or self.cache.reads_ahead):
            return []
        ids_KX, probability_KX = top1(logits_KRV[:, window.width :])
        return [Scores(ids_KX, probability_KX, probability_KX)]

    def _shorten(self, state: DecodeState, window: Window, *parts: Scores) -> bool:
        """Cut the canvas where the stop rule predicts the end of the text.

        parts: scores of the window and of what lies ahead. Returns whether the rule predicts ends.
        """
        scores = parts[0]
        if len(parts) > 1:
            ids_1A = torch.cat([part.ids_KW for part in parts], 1)
            probability_1A = torch.cat([part.probability_KW for part in parts], 1)
            scores = Scores(ids_1A, probability_1A, probability_1A)
        length = self.stop.shorten(state, scores, window, self.select.accepted(state))
        if length is not None:
            state.cut(length)
        return length is not None

    def _grow(self, state: DecodeState, window: Window, scores: Scores) -> Growth | None:
        """Insert what the schedule wants, up to the request's new tokens."""
        room = state.wanted - state.length
        growth = self.schedule.grow(scores, window, state) if self.schedule.grows else None
        if growth is None or min(growth.most, room) < 1:
            return None
        state.insert(growth.at, growth.count, growth.ends, min(growth.most, room))
        return growth


def check_growth(decoder: MaskedDecoder) -> None:
    """Refuse what goes by positions of a canvas that grows."""
    schedule = type(decoder.schedule).__name__
    for slot, whole in decoder.slots().items() if decoder.schedule.grows else ():
        for piece in (whole, *whole.parts()):
            if piece.by_position:
                raise DllmBenchError(
                    f"schedule {schedule} needs a {slot} that goes by no positions, because it "
                    f"inserts some, and {type(piece).__name__} does; choose another {slot} or "
                    "schedule."
                )
    if decoder.schedule.grows and decoder.smoothing:
        raise DllmBenchError(
            f"schedule {schedule} inserts positions, and smoothing {decoder.smoothing} remembers "
            "embeddings by position; set smoothing to 0 or choose another schedule."
        )


def check_pins(schedule: Schedule, request: Request) -> None:
    """Refuse pinned tokens on a canvas that grows in front of them."""
    if schedule.grows and request.pinned:
        raise DllmBenchError(
            f"Request {request.id!r} pins tokens at new positions, which {type(schedule).__name__} "
            "moves when the canvas grows; pin none or choose another schedule."
        )


def check_reach(select: Select) -> None:
    """Refuse a selector that keeps a part of it from committing behind the open block."""
    for part in select.parts():
        if isinstance(part, Select) and part.reaches_beyond and not select.reaches_beyond:
            raise DllmBenchError(
                f"{type(part).__name__} commits behind the open block (released), where "
                f"{type(select).__name__} commits nothing; use it alone or in a union."
            )


def check_rows(score: Score, cache: Cache) -> None:
    """Refuse a score that compares rows, or forwards, where the cache leaves masks out."""
    if cache.leaves_masks_out and not score.row_by_row:
        raise DllmBenchError(
            f"score {type(score).__name__} needs a cache that feeds every mask in every forward, "
            f"which {type(cache).__name__} does not; choose another cache or score."
        )


def without_unfed(scores: Scores, plan: ForwardPlan, mask: int) -> Scores:
    """The scores, in which masks that the forward left out come last and stay masks."""
    if plan.scored_M is None or (plan.sets is not None and plan.sets.counts_rest):
        return scores
    unfed_W = torch.ones_like(scores.ids_KW[0], dtype=torch.bool)
    unfed_W = unfed_W.index_fill_(0, plan.scored_M, False)
    low = scores.map(
        lambda v: v.masked_fill(unfed_W, -torch.inf if v.is_floating_point() else mask)
    )
    return replace(low, probability_KW=scores.probability_KW.masked_fill(unfed_W, 0))


def without_shadow(logits_KXV: Tensor, plan: ForwardPlan, window: Window) -> tuple[Tensor, Tensor]:
    """Logits of the plan's rows (K, R, V), and those a reviser reads (K, W, V): of the window's
    shadow rows, or of its own rows if there are none.
    """
    shadow = plan.shadow[1] - plan.shadow[0]
    if shadow:
        return logits_KXV[:, :-shadow], logits_KXV[:, -shadow:]
    wider = plan.only_M is None and logits_KXV.shape[1] > window.width
    return logits_KXV, logits_KXV[:, : window.width] if wider else logits_KXV


def masks_per_block(masked_KL: Tensor, window: Window | None) -> Tensor:
    """Masks left in the blocks of a window, int64 (K, N); empty without a window."""
    if window is None:
        return masked_KL.new_empty(0, dtype=torch.long)
    masked_KW = window.of(masked_KL)
    if window.end is not None:
        masked_KW = masked_KW & window.eligible_KW
    return window.blocks(masked_KW).sum(-1)


@dataclass(frozen=True)
class _HostValues:
    """What the host learns in a round; lists are empty where no piece in use decides it."""

    masks: Sequence[int] = ()  # `masks_per_block` of the last window, flattened
    closed: Sequence[int] = ()  # per branch: opens no further block
    finished: Sequence[int] = ()  # per branch: is finished
    end: Sequence[int] = ()  # one number: where the block ends that the last round sized
    stays: Sequence[int] = ()  # per branch: `Revise.stays`
    valid: Sequence[int] = ()  # one number: branches before the base that are worth a forward
    length: Sequence[int] = ()  # one number: length of a canvas that was cut or grew
    grown: Sequence[int] = ()  # two numbers: where positions were inserted, and how many
    sizing: Sequence[int] = ()  # one number: whether the next forward only finds the length
    winner: Sequence[int] = ()  # one number: branch that continued from the last round
    forced: Sequence[int] = ()  # one number: positions committed by the stall rule
    cache: Sequence[int] = ()  # per position: `Cache.on_host` of the base


@dataclass
class WindowTracker:
    """Follows the blocks of one request from round to round."""

    schedule: Schedule
    prompt_len: int
    whole: bool = False  # whether windows begin with the first block
    to_end: bool = False  # whether windows end with the last block, open or not
    window: Window | None = None  # of the last round
    opened: Sequence[int] = (0,)  # how many blocks each branch of the last round had open
    first: int = 0  # block with which that window begins
    ends: tuple[int, ...] = ()  # where blocks end that the schedule sized by their scores

    def progress(
        self,
        length: int,
        winner: int,
        masks: Sequence[int],
        closed: Sequence[int],
        stays: Sequence[int] = (),
        sizing: bool = False,
    ) -> list[BlockProgress]:
        """Every branch at the beginning of a round; for `masks` see `_HostValues`."""
        grid = self.schedule.grid(self.prompt_len, length)
        if self.ends:
            grid = replace(grid, ends=self.ends)
        blocks, opened = len(masks) // len(closed), self.opened[winner]
        return [
            BlockProgress(
                grid,
                self.first,
                masks[k * blocks : (k + 1) * blocks],
                opened,
                bool(flag),
                stay,
                sizing,
            )
            for k, (flag, stay) in enumerate(zip_longest(closed, stays, fillvalue=0))
        ]

    def move(
        self, branches: Sequence[BlockProgress], opened: Sequence[int], masked_KL: Tensor
    ) -> Window:
        """The next window: from the base's first unfinished block to the last open one of any
        branch; `opened` blocks are open in each.
        """
        grid = branches[-1].grid
        ends = [grid.start(n) for n in opened]
        first = BlockProgress(grid).finished if self.whole else branches[-1].finished
        start, stop = grid.start(first), grid.length if self.to_end else max(ends)
        blocks = grid.blocks if self.to_end else max(opened)
        eligible_KW, end_K = masked_KL[:, start:stop], None
        if min(ends) < stop:
            end_K = to_device(ends, masked_KL.device)
            position_W = torch.arange(start, stop, device=masked_KL.device)
            eligible_KW = eligible_KW & (position_W < end_K[:, None])
        self.opened, self.first = opened, first
        self.window = Window(
            start=start,
            stop=stop,
            visible=grid.length if self.schedule.sees_future else stop,
            retired=start,
            block=grid.block,
            origin=grid.origin,
            eligible_KW=eligible_KW,
            must_KN=self._must(branches, range(first, blocks), masked_KL.device),
            visible_K=None if self.schedule.sees_future else end_K,
            masks=sum(map(BlockProgress.open_masks, branches, opened)),
            sizing=branches[-1].sizing,
        )
        return self.window

    def size_block(self, scores: Scores, window: Window, state: DecodeState) -> Window:
        """The window, which ends where the schedule says if this was a block's first forward."""
        end = None if self.first < len(self.ends) else self.schedule.end(scores, window, state)
        if end is None:
            return window
        self.window = window.until(end)
        return self.window

    def _must(
        self, branches: Sequence[BlockProgress], blocks: range, device: torch.device
    ) -> Tensor | None:
        """Blocks of the window that must progress, (K, N); None: all."""
        rows = [[self.schedule.must_progress(branch, n) for n in blocks] for branch in branches]
        return None if all(map(all, rows)) else to_device(rows, device)


@dataclass
class _RoundLog:
    """The facts of one request's rounds, for its trace.

    Winner and forced positions of a round reach the host with the next round's copy.
    """

    kv: KVCache
    new_positions: int  # canvas positions behind the prompt
    verifies: bool  # `Explore.verifies`
    renewal_rounds: int | None  # `Cache.renewal_rounds`
    ticks: list[tuple[float, int]] = field(default_factory=list)  # time, masks of the open blocks
    forwards: list[tuple[ForwardKind, int, int, int]] = field(default_factory=list)
    used: list[tuple[int, RowWork | None, bool]] = field(default_factory=list)
    """Positions that the cache kept after each forward, the work of layers that chose rows, and
    whether the forward was a recorded graph."""
    drafts: list[int] = field(default_factory=list)  # draft tokens that the forward verified
    winners: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    outcome: tuple[Tensor | None, Tensor | None] | None = None  # last winner and forced; None: 0
    cut: bool = False  # whether the last round cut the canvas
    grown: Growth | None = None  # what the last round inserted
    insertions: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Forward -> (canvas position, count) of what was inserted after it."""
    canvas_lengths: list[int] = field(default_factory=list)  # new positions, of a canvas that grows
    open_end: int = 0  # canvas position at which the open blocks end
    canvases: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tokens and `born` (L,) after each round of a decoder that revises."""

    @property
    def winner(self) -> int:
        """The branch that continued from the last round."""
        return self.winners[-1] if self.winners else 0

    def learn(self, host: _HostValues) -> None:
        """Record winner and forced positions of the last round, once there was one."""
        if self.outcome is not None:
            self.winners += host.winner or [0]
            self.forced += host.forced or [0]
        if host.grown and host.grown[1]:
            self.insertions[len(self.forwards) - 1] = (host.grown[0], host.grown[1])

    def tick(self, masks: int, open_end: int) -> None:
        """Take the time. Called right after a copy to the host, when the device has caught up."""
        self.ticks.append((time.perf_counter(), masks))
        self.open_end = open_end

    def begin(self, plan: ForwardPlan, branches: DecodeState, copies: int) -> None:
        """Record a forward before it is made: its plan, branches, and positions it reads."""
        cached = plan.cached(min(self.kv.length, branches.length))
        self.forwards.append((plan.kind, branches.branches * copies, plan.fed, cached))
        self.drafts.append(branches.branches - 1 if self.verifies else 0)

    def end(self, plan: ForwardPlan, branches: DecodeState) -> None:
        """Record what the forward left in the cache, and the work of layers that chose rows."""
        kept = plan.kept(min(self.kv.length, branches.length))
        self.used.append((kept, self.kv.work, self.kv.replayed))

    def check_progress(self, request: Request, revise: Revise) -> None:
        """Refuse to loop forever: a round commits nothing if all candidates are the mask token, and
        a reviser may take back what the selector commits.
        """
        if len(self.forwards) <= revise.forwards_per_position * self.new_positions:
            return
        reason = "the model predicts the mask token at all masks; set decoder.forbid_mask=true."
        if revise.revises:
            reason = (
                f"{type(revise).__name__} keeps changing its tokens; set "
                "decoder.revise.per_position, the changes of a position, or "
                "decoder.forbid_mask=true."
            )
        raise DllmBenchError(
            f"Request {request.id!r} is not decoded after {len(self.forwards)} forwards: {reason}"
        )

    def trace(self, span: slice) -> Trace:
        """One row per forward; a round lasts from its copy to the host to the next one."""
        rows = zip(
            self.forwards, pairwise(self.ticks), self.winners, self.forced, self.drafts, strict=True
        )
        forwards = [
            Forward(
                *(*forward, 1000 * (after - before), winner, forced, masks),
                proposed=drafts,
                accepted=(winner + 1) % (drafts + 1),  # draft j is branch j - 1, the base the last
            )
            for forward, ((before, masks), (after, _)), winner, forced, drafts in rows
        ]
        each = self.kv.bytes_per_position
        for index, (kept, work, replayed) in enumerate(self.used):
            done = work or RowWork(None, each * forwards[index].cached)
            forwards[index] = replace(
                forwards[index], **done._asdict(), kept_bytes=each * kept, replayed=replayed
            )
        for index, changes in enumerate(self._changes(span)):
            forwards[index] = replace(forwards[index], changes=changes)
        for index, canvas in enumerate(self.canvas_lengths[: len(forwards)]):
            at, count = self.insertions.get(index, (0, 0))
            inserted = (at - span.start, count) if count else ()
            forwards[index] = replace(forwards[index], canvas=canvas, inserted=inserted)
        return Trace(forwards)

    def _changes(self, span: slice) -> Iterator[tuple[Change, ...]]:
        """What each round of a decoder that revises changed on the canvas positions `span`."""
        if not self.canvases:
            return
        tokens, born = zip(*self.canvases, strict=True)
        tokens_XG, born_XG = (
            torch.stack([canvas_L[span] for canvas_L in part]).cpu() for part in (tokens, born)
        )
        yield ()
        differs_XG = (born_XG[:-1] >= 0) & (born_XG[:-1] != born_XG[1:]) & (born_XG[1:] != CUT)
        for index, differs_G in enumerate(differs_XG):
            at_X = differs_G.nonzero()[:, 0]
            after_X = tokens_XG[index + 1, at_X].masked_fill(
                born_XG[index + 1, at_X] == MASKED, AGAIN_MASKED
            )
            columns = at_X, tokens_XG[index, at_X], born_XG[index, at_X], after_X
            yield tuple(Change(*row) for row in torch.stack(columns, 1).tolist())

    def generation(self, request: Request, state: DecodeState) -> Generation:
        """All tokens of opened blocks, those after the first end token included."""
        span = slice(state.prompt_len, self.open_end)
        ids = tuple(state.tokens_KL[-1, span].tolist())
        born = tuple(state.born_KL[-1, span].tolist())
        cut = cut_reasons(ids, request.max_new_tokens, state.special)
        trace = self.trace(span)
        return Generation(request.id, ids, born, cut, trace, renewal_rounds=self.renewal_rounds)
