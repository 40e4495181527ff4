"""spec -> record, the one path: resume, warm up, decode each request under the clock, grade, seal.

Only `decoder.generate` is timed, device synchronised on both sides; encoding, decoding to text,
cutting, disk and display come before or after. Every sample is on its own: its random numbers
follow from seed and id, so a resumed run gives what an unbroken one gives. Scheduling of several
runs is in `launch`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request, first_end
from dllm_bench.core.trace import Trace
from dllm_bench.metrics.sample_stats import count_sample
from dllm_bench.run.dependencies import REAL, Dependencies, Loaded
from dllm_bench.run.loggers import NoLogger
from dllm_bench.run.progress import Observer, ObserverGroup, RunningMetrics, SilentObserver
from dllm_bench.store import provenance
from dllm_bench.store.record import BaselineSample, RunRecord, SampleRecord, Session, seal
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import OpenRunFolder, RunShare, Store

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Benchmark
    from dllm_bench.core.contracts import Decoder

WARMUPS = 2


def run(
    spec: RunSpec,
    *,
    store: Store,
    logger: Observer | None = None,
    progress: Observer | None = None,
    deps: Dependencies = REAL,
    work: type[RunSession] | None = None,
) -> RunRecord:
    """The record of `spec`: read if sealed, else what is missing is decoded and the run sealed."""
    sealed = store.record(spec)
    if sealed is not None:
        return sealed
    made = _made(spec, deps)
    with store.open(spec) as opened:
        if opened.record is not None:
            return opened.record
        observer = ObserverGroup([logger or NoLogger(), progress or SilentObserver()])
        session = (work or RunSession)(spec, deps, *made, opened, observer)
        try:
            return session.finish(session.decode())
        except Exception as error:
            opened.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            observer.close()


def decode_share(
    spec: RunSpec,
    share: RunShare,
    *,
    observer: Observer,
    deps: Dependencies = REAL,
    work: type[RunSession] | None = None,
) -> None:
    """Decode a process's share of the requests of `spec`; whoever started the shares seals."""
    with share:
        (work or RunSession)(spec, deps, *_made(spec, deps), share, observer).decode()


def _made(spec: RunSpec, deps: Dependencies) -> tuple[Benchmark, Decoder, Decoder | None, Loaded]:
    """What a run works with; the model is read last, when all else is known to be there."""
    benchmark = deps.benchmark(spec)
    getattr(benchmark, "check", _nothing)()
    decoder = deps.decoder(spec)
    baseline = deps.decoder(spec.of_baseline) if spec.baseline else None
    deps.prepare(spec)
    loaded = deps.model(spec)
    return benchmark, decoder, baseline, loaded


def _nothing() -> None:
    """The check of a benchmark that has none."""


@dataclass(frozen=True)
class Decoded:
    """A generation, its text before it was cut at a stop string, and the seconds it took.

    None where it was decoded beside others.
    """

    generation: Generation
    raw: str
    seconds: float | None

    @property
    def stored(self) -> BaselineSample:
        """What a sample keeps of a baseline."""
        assert self.seconds is not None  # runs in batches have no baseline
        return BaselineSample(list(self.generation.ids[: self.generation.emitted]), self.seconds)


