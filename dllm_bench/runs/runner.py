"""The path of a run from its spec to a sealed record: resume, warm up, decode, grade, seal.

Only `decoder.generate` is timed, with the device synchronised before and after; encoding, decoding
to text, cutting, disk and display happen outside of the timed part. Every sample is independent:
its random numbers follow from the run's seed and its id, so a resumed run gives the same result as
an uninterrupted one. Scheduling several runs is in `launch`.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dllm_bench.benchmarks.items import cut_at_stop, in_passes, repetition_of, text_of
from dllm_bench.core.benchmark import JUDGE_ERROR, Benchmark, SampleScore
from dllm_bench.core.decoder import Decoder
from dllm_bench.core.denoiser import Denoiser, ForwardPlan
from dllm_bench.core.errors import FALLBACKS, DllmBenchError
from dllm_bench.core.request import Generation, Request, cut_reasons
from dllm_bench.core.state import check_no_masks
from dllm_bench.core.trace import ForwardKind, Trace
from dllm_bench.metrics.sample_stats import count_sample, emitted_ids
from dllm_bench.runs.dependencies import REAL, Dependencies, Loaded, restore_scheduling
from dllm_bench.runs.progress import Observer, ObserverGroup, RunningMetrics
from dllm_bench.store import provenance
from dllm_bench.store.inputs import memory_bytes, wait_for
from dllm_bench.store.record import (
    FALLBACK,
    WARNING,
    BaselineSample,
    RunRecord,
    SampleRecord,
    Session,
    prompt_sha256,
)
from dllm_bench.store.seal import seal
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import OpenRunFolder, Store

WARMUPS = 2
Made = TypeVar("Made")


def run(
    spec: RunSpec,
    *,
    store: Store,
    logger: Observer | None = None,
    progress: Observer | None = None,
    deps: Dependencies = REAL,
    session: type[RunSession] | None = None,
) -> RunRecord:
    """Return the record of `spec`: read if it is sealed, else the missing samples are decoded.

    session: the way requests are decoded, by default one at a time. An exception of decoding is
    written into the run's folder and raised again.
    """
    sealed = store.record(spec)
    if sealed is not None:
        return sealed
    with _open_session(spec, store, ObserverGroup([logger, progress]), deps, session) as current:
        return current.opened.record or current.finish(current.decode())


def run_in_turns(
    specs: Sequence[RunSpec],
    *,
    store: Store,
    loggers: Sequence[Observer | None],
    progress: Observer | None = None,
    deps: Dependencies = REAL,
) -> list[Exception | None]:
    """Make runs of several passes over their items, alternating between the runs pass by pass.

    Returns the error of each run, None if it is sealed; an error does not stop the others. All are
    warmed up once, and their folders stay open until the last pass.
    """
    failed: dict[int, Exception] = {}
    waiting: dict[int, RunSession] = {}  # of the runs that are neither sealed nor failed

    @contextmanager
    def caught(index: int) -> Iterator[None]:
        """Record an exception of the block as the run's error, and write it into its folder."""
        try:
            yield
        except Exception as error:
            failed[index] = error
            if session := waiting.pop(index, None):
                session.opened.fail(f"{type(error).__name__}: {error}")

    with ExitStack() as stack:
        for index, spec in enumerate(specs):
            opened = _open_session(spec, store, ObserverGroup([progress]), deps, None)
            with caught(index):
                session = stack.enter_context(opened)
                if session.opened.record is None:
                    waiting[index] = session
        for passes in range(1, max((spec.repeats for spec in specs), default=0)):
            for index, session in list(waiting.items()):
                with caught(index):
                    session.decode(passes)
        for index, session in list(waiting.items()):
            # a logger has one run at a time: it begins with the last pass
            session.observer = ObserverGroup([loggers[index], progress])
            with caught(index):
                session.finish(session.decode())
            session.observer.close()
    return [failed.get(index) for index in range(len(specs))]


@contextmanager
def _open_session(
    spec: RunSpec,
    store: Store,
    observer: Observer,
    deps: Dependencies,
    session: type[RunSession] | None,
) -> Iterator[RunSession]:
    """Yield the run's session, with its folder open; an exception is written into the folder."""
    prepared = prepare(spec, deps)
    with store.open(spec) as opened:
        try:
            yield (session or RunSession)(spec, deps, *prepared, opened, observer)
        except Exception as error:
            opened.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            observer.close()


