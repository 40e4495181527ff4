"""The only denoising loop: a request becomes a generation by masked diffusion decoding.

One round: make branches, open blocks, plan, forward, score, pick a branch, select, commit, revise.
Each of these steps calls one piece, and a paper's method is a choice of seven pieces. The loop
guarantees progress: a block that must progress but would commit nothing commits the positions
chosen by the selector's stall rule. It copies to the host once per round. It is a coroutine, so
that several requests can share copies and forwards (`batching`). Texts are handled by the runner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import (
    HOLD,
    LENGTH,
    ONE_WORKER,
    READS,
    Cache,
    Explore,
    MaskedPiece,
    Reads,
    Revise,
    Round,
    Schedule,
    Score,
    Scores,
    Select,
    Stop,
    WorkerGroup,
)
from dllm_bench.core.declared import Amount
from dllm_bench.core.decoder import (
    FIXED_CANVAS,
    BlockLength,
    ComposedDecoder,
    Condition,
    DecoderSummary,
    MostBranches,
    Needs,
    Piece,
    RenewalRounds,
    needing,
    parts_of,
)
from dllm_bench.core.denoiser import Denoiser, ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import EndTokens, Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.core.transfer import constant, to_device
from dllm_bench.decoding.batching import DecodeSteps, Steps, host_values, run_batched
from dllm_bench.decoding.defaults import Filled, Greedy, NoRevision
from dllm_bench.decoding.numerics import forbid
from dllm_bench.decoding.rounds import CLOSED, FORCED, MASKS, WINNER, RoundLog, WindowTracker
from dllm_bench.decoding.switches import Guidance, Smoothing, guided_forward
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

FINISHED = "finished"  # host: whether each branch is finished although positions are masked
ORDER = "select explore revise cache score stop schedule guidance smoothing".split()
COMMITTING, REVISING = 2, 64
"""Forwards per position after which a request is taken for one without an end: the second where a
forward may commit nothing or undo commits."""
LARGE = 8192  # from this vocabulary size on, leaving rows out of head and softmax saves time


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
    forbid_mask: bool = True  # excludes the mask token from the model's distribution, so that no
    # position is "decoded" to a mask; most published samplers leave it in
    guidance: Amount = 0.0  # scale of classifier-free guidance, 0 for none
    forbid: EndTokens | None = None  # also excludes end tokens (LLaDA's `logits_eos_inf`: eos)

    smoothing: Amount = field(default=0.0, metadata=DEFAULT_LEFT_OUT)  # largest weight of the mean
    # embeddings that are added at masks (dInfer's cont_weight: 0.3), 0 for none

    def slots(self) -> Mapping[str, Piece]:
        """Return the pieces by the name of their slot, including those of the switches."""
        guidance = {"guidance": Guidance(self.guidance)} if self.guidance else {}
        smoothing = {"smoothing": Smoothing(self.smoothing)} if self.smoothing else {}
        return {**super().slots(), **guidance, **smoothing}

    @property
    def needs(self) -> Needs:
        """A mask token, and attention to it, unless every decoded position is the last one that its
        forward sees."""
        single = {BlockLength(1), Condition.ABSOLUTE_BLOCKS} <= self.schedule.gives
        is_causal = single and Condition.FULL_ATTENTION not in self.cache.gives
        is_causal |= Condition.CAUSAL in self.cache.gives
        token = Condition.MASK_TOKEN
        return needing({"model": token if is_causal else (token, Condition.MASKS)})

    def summary(self) -> DecoderSummary:
        branches, opens = self.number(MostBranches) or 1, self.schedule.gives
        single = branches == 1 and (Condition.ONE_OPEN_BLOCK in opens or not self._stalls)
        form = "full" if Condition.FULL_ATTENTION in self.cache.gives else "block_causal"
        return DecoderSummary(
            branches=branches,
            block=self.schedule.block,
            one_token_per_forward=single and Condition.ONE_PER_FORWARD in self.select.gives,
            attention="feed_order" if Condition.FEED_ORDER in self.cache.gives else form,
            caches=Condition.NO_CACHE not in self.cache.gives,
            uses_seed=self.any_gives(Condition.DRAWS),
            warning=self._warning(),
        )

    def _warning(self) -> str | None:
        """Return a warning for a combination known to lower the score: a whole generation filled
        with the most probable tokens, in a schedule that was published for sampled ones.
        """
        drawn = Condition.FOR_DRAWN_TOKENS in self.select.gives
        if self.schedule.block or not drawn or Condition.DRAWS in self.score.gives:
            return None
        return (
            f"{type(self.select).__name__} over a whole generation was published for drawn tokens, "
            "and this decoder takes the most probable ones (temperature 0), which can end texts "
            "early and cost much of the score; draw them with decoder/score=sampled "
            "decoder.score.temperature=0.2."
        )

    def generate(
        self, model: Denoiser, request: Request, workers: WorkerGroup = ONE_WORKER
    ) -> Generation:
        """Decode `request`; `workers` divide its branches among them."""
        return next(run_batched(model, [self.decode(model, request, workers)], 1))

    def generate_stream(
        self, model: Denoiser, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode `batch` requests at a time; yield each as soon as it is finished.

        Batched and unbatched decoding produce identical tokens. The duration of a forward includes
        the time its request waited for the others.
        """
        self.check_run_fits(model, batch)
        return run_batched(model, (self.decode(model, request) for request in requests), batch)

    def decode(
        self, model: Denoiser, request: Request, workers: WorkerGroup = ONE_WORKER
    ) -> DecodeSteps:
        """Run the loop: yield the copies and forwards it requests, return the generation."""
        request = self.prepare(model, request)
        round, tracker, log = self._begin(model, request, workers)
        last: tuple[Scores, Window] | None = None
        while True:
            round.state = self.explore.spawn(round.state, last)
            yield from self._learn(round, tracker)
            if not self._open_blocks(round, tracker, log):
                return log.generation(round)
            round.plan = self.cache.plan(round)
            self._act("on_plan", round)
            branches, window = round.state, round.window
            log.begin(round.plan, branches, copies=2 if self.guidance else 1)
            round.state, round.window, plan = workers.divide(branches, window, round.plan)
            round.plan = self._choose_rows(model, plan, round.window)
            round.logits_KXV = yield from guided_forward(round, self.guidance)
            ends = model.special.named(self.forbid) if self.forbid else []
            forbid(round.logits_KXV, [model.special.mask] * self.forbid_mask + ends)
            round.scores = self._score(round)
            self._act("on_scores", round)
            self._commit_best(branches, window, round, workers)
            log.end(round.plan, branches)
            self._act("on_commit", round)
            round.state.forwards += 1
            self._check_progress(round, log)
            last = (round.scores, round.window)

    @cached_property
    def _moments(self) -> Mapping[str, Sequence[MaskedPiece]]:
        """The pieces that act at each moment of a round."""
        return {
            name: [p for p in self._ordered if getattr(type(p), name) is not default]
            for name, default in vars(MaskedPiece).items()
            if name.startswith("on_")
        }

    @cached_property
    def _ordered(self) -> Sequence[MaskedPiece]:
        """The pieces in the order in which they act."""
        slots = self.slots()
        wholes = [slots[slot] for slot in ORDER if slot in slots]
        pieces = (piece for whole in wholes for piece in (whole, *parts_of(whole)))
        return [piece for piece in pieces if isinstance(piece, MaskedPiece)]

    def _act(self, moment: str, round: Round) -> None:
        for piece in self._moments[moment]:
            getattr(piece, moment)(round)

    def _begin(
        self, model: Denoiser, request: Request, workers: WorkerGroup
    ) -> tuple[Round, WindowTracker, RoundLog]:
        """Return the first round of a request, with the objects that track its blocks and log its
        rounds."""
        pinned = {f"request {request.id!r} with pinned tokens": needing(FIXED_CANVAS)}
        self.check_run_fits(model, asked={**workers.needs, **(pinned if request.pinned else {})})
        grid = self.schedule.grid(len(request.prompt_ids), request.max_new_tokens)
        grid = replace(grid, given=tuple(grid.prompt_len + place for place in dict(request.pinned)))
        state = DecodeState.start(request, model.special, model.device, grid.length)
        if Condition.NO_CHANGES not in self.revise.gives:
            state.changes_KL = torch.zeros_like(state.born_KL)
        kv = model.new_cache(state.length)
        whole, to_end = map(self.any_gives, (Condition.FROM_FIRST_BLOCK, Condition.TO_LAST_BLOCK))
        tracker = WindowTracker(self.schedule, grid, whole, to_end)
        moves = Condition.FIXED_CANVAS not in self.schedule.gives
        log = RoundLog(kv, self._drafts, moves, self.number(RenewalRounds))
        return Round(request, state, kv, model, decoder=self), tracker, log

    def _learn(self, round: Round, tracker: WindowTracker) -> Steps[None]:
        """Copy the values that the pieces and the loop need to the host: the round's only wait."""
        self._act("on_start", round)
        flags = self.stop.ended(round.state)
        round.ask(MASKS, tracker.masks_left(round))
        round.ask(CLOSED, flags.closed_K)
        round.ask(FINISHED, flags.finished_K)
        round.ask(HOLD, round.state.memo.get(HOLD))
        round.answer((yield from host_values(round.question())))

    def _open_blocks(self, round: Round, tracker: WindowTracker, log: RoundLog) -> bool:
        """Open blocks, as decided from the values on the host, and keep the branches that take part
        in the forward.

        Returns whether decoding goes on.
        """
        host, branches = round.host, round.state
        branches.truncate(host.get(LENGTH, [branches.length])[0])
        log.learn(round)
        progress = tracker.progress(round, log.winner)
        opened = [min(self.schedule.opened(one), one.grid.blocks) for one in progress]
        log.masks = progress[-1].open_masks(opened[-1])
        log.open_end = tracker.grid.start(opened[-1])
        if progress[-1].all_finished(opened[-1]) or host.get(FINISHED, [0])[-1]:
            return False
        worth, base = progress[-1].open_masks(progress[-1].opened), branches.branches - 1
        if worth < base:
            kept = [*range(worth), base]
            round.state = branches.take(to_device(kept, branches.tokens_KL.device))
            progress, opened = [progress[k] for k in kept], [opened[k] for k in kept]
        if self._drafts:
            opened = opened[-1:] * len(opened)
        round.window = tracker.move(progress, opened, round.state)
        return True

    @cached_property
    def _drafts(self) -> bool:
        return Condition.DRAFTS in self.explore.gives

    @cached_property
    def _stalls(self) -> bool:
        """Whether the stall rule may have to choose a position: where the selector may choose none,
        or none in one of several open blocks.

        A schedule that needs a selector that never stalls does not ask it of each block.
        """
        gives, never = self.select.gives | self.schedule.gives, Condition.NEVER_STALLS
        one = Condition.ONE_OPEN_BLOCK in gives or needing({"select": never}) <= self.schedule.needs
        return Condition.IDLES not in gives and not (self.forbid_mask and one and never in gives)

    def _commit_best(
        self, branches: DecodeState, window: Window, round: Round, workers: WorkerGroup
    ) -> None:
        """Continue with the best branch of all workers' `branches`, and commit the selector's
        choice. Drafts are rated after that commit, so each of them makes it."""
        forced = self._commit(round.state, round.scores, round.window) if self._drafts else None
        winner = constant(0, branches.tokens_KL.device)
        if branches.branches > 1:
            rating_K = self.explore.rate(round.scores, round.window, round.state)
            winner = self.explore.pick(workers.gather(rating_K))
            round.ask(WINNER, winner)
            round.window = window.pick(winner)
        workers.keep(round.kv, round.plan, winner)
        own = round.state, round.scores
        round.state, round.scores = workers.collect_winner(winner, branches, *own, self._drafts)
        if not self._drafts:
            forced = self._commit(round.state, round.scores, round.window)
        elif forced is not None:
            forced = workers.gather(forced.sum(1)).index_select(0, winner.reshape(1))
        round.ask(FORCED, forced)

    def _commit(self, state: DecodeState, scores: Scores, window: Window) -> Tensor | None:
        """Commit the selector's choice.

        Returns the positions that the stall rule added (K, W), None if it was not needed.
        """
        ids_KW, forced_KW = scores.ids_KW, None
        where_KW = self.select(scores, window, state) & window.eligible_KW
        if self._stalls:
            fallback_KW, fallback_ids_KW = self.select.on_stall(scores, window, state)
            forced_KW = window.forced(where_KW, fallback_KW)
            if fallback_ids_KW is not ids_KW:
                ids_KW = torch.where(forced_KW, fallback_ids_KW, ids_KW)
            where_KW = where_KW | forced_KW
        state.fill(where_KW, ids_KW, window.start)
        return forced_KW

    def _choose_rows(self, model: Denoiser, plan: ForwardPlan, window: Window) -> ForwardPlan:
        """Return the plan with logits of all rows that are read, and of no others if leaving them
        out saves time.

        Gathering rows costs more than it saves if the vocabulary is small and the score cheap.
        """
        if plan.sets is None and self._reads == "fed":
            plan = replace(plan, rows=(plan.rows[0], max(plan.rows[1], plan.feed[1])))
        if window.masks is None or not model.picks_rows or self._reads != "masked":
            return plan
        if not (Condition.COSTLY_ROWS in self.score.gives or model.vocab_size >= LARGE):
            return plan
        if plan.rows[1] > window.stop or (plan.sets is not None and plan.sets.counts_rest):
            return plan
        if plan.scored_M is not None:
            return replace(plan, only_M=plan.scored_M)
        eligible_X = window.eligible_KW.flatten().view(torch.uint8)
        only_M = eligible_X.sort(descending=True, stable=True).indices[: window.masks]
        return replace(plan, only_M=only_M)

    @cached_property
    def _reads(self) -> Reads:
        """The widest `Reads` of all pieces."""
        return max((piece.reads_rows for piece in self._ordered), key=READS.index)

    def _score(self, round: Round) -> Scores:
        """Return scores of the window; 0 at positions whose logits were not computed."""
        plan, branches, window = round.plan, round.state, round.window
        logits_KRV, mask = round.rows_KRV, branches.special.mask
        branches.may_choose_mask = not self.forbid_mask or plan.scored_M is not None
        if plan.only_M is not None:
            scores = self.score(logits_KRV, branches, replace(window, rows_M=plan.only_M))
            return scores.spread(plan, window.eligible_KW.shape, mask)
        if logits_KRV.shape[1] > window.width and self.score.reads_rows != "fed":
            logits_KRV = logits_KRV[:, : window.width]
        return self.score(logits_KRV, branches, window).without_unfed(plan, mask)

    def _check_progress(self, round: Round, log: RoundLog) -> None:
        """Stop an endless loop: if all candidates are the mask token a round commits nothing, and a
        reviser may undo what the selector commits.
        """
        state = round.state
        may_wait = state.changes_KL is not None or Condition.IDLES in self.select.gives
        limit = REVISING if may_wait else COMMITTING
        if len(log.rows) <= limit * (max(state.length, state.wanted) - state.prompt_len):
            return
        reason, instead = "the model predicts the mask token at all masks", ""
        if state.changes_KL is not None:
            reason = f"{type(self.revise).__name__} keeps changing its tokens"
            instead = "decoder.revise.per_position, the changes of a position, or "
        raise DllmBenchError(
            f"Request {round.request.id!r} is not finished after {len(log.rows)} forwards: "
            f"{reason}; set {instead}decoder.forbid_mask=true."
        )