@dataclass
class RunSession:
    """One session of one run. baseline: decodes every request too, in alternating order."""

    spec: RunSpec
    deps: Dependencies
    benchmark: Benchmark
    decoder: Decoder
    baseline: Decoder | None
    loaded: Loaded
    opened: OpenRunFolder
    observer: Observer

    def requests(self) -> list[Request]:
        """The run's requests in the benchmark's order, those of `limit` items; ids are distinct."""
        every = self.benchmark.requests(self.loaded.encode)
        repeats = int(self.spec.benchmark.get("repeats", 1))
        limit = self.spec.limit
        requests = list(islice(every, None if limit is None else limit * repeats))
        if not requests:
            raise DllmBenchError(
                f"Benchmark {self.benchmark.name} with limit {self.spec.limit} gives no request; "
                "raise the limit."
            )
        if len({request.id for request in requests}) < len(requests):
            raise DllmBenchError(f"Benchmark {self.benchmark.name} gives two requests one id.")
        return requests

    def decode(self) -> list[SampleRecord]:
        """Decode what is not finished; all samples, in request order."""
        requests = self.requests()
        self._check(requests)
        self.opened.expect(len(requests))
        running = self._running(len(requests))
        self.observer.start(self.spec, self.opened.folder, running)
        missing = [(turn, r) for turn, r in enumerate(requests) if self.opened.wants(turn, r.id)]
        if missing:
            session = self._begin(requests[:WARMUPS])
            started = self.deps.clock()
            for sample in self._samples(missing, session):
                self.opened.append(sample)
                running.add(sample.stats(), self._value(sample), self.deps.clock() - started)
                self.observer.sample(sample, running)
        done = self.opened.samples
        return [done[request.id] for request in requests if request.id in done]

    def _samples(
        self, missing: Sequence[tuple[int, Request]], session: int
    ) -> Iterator[SampleRecord]:
        """Samples as they are finished."""
        for turn, request in missing:
            yield self._sample(request, turn, session)

    def finish(self, samples: Sequence[SampleRecord]) -> RunRecord:
        """Grade the stored texts and seal the run."""
        scores = self.benchmark.score({sample.id: sample.text for sample in samples})
        absent = [sample.id for sample in samples if sample.id not in scores]
        if absent:
            raise DllmBenchError(
                f"Benchmark {self.benchmark.name} left {len(absent)} of {len(samples)} samples "
                f"without a score, {absent[0]!r} first; mend its scorer and run again."
            )
        record = seal(self.spec, samples, scores, self.opened.sessions, self.deps.now())
        self.opened.seal(record)
        self.opened.note(f"sealed with {len(samples)} samples")
        self.observer.finish(record)
        return record

    def _check(self, requests: Sequence[Request]) -> None:
        """Refuse to go on with samples of other prompts than the benchmark gives now."""
        done = self.opened.samples
        asked = {r.id: prompt_hash(r) for r in requests if r.id in done}
        for key, sample in done.items():
            if asked.get(key) != sample.prompt_sha256:
                raise DllmBenchError(
                    f"{self.opened.folder} holds sample {key!r} of another prompt than benchmark "
                    f"{self.benchmark.name} gives now: its items or its template changed under the "
                    "run; move the folder away and give the same command again."
                )

    def _running(self, total: int) -> RunningMetrics:
        running = RunningMetrics(total, note=attention_note(self.decoder, self.loaded))
        for sample in self.opened.samples.values():
            running.add(sample.stats(), self._value(sample))
        return running

    def _begin(self, warmups: Sequence[Request]) -> int:
        """Warm up on fixed requests, whose results are thrown away, and note the session."""
        self._warm_up(warmups)
        facts = provenance.environment(str(self.spec.hardware["device"]))
        index = self.opened.begin(Session(self.deps.now(), len(warmups), facts))
        self.opened.note(f"session {index}: {len(self.opened.samples)} samples were done")
        return index

    def _warm_up(self, warmups: Sequence[Request]) -> None:
        for request in warmups:
            for decoder in self._in_turn(0):
                decoder.generate(self.loaded.denoiser, self._ready(decoder, request))

    def _ready(self, decoder: Decoder, request: Request) -> Request:
        return ready(self.spec, decoder, self.loaded, request)

    def _in_turn(self, turn: int) -> list[Decoder]:
        """Decoder and baseline, the latter first at odd turns: neither has always warm caches."""
        both = [self.decoder, *([self.baseline] if self.baseline is not None else [])]
        return both[:: -1 if turn % 2 else 1]

    def _decode(self, decoder: Decoder, request: Request) -> Decoded:
        """Decode one request under the clock."""
        request = self._ready(decoder, request)
        self.deps.sync(self.spec)
        started = self.deps.clock()
        generation = decoder.generate(self.loaded.denoiser, request)
        self.deps.sync(self.spec)
        return self._read(request, generation, self.deps.clock() - started)

    def _read(self, request: Request, generation: Generation, seconds: float | None) -> Decoded:
        """What was decoded, as text."""
        raw = cut(generation, replace(request, stop=()), self.loaded).text
        return Decoded(cut(generation, request, self.loaded), raw, seconds)

    def _sample(self, request: Request, turn: int, session: int) -> SampleRecord:
        """Decode one request, by the baseline too, and write down what happened."""
        started_at = self.deps.now()
        decoded = [self._decode(decoder, request) for decoder in self._in_turn(turn)]
        own, *twins = decoded[:: -1 if turn % 2 else 1]
        sample = self._written(request, own, started_at, session)
        return replace(sample, baseline=next((twin.stored for twin in twins), None))

    def _written(
        self, request: Request, own: Decoded, started_at: float, session: int
    ) -> SampleRecord:
        """What is stored of a request."""
        generation, raw, timed = own.generation, own.raw, own.seconds is not None
        rows = [replace(row, ms=round(row.ms, 4)) for row in generation.trace.forwards]
        return SampleRecord(
            id=request.id,
            prompt_sha256=prompt_hash(request),
            ids=list(generation.ids),
            born=list(generation.born),
            cut=generation.cut,
            text=generation.text,
            raw=raw if raw != generation.text else None,
            trace=Trace(rows).columns(),
            counts=count_sample(generation, self.loaded.denoiser.special),
            seconds=own.seconds,
            first_step_s=(rows[0].ms / 1000 if rows else 0.0) if timed else None,
            started_at=started_at,
            session=session,
        )

    def _value(self, sample: SampleRecord) -> float | None:
        """The sample's score for the progress line, where scoring costs next to nothing."""
        if not getattr(self.benchmark, "scores_fast", False):
            return None
        return self.benchmark.score({sample.id: sample.text})[sample.id].value