def prepare(spec: RunSpec, deps: Dependencies) -> tuple[Benchmark, Decoder, Decoder | None, Loaded]:
    """Return what a session decodes with. The model is loaded last, after everything else is known
    to exist.
    """
    benchmark = deps.benchmark(spec)
    benchmark.check()
    decoder = deps.decoder(spec)
    baseline = deps.decoder(spec.of_baseline) if spec.baseline else None
    for one in (decoder, *([] if baseline is None else [baseline])):
        require_kind(spec, benchmark, one)
    deps.prepare(spec)
    return benchmark, decoder, baseline, deps.model(spec)


def require_kind(spec: RunSpec, benchmark: Benchmark, decoder: Decoder | None) -> None:
    """Raise DllmBenchError unless the decoder's output is what the benchmark needs: a text, or
    likelihoods of options.
    """
    scores = decoder is not None and decoder.summary().scores_options
    if benchmark.asks_likelihoods and not scores:
        raise DllmBenchError(
            f"Benchmark {benchmark.name!r} asks for the likelihoods of options, and "
            f"{spec.label} generates text; choose decoder=likelihood (draws) or "
            "decoder=likelihood_exact."
        )
    if scores and not benchmark.asks_likelihoods:
        raise DllmBenchError(
            f"Benchmark {benchmark.name!r} asks for texts, and {spec.label} gives likelihoods of "
            "options alone; choose another decoder."
        )
    if scores and spec.batch > 1:
        raise DllmBenchError(
            f"{spec.label} scores one item at a time, and batch={spec.batch} was asked for; set "
            "batch=1 (decoder.together says how many masks share a forward)."
        )


