"""The only denoising loop: a request becomes a generation by masked diffusion decoding.

One round: spawn branches, open blocks, plan, forward, score, pick a branch, select, commit. What
happens in each word is the business of the piece of that name; a paper's method is a choice of six
pieces. The loop guarantees progress (a block that must progress and gets nothing commits what the
selector's stall rule says) and copies to the host once per round. It is a coroutine, so that
several requests may share copies and forwards (`together`). It leaves text to the runner.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice, pairwise

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Explore, Piece, Schedule, Score, Scores, Select, Stop
from dllm_bench.core.denoiser import Denoiser, ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import EndTokens, Generation, Request, cut_reasons
from dllm_bench.core.state import CUT, DecodeState
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.core.workers import ONE_WORKER, WorkerGroup
from dllm_bench.decoding.batching import DecodeSteps, run_batched
from dllm_bench.decoding.explore.greedy import Greedy
from dllm_bench.decoding.guidance import check_guidance, guided
from dllm_bench.decoding.numerics import check_choice, top1
from dllm_bench.decoding.schedule.window import WindowTracker, masks_per_block
from dllm_bench.decoding.stop.filled import Filled
from dllm_bench.registry import register

LARGE = 8192  # a vocabulary whose head and softmax are worth leaving rows out


@register("decoder.masked")
@dataclass(frozen=True)
class MaskedDecoder:
    """Six pieces and three switches; equal decoders produce equal tokens.

    forbid_mask takes the mask token out of the model's distribution, so that no position can be
    "decoded" to a mask (published samplers leave it in); forbid does so with end tokens (LLaDA's
    `logits_eos_inf`: eos). guidance is the scale of classifier-free guidance, 0 for none.
    """

    score: Score
    select: Select
    schedule: Schedule
    cache: Cache
    explore: Explore = field(default_factory=Greedy)
    stop: Stop = field(default_factory=Filled)
    forbid_mask: bool = True
    guidance: float = 0.0
    forbid: EndTokens | None = None

    def __post_init__(self) -> None:
        if self.forbid is not None:
            check_choice(self, "forbid", self.forbid, EndTokens)
        check_fit(self.slots())
        check_guidance(self.guidance, self.cache)

    def slots(self) -> dict[str, Piece]:
        """The pieces by the name of their slot."""
        values = {slot.name: getattr(self, slot.name) for slot in fields(self)}
        return {name: piece for name, piece in values.items() if isinstance(piece, Piece)}

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """The request with what the pieces have to know beforehand (the oracle's reference)."""
        for piece in self.slots().values():
            for part in (piece, *piece.parts()):
                request = part.prepare(model, request)
        return request

    def generate(
        self, model: Denoiser, request: Request, workers: WorkerGroup = ONE_WORKER
    ) -> Generation:
        """Decode `request`; `workers` share its branches."""
        (generation,) = run_batched(model, [self.steps(model, request, workers)], 1)
        return generation

    def generate_stream(
        self, model: Denoiser, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode `batch` requests at a time; each as soon as it is finished.

        A text is what its request gives alone. The time of a row is what passed for its request,
        waiting for the others included.
        """
        return run_batched(model, (self.steps(model, request) for request in requests), batch)

    def steps(
        self, model: Denoiser, request: Request, workers: WorkerGroup = ONE_WORKER
    ) -> DecodeSteps:
        """The loop, as a coroutine: it asks for values on the host and for forwards, in turns."""
        request = self.prepare(model, request)
        length = self.schedule.length(len(request.prompt_ids), request.max_new_tokens)
        state = DecodeState.start(request, model.special, model.device, length)
        kv = model.new_cache(state.length)
        if self.cache.reuse != "none":
            grid = self.cache.grid(self.schedule.block or 1)
            model.reuse_prefix(kv, request.prompt_ids, grid, by=self)
        rounds = _Rounds(room=state.length - state.prompt_len)
        frontier = WindowTracker(self.schedule, state.prompt_len)
        alone = torch.zeros((), dtype=torch.long, device=model.device)  # the only branch's index
        last: tuple[Scores, Window] | None = None
        while True:
            branches = self.explore.spawn(state, last)
            branches, window = yield from self._open(branches, frontier, rounds)
            if window is None:
                return rounds.generation(request, branches)
            plan = self.cache.plan(branches, window, kv)
            held = min(kv.length, branches.length)
            rounds.began(plan, branches.branches * (2 if self.guidance else 1), plan.cached(held))
            if self.stop.reads_ahead:
                plan = replace(plan, rows=(plan.rows[0], plan.feed[1]))
            here, part, plan = workers.deal(branches, window, plan)
            plan = self._choose_rows(model, plan, part)
            logits_KRV = yield from guided(here, plan, kv, self.guidance)
            if self.forbid_mask:
                logits_KRV.select(-1, model.special.mask).fill_(-torch.inf)
            if self.forbid:
                logits_KRV[..., model.special.named(self.forbid)] = -torch.inf
            scores = self._score(logits_KRV, here, part, plan.only_M)
            ahead = self._ahead(logits_KRV, window)
            winner, several = alone, branches.branches > 1
            if several:
                winner = self.explore.pick(workers.gather(self.explore.rate(scores, part, here)))
            workers.keep(kv, plan, winner)
            state, (scores, *ahead) = workers.settle(winner, branches, here, (scores, *ahead))
            window = window.pick(winner) if several else window
            rounds.outcome = winner if several else None, self._commit(state, scores, window)
            rounds.cut = self._shorten(state, window, scores, *ahead)
            rounds.check_progress(request)
            last = (scores, window)

    def _open(
        self, branches: DecodeState, frontier: WindowTracker, rounds: _Rounds
    ) -> Generator[Tensor, list[int], tuple[DecodeState, Window | None]]:
        """Copy to the host, once, all that shapes the next forward, and open blocks."""
        masked_KL = branches.masked_KL
        told = yield from self._survey(branches, masked_KL, frontier.window, rounds)
        length = told.get("length", [branches.length])[0]
        branches.truncate(length)
        closed = told.get("closed", [False] * branches.branches)
        progress = frontier.progress(length, rounds.winner, told["masks"], closed)
        opened = list(map(self.schedule.opened, progress))
        left = progress[-1].open_masks(opened[-1])
        rounds.tick(left, progress[-1].grid.start(opened[-1]))
        if left == 0 or told.get("finished", [False])[-1]:
            return branches, None
        valid = told.get("valid", [branches.branches - 1])[0]
        if valid < branches.branches - 1:
            kept = [*range(valid), branches.branches - 1]
            index = torch.tensor(kept, device=masked_KL.device)
            branches, masked_KL = branches.take(index), masked_KL.index_select(0, index)
            progress, opened = [progress[k] for k in kept], [opened[k] for k in kept]
        return branches, frontier.move(progress, opened, masked_KL)

    def _survey(
        self, branches: DecodeState, masked_KL: Tensor, window: Window | None, rounds: _Rounds
    ) -> Generator[Tensor, list[int], dict[str, list[int]]]:
        """What the host has to know, by name; what no piece has anything to say of is left out."""
        ended = self.stop.ended(branches)
        found = {
            "masks": masks_per_block(masked_KL, window),
            "closed": ended.closed_K,
            "finished": ended.finished_K,
            "valid": self.explore.valid(branches),
            "length": (branches.born_KL[-1] != CUT).sum() if rounds.cut else None,
            **rounds.asked(),
        }
        asked = {name: part.reshape(-1) for name, part in found.items() if part is not None}
        values = iter((yield torch.cat(list(asked.values()))))
        told = {name: list(islice(values, part.shape[0])) for name, part in asked.items()}
        rounds.learn(told)
        return told

    def _commit(self, state: DecodeState, scores: Scores, window: Window) -> Tensor | None:
        """Write what the selector chose; returns how many positions the stall rule added (0-d),
        None where it is not asked.
        """
        where_KW, ids_KW, forced = self.select(scores, window, state), scores.ids_KW, None
        where_KW = where_KW & window.eligible_KW
        if not (self.select.never_stalls and self.forbid_mask):
            rescue_KW, rescue_ids_KW = self.select.on_stall(scores, window, state)
            forced_KW = window.rescued(where_KW, rescue_KW)
            if rescue_ids_KW is not ids_KW:
                ids_KW = torch.where(forced_KW, rescue_ids_KW, ids_KW)
            where_KW, forced = where_KW | forced_KW, forced_KW.sum()
        state.commit(where_KW, ids_KW, window.start)
        state.forwards += 1
        return forced

    def _choose_rows(self, model: Denoiser, plan: ForwardPlan, window: Window) -> ForwardPlan:
        """The plan with the rows worth their logits, where only scores of masked positions count.

        All rows where gathering some costs more than a small vocabulary's head and softmax.
        """
        if window.masks is None or not model.picks_rows:
            return plan
        if not ((self.score.costly or model.vocab_size >= LARGE) and self._reads_masked_alone):
            return plan
        open_X = window.eligible_KW.flatten().byte()
        only_M = open_X.sort(descending=True, stable=True).indices[: window.masks]
        return replace(plan, only_M=only_M)

    @cached_property
    def _reads_masked_alone(self) -> bool:
        """Whether logits of decoded positions change nothing."""
        if self.guidance or self.stop.reads_ahead or not self.score.row_by_row:
            return False
        pieces = self.slots().values()
        return not any(part.reads_decoded for piece in pieces for part in (piece, *piece.parts()))

    def _score(
        self, logits_KRV: Tensor, branches: DecodeState, window: Window, only_M: Tensor | None
    ) -> Scores:
        """Scores of the window; 0 at positions whose logits were not asked for."""
        if only_M is None:
            if logits_KRV.shape[1] > window.width:
                logits_KRV = logits_KRV[:, : window.width]
            return self.score(logits_KRV, branches, window)
        scores = self.score(logits_KRV, branches, replace(window, rows_M=only_M))
        shape = window.eligible_KW.shape
        three = (scores.ids_KW, scores.probability_KW, scores.confidence_KW)
        spread = (v.new_zeros(shape.numel()).index_copy_(0, only_M, v[0]) for v in three)
        return Scores(*(values.view(shape) for values in spread))

    def _ahead(self, logits_KRV: Tensor, window: Window) -> list[Scores]:
        """Candidates behind the window, where the stop rule reads them."""
        if not self.stop.reads_ahead:
            return []
        ids_KA, probability_KA = top1(logits_KRV[:, window.width :])
        return [Scores(ids_KA, probability_KA, probability_KA)]

    def _shorten(self, state: DecodeState, window: Window, *found: Scores) -> bool:
        """Cut the canvas where the stop rule predicts the end of the text; whether it predicts."""
        scores = found[0]
        if len(found) > 1:
            ids_1A = torch.cat([part.ids_KW for part in found], 1)
            probability_1A = torch.cat([part.probability_KW for part in found], 1)
            scores = Scores(ids_1A, probability_1A, probability_1A)
        length = self.stop.shorten(state, scores, window)
        if length is not None:
            state.cut(length)
        return length is not None


@dataclass
class _Rounds:
    """Facts of the rounds of one request; a round's outcome comes with the next host copy.

    room: positions behind the prompt, which filled-up blocks make more than were asked for.
    """

    room: int
    ticks: list[tuple[float, int]] = field(default_factory=list)  # when, masks of the open blocks
    forwards: list[tuple[ForwardKind, int, int, int]] = field(default_factory=list)
    winners: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    outcome: tuple[Tensor | None, Tensor | None] | None = None
    cut: bool = False
    open_end: int = 0

    @property
    def winner(self) -> int:
        """The branch that went on from the last round."""
        return self.winners[-1] if self.winners else 0

    def asked(self) -> dict[str, Tensor | None]:
        """Winner and number of forced positions of the last round, on the device; None for 0."""
        winner, forced = self.outcome or (None, None)
        return {"winner": winner, "forced": forced}

    def learn(self, told: dict[str, list[int]]) -> None:
        """The same on the host, once there was a round."""
        if self.outcome is not None:
            self.winners += told.get("winner", [0])
            self.forced += told.get("forced", [0])

    def tick(self, masks: int, open_end: int) -> None:
        """Called right after the host copy of a round, when the device has caught up."""
        self.ticks.append((time.perf_counter(), masks))
        self.open_end = open_end

    def began(self, plan: ForwardPlan, branches: int, cached: int) -> None:
        """The round's forward: its plan, the branches in it, the positions read from the cache."""
        self.forwards.append((plan.kind, branches, plan.feed[1] - plan.feed[0], cached))

    def check_progress(self, request: Request) -> None:
        """A round commits at least one token, unless the model's candidate is the mask itself."""
        if len(self.forwards) > 2 * self.room:
            raise DllmBenchError(
                f"Request {request.id!r} is not decoded after {len(self.forwards)} forwards: the "
                "model predicts the mask token at all masks; set decoder.forbid_mask=true."
            )

    def trace(self) -> Trace:
        """Round i lasts from its own host copy to the next one."""
        rows = zip(self.forwards, pairwise(self.ticks), self.winners, self.forced, strict=True)
        return Trace(
            [
                Forward(*asked, 1000 * (after - before), winner, forced, masks)
                for asked, ((before, masks), (after, _)), winner, forced in rows
            ]
        )

    def generation(self, request: Request, state: DecodeState) -> Generation:
        """All open positions after the prompt, whatever follows the first end token included."""
        span = slice(state.prompt_len, self.open_end)
        ids = tuple(state.tokens_KL[-1, span].tolist())
        born = tuple(state.born_KL[-1, span].tolist())
        cut = cut_reasons(ids, request.max_new_tokens, state.special)
        return Generation(request.id, ids, born, cut, self.trace())


def check_fit(slots: dict[str, Piece]) -> None:
    """Match what the pieces need with what the others give.

    Raises DllmBenchError naming both pieces and the missing condition.
    """
    for slot, whole in slots.items():
        for piece in (whole, *whole.parts()):
            for wanted, condition in sorted(piece.needs):
                other = slots[wanted]
                if condition not in other.gives:
                    raise DllmBenchError(
                        f"{slot} {type(piece).__name__} needs a {wanted} with {condition}, which "
                        f"{type(other).__name__} does not give; choose another {wanted} or {slot}."
                    )