def attention_note(decoder: Decoder, loaded: Loaded) -> str | None:
    """A sentence where the decoder uses other attention than the weights were trained with."""
    from dllm_bench.decoding.masked import MaskedDecoder

    decoder = getattr(decoder, "decoder", decoder)  # one that leads other processes wraps its own
    if not isinstance(decoder, MaskedDecoder):
        return None
    return loaded.attention_warning(
        decoder.cache.attention, getattr(decoder.schedule, "block", None) or 0
    )


def prompt_hash(request: Request) -> str:
    """Which prompt a sample answers."""
    return hashlib.sha256(repr(request.prompt_ids).encode()).hexdigest()


def seed_of(spec: RunSpec, request: Request) -> int:
    """Where the request's random numbers begin: it follows from the run's seed and its id."""
    text = f"{spec.seed}/{request.id}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def ready(spec: RunSpec, decoder: Decoder, loaded: Loaded, request: Request) -> Request:
    """The request as the decoder wants it, random numbers seeded.

    They follow from the run's seed and the request's id, nothing else.
    """
    import torch

    seed = seed_of(spec, request)
    torch.manual_seed(seed)
    return decoder.prepare(loaded.denoiser, replace(request, seed=seed))


def cut(generation: Generation, request: Request, loaded: Loaded) -> Generation:
    """The generation with its text, cut at the first end token and the first stop string.

    Every reason is recorded as an index into the ids: "eos", "stop" and, always, "length".
    """
    special = loaded.denoiser.special
    reasons = {"length": min(len(generation.ids), request.max_new_tokens)}
    end = first_end(generation.ids, special)
    if end is not None:
        reasons["eos"] = end
    ids = [token for token in generation.ids[: min(reasons.values())] if token != special.mask]
    text = loaded.decode(ids)
    at = min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=None)
    if at is not None:
        kept = _tokens_within(ids, at, loaded)
        reasons["stop"] = _position(generation.ids, kept, special.mask)
        text = text[:at]
    return replace(generation, cut=reasons, text=text)


def _tokens_within(ids: Sequence[int], length: int, loaded: Loaded) -> int:
    """How many leading tokens decode to at most `length` characters."""
    return bisect_left(
        range(1, len(ids) + 1), True, key=lambda n: len(loaded.decode(ids[:n])) > length
    )


def _position(ids: Sequence[int], kept: int, mask: int) -> int:
    """Index in `ids` of the token after `kept` tokens that are not masks."""
    filled = [index for index, token in enumerate(ids) if token != mask]
    return filled[kept] if kept < len(filled) else len(ids)