@dataclass
class RunSession:
    """One session of one run: from opening its folder to sealing it, or to an interruption."""

    spec: RunSpec
    deps: Dependencies
    benchmark: Benchmark
    decoder: Decoder
    baseline: Decoder | None  # decodes every request too, in alternating order
    loaded: Loaded
    opened: OpenRunFolder
    observer: Observer
    _started: int | None = None  # index of this session, once it has warmed up

    @cached_property
    def parent(self) -> Parent | None:
        """The model that reads the texts, if the run names one."""
        spec = self.spec
        return Parent(self.deps.parent(spec), spec.parent["name"]) if spec.parent else None

    def requests(self) -> list[Request]:
        """Return the requests of the run's `limit` items, in the benchmark's order; ids are
        distinct.

        If items are repeated, all of them come once, then all again: repetition k is pass k.
        """
        every = self.benchmark.requests(self.loaded.encode)
        requests = in_passes(every, self.spec.limit, self.spec.repeats)
        if not requests:
            raise DllmBenchError(
                f"Benchmark {self.benchmark.name} with limit {self.spec.limit} gives no request; "
                "raise the limit."
            )
        if len({request.id for request in requests}) < len(requests):
            raise DllmBenchError(f"Benchmark {self.benchmark.name} gives two requests one id.")
        return requests

    def decode(self, passes: int | None = None) -> list[SampleRecord]:
        """Decode the missing samples of the first `passes` repetitions (None: all); return all
        samples in request order.
        """
        requests = self.requests()
        self._check(requests)
        self.opened.expect(len(requests))
        running = self._running(requests)
        self.observer.start(self.spec, self.opened.folder, running)
        missing = [
            (turn, request)
            for turn, request in enumerate(requests)
            if self.opened.wants(turn, request.id)
            and (passes is None or repetition_of(request.id) < passes)
        ]
        if missing:
            if self._started is None:
                self._started = self._begin(requests)
            started = self.deps.clock()
            asked = {request.id: request for _, request in missing}
            for sample in self._samples(missing, self._started):
                if self.parent:
                    sample = self.parent.read(sample, asked[sample.id])
                self.opened.append(sample)
                value, session_s = self._value(sample), self.deps.clock() - started
                running.add(sample.id, sample.stats(), value, session_s)
                self.observer.sample(sample, running)
        done = self.opened.samples
        return [done[request.id] for request in requests if request.id in done]

    def _samples(
        self, missing: Sequence[tuple[int, Request]], session: int
    ) -> Iterator[SampleRecord]:
        """Decode requests, given with their index in the run; yields samples as they finish."""
        for turn, request in missing:
            yield self._sample(request, turn, session)

    def finish(self, samples: Sequence[SampleRecord]) -> RunRecord:
        """Grade the stored texts and seal the run."""
        scores = self._scores(samples)
        missing = [sample.id for sample in samples if sample.id not in scores]
        if missing:
            raise DllmBenchError(
                f"Benchmark {self.benchmark.name} left {len(missing)} of {len(samples)} samples "
                f"without a score, {missing[0]!r} first; fix its scorer and run again."
            )
        record = seal(self.spec, samples, scores, self.opened.sessions, self.deps.now())
        self.opened.seal(record)
        self.opened.note(f"sealed with {len(samples)} samples")
        self.observer.finish(record)
        return record

    def _scores(self, samples: Sequence[SampleRecord]) -> dict[str, SampleScore]:
        """Grade the texts; texts graded in a record of fewer items keep their grade."""
        known: dict[str, SampleScore] = {}
        if before := self.opened.of_fewer_items:
            old = {s.id for s in samples if s.session < len(before.sessions)}
            grades = before.grades.items()
            known = {k: grade for k, grade in grades if k in old and grade.verdict != JUDGE_ERROR}
        texts = {sample.id: sample.text for sample in samples if sample.id not in known}
        return {**known, **self.benchmark.score(texts)}

    def _check(self, requests: Sequence[Request]) -> None:
        """Refuse to resume if the stored samples answer other prompts than the benchmark gives."""
        done = self.opened.samples  # more than the requests, if continued with fewer items
        for request in requests:
            sample = done.get(request.id)
            if sample is not None and sample.prompt_sha256 != prompt_sha256(request):
                raise DllmBenchError(
                    f"{self.opened.folder} holds sample {sample.id!r} of another prompt than "
                    f"benchmark {self.benchmark.name} gives now: its items or its template changed "
                    "under the run; move the folder away and give the same command again."
                )

    def _running(self, requests: Sequence[Request]) -> RunningMetrics:
        running = RunningMetrics(len(requests), note=self._note())
        for request in requests:
            if sample := self.opened.samples.get(request.id):
                running.add(sample.id, sample.stats(), self._value(sample))
        return running

    def _note(self) -> str | None:
        """Return a warning if the decoder uses another attention than the weights were trained
        with, or if its combination of pieces lowers the score.
        """
        decoder, loaded = self.decoder.summary(), self.loaded
        form, block = decoder.attention, decoder.block or 0
        attention = None if form is None else loaded.attention_warning(form, block)
        return " ".join(filter(None, [attention, decoder.warning])) or None

    def _begin(self, requests: Sequence[Request]) -> int:
        """Warm up on fixed requests, whose results are discarded, and store the session's start."""
        restore_scheduling()
        if self.parent:
            self.parent.check(self.loaded)
        warmups = requests[:WARMUPS]
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        branches = max(decoder.summary().branches for decoder in self._in_turn(0).values())
        self.loaded.denoiser.expect_canvas(longest, branches)
        largest = max(warmups, key=lambda request: request.max_new_tokens)
        require_memory(self.spec, self.decoder, self.loaded, largest)
        self._warm_up(warmups)
        environment = provenance.environment_of(self.spec)
        if note := self._note():
            environment[WARNING] = note
        if FALLBACKS:
            environment[FALLBACK] = " ".join(FALLBACKS)
        return self._store_session(len(warmups), environment)

    def _store_session(self, warmups: int, environment: dict[str, Any]) -> int:
        """Store the session's start, and return its index."""
        index = self.opened.begin(Session(self.deps.now(), warmups, environment))
        self.opened.note(f"session {index}: {len(self.opened.samples)} samples were done")
        return index

    def _warm_up(self, warmups: Sequence[Request]) -> None:
        for request in warmups:
            for decoder in self._in_turn(0).values():
                decoder.generate(self._checked_denoiser, self._ready(decoder, request))

    @property
    def _checked_denoiser(self) -> Denoiser:
        """The model for warming up, which raises if a logit is NaN or infinite."""
        return cast("Denoiser", FiniteLogits(self.loaded.denoiser, self.spec.model.name))

    def _ready(self, decoder: Decoder, request: Request) -> Request:
        return ready(self.spec, decoder, self.loaded, request)

    def _in_turn(self, turn: int) -> dict[str, Decoder]:
        """Return decoder and baseline, if there is one, in the order in which they decode: the
        baseline first at odd turns, so that neither always has warm caches."""
        own = {"own": self.decoder}
        other = {} if self.baseline is None else {"baseline": self.baseline}
        return {**other, **own} if turn % 2 else {**own, **other}

    def _decode(self, decoder: Decoder, request: Request) -> tuple[Generation, float]:
        """Decode one request under the clock, see `timed`."""
        ready, model = self._ready(decoder, request), self.loaded.denoiser
        device, deps = self.spec.hardware.device, self.deps
        return timed(lambda: decoder.generate(model, ready), device, deps.sync, deps.clock)

    def _sample(self, request: Request, turn: int, session: int) -> SampleRecord:
        """Decode one request, with the baseline too if there is one."""
        started_at = self.deps.now()
        turns = self._in_turn(turn).items()
        decoded = {name: self._decode(decoder, request) for name, decoder in turns}
        own, seconds = decoded["own"]
        sample = sample_record(request, own, self.loaded, started_at, session, seconds)
        if "baseline" not in decoded:
            return sample
        other, other_s = decoded["baseline"]
        other = cut(other, request, self.loaded)
        return replace(sample, baseline=BaselineSample(list(other.ids[: other.end]), other_s))

    def _value(self, sample: SampleRecord) -> float | None:
        """Return the sample's score for the progress display, if the benchmark can score
        immediately."""
        if not self.benchmark.scores_fast:
            return None
        return self.benchmark.score({sample.id: sample.text})[sample.id].value


@dataclass(frozen=True)
class FiniteLogits:
    """A model whose forwards raise DllmBenchError if a row of logits does not define probabilities.

    Such a row has a NaN, an infinite logit, or -inf for every token; -inf for some tokens is
    allowed. The check waits for the device at every forward, so this model is only used for
    warm-up.
    """

    denoiser: Denoiser
    name: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.denoiser, name)

    def forward(self, *args: Any) -> Tensor:
        return self._checked(self.denoiser.forward(*args))

    def forward_batch(self, *args: Any) -> list[Tensor]:
        return [self._checked(logits) for logits in self.denoiser.forward_batch(*args)]

    def _checked(self, logits: Tensor) -> Tensor:
        if not bool(logits.logsumexp(-1).isfinite().all()):
            dtype = str(logits.dtype).removeprefix("torch.")
            raise DllmBenchError(
                f"Model {self.name!r} gives logits that are NaN or infinite in {dtype}; try "
                "hardware.dtype=float32, and fetch the checkpoint again if that does not help."
            )
        return logits


def timed(
    work: Callable[[], Made],
    device: object,
    wait: Callable[[object], None] = wait_for,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Made, float]:
    """Return what `work` returns, and its duration in seconds.

    wait: waits for the device, so that its work is between the two readings of the clock.
    """
    wait(device)
    started = clock()
    made = work()
    wait(device)
    return made, clock() - started


def sample_record(
    request: Request,
    decoded: Generation,
    loaded: Loaded,
    started_at: float,
    session: int = 0,
    seconds: float | None = None,
) -> SampleRecord:
    """Return the stored record of a decoded request, with its text.

    started_at: seconds since the epoch; seconds: duration of decoding. None for batched requests
    and with `measure_kl`; their forwards have no durations either.
    """
    generation = cut(decoded, request, loaded)
    raw = cut(decoded, replace(request, stop=()), loaded).text
    timed = seconds is not None
    rows = [replace(row, ms=round(row.ms, 4) if timed else 0.0) for row in decoded.trace.forwards]
    return SampleRecord(
        id=request.id,
        prompt_sha256=prompt_sha256(request),
        ids=list(generation.ids),
        born=list(generation.born),
        cut=generation.cut,
        text=generation.text,
        raw=raw if raw != generation.text else None,
        trace=Trace(rows).columns(),
        counts=count_sample(generation, loaded.denoiser.special),
        seconds=seconds,
        first_step_s=(rows[0].ms / 1000 if rows else 0.0) if timed else None,
        started_at=started_at,
        session=session,
        prompt=request.prompt,
    )


def seed_of(spec: RunSpec, request: Request) -> int:
    """Return the seed of the request's random numbers (56 bits), from the run's seed and the
    request's id."""
    return int.from_bytes(hashlib.sha256(f"{spec.seed}/{request.id}".encode()).digest()[:7], "big")


def require_memory(spec: RunSpec, decoder: Decoder, loaded: Loaded, request: Request) -> None:
    """Refuse a request if one layer's activations would not fit into memory."""
    summary, new = decoder.summary(), request.max_new_tokens
    branches = (summary.branches - 1) * min(summary.block or new, new)
    positions = spec.batch * (len(request.prompt_ids) + new + branches)
    needed = positions * getattr(loaded.denoiser, "position_bytes", 0)
    available = memory_bytes(spec.hardware.device)
    if needed > available:
        raise DllmBenchError(
            f"The run asks for {positions:,} positions at a time (batch {spec.batch}, "
            f"{new} new tokens, {summary.branches} branches), which take {needed / 2**30:,.0f} "
            f"GiB in one layer, and the device has {available / 2**30:,.0f}; lower "
            "benchmark.max_new_tokens, batch, or the number of branches."
        )


def ready(spec: RunSpec, decoder: Decoder, loaded: Loaded, request: Request) -> Request:
    """Return the request prepared for the decoder; also seeds torch's random numbers with
    `seed_of`."""
    check_no_masks(request.prompt_ids, loaded.denoiser.special, request.prompt)
    seed = seed_of(spec, request)
    torch.manual_seed(seed)
    return decoder.prepare(loaded.denoiser, replace(request, seed=seed))


def cut(generation: Generation, request: Request, loaded: Loaded) -> Generation:
    """Return the generation with its text, cut at the first end token and the first stop string;
    likelihoods as a text, which has no end.

    Each reason is stored as an index into the ids: "length" always, "eos" and "stop" if they occur.
    """
    if generation.likelihoods:
        return replace(generation, text=text_of(generation.likelihoods))
    special = loaded.denoiser.special
    reasons = cut_reasons(generation.ids, request.max_new_tokens, special)
    ids = [token for token in generation.ids[: min(reasons.values())] if token != special.mask]
    whole = loaded.decode(ids)
    text = cut_at_stop(whole, request.stop)
    if text != whole:
        kept = bisect_left(  # tokens whose text is at most as long as the cut one
            range(1, len(ids) + 1), True, key=lambda n: len(loaded.decode(ids[:n])) > len(text)
        )
        filled = [index for index, token in enumerate(generation.ids) if token != special.mask]
        reasons["stop"] = [*filled, len(generation.ids)][kept]
    return replace(generation, cut=reasons, text=text)


# --- the parent -----------------------------------------------------------------------------------

PROBE = "Ten birds, 3.5 km away: it's a test.\n"
"""Text that model and parent must encode alike."""


@dataclass(frozen=True)
class Parent:
    """An autoregressive model that reads the texts of a run (`model@parent=NAME`).

    Meant for open text, which has no right answer: the parent is the model that a diffusion model
    was adapted from. After a sample is decoded, outside of the clock, it computes the probability
    of each token given all before it. Repetition is probable too, so trigrams are counted as well.
    """

    loaded: Loaded
    name: str

    def check(self, model: Loaded) -> None:
        """Refuse a parent that sees later tokens or has another tokenizer than the run's model."""
        if getattr(self.loaded.denoiser, "attention_form", None) != "causal":
            raise DllmBenchError(
                f"model@parent={self.name} sees tokens after the one it predicts, so it gives no "
                "probability of a text; choose an autoregressive model."
            )
        if self.loaded.encode(PROBE) != model.encode(PROBE):
            raise DllmBenchError(
                f"model@parent={self.name} has another tokenizer than the run's model; choose the "
                "model that this one was adapted from."
            )

    def read(self, sample: SampleRecord, request: Request) -> SampleRecord:
        """Return the sample with the counts that the metrics `quality/…` need."""
        mask = self.loaded.denoiser.special.mask
        ids = emitted_ids(sample.ids, sample.born, sample.cut, mask)
        trigrams = list(zip(ids, ids[1:], ids[2:], strict=False))
        counts = {"trigrams": len(trigrams), "distinct_trigrams": len(set(trigrams))}
        return replace(sample, counts={**sample.counts, **counts, **self.likelihood(request, ids)})

    @torch.inference_mode()
    def likelihood(self, request: Request, ids: Sequence[int]) -> dict[str, float]:
        """Return −log p of T tokens after the prompt, in nats, and how many of them are the most
        probable token of their position. One forward of the whole text.
        """
        if not ids:
            return {"parent_nats": 0.0, "parent_choices": 0}
        denoiser, first = self.loaded.denoiser, len(request.prompt_ids)
        tokens_L = torch.tensor((*request.prompt_ids, *ids), device=denoiser.device)
        plan = ForwardPlan(ForwardKind.VERIFY, (0, len(tokens_L)), (first, len(tokens_L)), (0, 0))
        plan = replace(plan, attention="block_causal", block=1)
        logits_TV = denoiser.forward(tokens_L[None], plan, denoiser.new_cache(len(tokens_L)))[0]
        wanted_T = tokens_L[first:]
        nats_T = torch.nn.functional.cross_entropy(logits_TV.float(), wanted_T, reduction="none")
        choices_T = logits_TV.argmax(-1) == wanted_T
        return {"parent_nats": nats_T.sum().item(), "parent_choices": int(choices_T.sum())}
