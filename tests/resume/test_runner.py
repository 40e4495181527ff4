"""A run: what the clock sees, how a text is cut, what is recorded, and how it grows.

One that is asked for more items decodes the rest; one asked for fewer is read in part.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.core.benchmark import Encode
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.metrics.sample_stats import SampleStats, frame_of
from dllm_bench.runs import runner
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.runs.runner import WARMUPS, cut, run
from dllm_bench.store import files
from dllm_bench.store.record import Session
from dllm_bench.store.store import RECORD, SAMPLES, RunState, Store, read_samples, verify
from tests.resume import fakes

EOS, MASK = fakes.SPECIAL.eos, fakes.SPECIAL.mask
MODEL: Any = fakes.FakeModel()


class Clock:
    """A clock that moves only when something takes time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def costs(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, taking `seconds`."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return function(*args, **kwargs)

        return slow


def test_only_decoding_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    model, decoder, benchmark = fakes.FakeModel(), fakes.FakeDecoder(), fakes.Letters()
    for thing, name, cost in (
        (model, "encode", 100.0),
        (model, "decode", 10.0),
        (benchmark, "score", 10.0),
        (decoder, "generate", 0.25),
        (files.Appender, "append", 50.0),
    ):
        monkeypatch.setattr(thing, name, clock.costs(cost, getattr(thing, name)))
    made = fakes.deps(model=model, decoder=decoder, benchmark=benchmark, clock=clock)
    record = run(fakes.spec(6), store=Store(tmp_path), deps=made)
    assert record.columns["seconds"] == [0.25] * 6
    assert record.summary["latency/mean"] == 0.25


def test_the_device_is_waited_for_on_both_sides_of_the_clock(tmp_path: Path) -> None:
    events: list[str] = []

    class Noting(fakes.FakeDecoder):
        def generate(self, model: Any, request: Request) -> Generation:
            events.append("generate")
            return super().generate(model, request)

    def tick() -> float:
        events.append("clock")
        return float(len(events))

    made = fakes.deps(decoder=Noting(), clock=tick, sync=lambda spec: events.append("sync"))
    run(fakes.spec(3), store=Store(tmp_path), deps=made)
    timed = ["sync", "clock", "generate", "sync", "clock"]
    assert events[:2] == ["generate", "generate"], "two warm-ups, not timed"
    text = " ".join(events)
    assert text.count(" ".join(timed)) == 3


def test_a_sealed_run_is_read_and_nothing_is_built(tmp_path: Path) -> None:
    def never(spec: Any) -> Any:
        raise AssertionError(f"built for {spec}")

    first = run(fakes.spec(5), store=Store(tmp_path), deps=fakes.deps())
    broken = Dependencies(model=never, decoder=never, benchmark=never, prepare=never)
    assert run(fakes.spec(5), store=Store(tmp_path), deps=broken) == first


def test_requests_and_seeds_have_random_numbers_of_their_own(tmp_path: Path) -> None:
    store, texts = Store(tmp_path), list[str]()
    for seed in (0, 1):
        record = run(fakes.spec(9, seed=seed), store=store, deps=fakes.deps())
        texts += [sample.text for sample in read_samples(store.path(record.spec)).values()]
    assert len(set(texts)) == 18


def test_a_session_repeats_which_kernels_do_not_work(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "FALLBACKS", ["Layers start more launches: no Triton."])
    record = run(fakes.spec(2), store=Store(tmp_path), deps=fakes.deps())
    assert record.environment["fallbacks"] == "Layers start more launches: no Triton."


def test_a_repetition_draws_what_it_drew_whenever_it_is_decoded(tmp_path: Path) -> None:
    """Seeds follow from ids, so a run that decoded item by item is finished pass by pass."""
    spec, made = fakes.repeating(4), fakes.deps(benchmark=fakes.Repeating())
    whole, parts = Store(tmp_path / "a"), Store(tmp_path / "b")
    run(spec, store=whole, deps=made)
    samples = read_samples(whole.path(spec))
    with parts.open(spec) as opened:
        opened.expect(12)
        opened.begin(Session(0.0, 0, {}))
        for key in ("item-0#0", "item-0#1", "item-0#2", "item-1#0"):
            opened.append(samples[key])
    assert fakes.timeless(run(spec, store=parts, deps=made)) == fakes.timeless(
        run(spec, store=whole, deps=made)
    )
    texts = {key: sample.text for key, sample in read_samples(parts.path(spec)).items()}
    assert texts == {key: sample.text for key, sample in samples.items()}
    assert len({texts[f"item-0#{k}"] for k in range(3)}) == 3


def generated(text: str, *, stop: tuple[str, ...] = (), eos_at: int | None = None) -> Generation:
    ids = MODEL.encode(text)
    if eos_at is not None:
        ids[eos_at] = EOS
    request = Request("r", (9,), len(ids), stop)
    trace = Trace([Forward(ForwardKind.DENOISE, 1, 4, 0)])
    return cut(Generation("r", tuple(ids), (0,) * len(ids), {}, trace), request, MODEL)


@pytest.mark.parametrize(
    ("result", "text", "cut_at", "emitted"),
    [
        (generated("abc"), "abc", {"length": 3}, 3),
        (generated("hello world again", eos_at=5), "hello", {"eos": 5, "length": 17}, 5),
        (
            generated("x = 1\n\nQ: y\nA: z", stop=("A:", "Q:")),
            "x = 1\n\n",
            {"stop": 7, "length": 16},
            7,
        ),
        (generated("abc STOP", stop=("STOP",), eos_at=3), "abc", {"eos": 3, "length": 8}, 3),
        (generated("ab;cd.", stop=(";",), eos_at=5), "ab", {"eos": 5, "stop": 2, "length": 6}, 2),
    ],
    ids=["length", "end token", "first stop string", "stop string after the end", "both"],
)
def test_a_text_ends_at_the_first_end_or_stop_string_and_every_reason_is_kept(
    result: Generation, text: str, cut_at: dict[str, int], emitted: int
) -> None:
    assert (result.text, result.cut, result.emitted) == (text, cut_at, emitted)


def test_masks_that_are_left_are_no_text(tmp_path: Path) -> None:
    ids = (*MODEL.encode("ab"), MASK, *MODEL.encode("c!"), MASK, *MODEL.encode("de"))
    request = Request("r", (9,), 8, ("!",))
    result = cut(Generation("r", ids, (0,) * 8, {}), request, MODEL)
    assert result.text == "abc"
    assert result.cut["stop"] == 4
    decoder = fakes.FakeDecoder(ids=ids)
    record = run(fakes.spec(1), store=Store(tmp_path), deps=fakes.deps(decoder=decoder))
    counts = {name: record.columns[name][0] for name in ("allocated", "committed", "emitted")}
    assert counts == {"allocated": 8, "committed": 6, "emitted": 6}
    assert record.columns["truncated"] == [True]


def test_the_record_alone_gives_the_numbers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = run(fakes.spec(20), store=store, deps=fakes.deps())
    samples = read_samples(store.path(record.spec))
    stored = frame_of([sample.stats() for sample in samples.values()])
    for name in SampleStats.columns() & record.columns.keys():
        assert list(record.samples[name]) == pytest.approx(list(stored[name]), abs=1e-6), name
    assert record.summary["tpf/emitted"] == sum(record.columns["emitted"]) / (20 * 3)
    assert record.summary["row_cost"] == 20 * 72 / sum(record.columns["emitted"])
    assert record.score.mean == sum(record.columns["value"]) / 20
    assert record.columns["score/length"] == [len(s.text) for s in samples.values()]
    reread = store.record(record.spec)
    assert reread.to_json() == record.to_json()


def test_a_failing_run_leaves_its_reason(tmp_path: Path) -> None:
    class Broken(fakes.Letters):
        def score(self, texts: Any) -> Any:
            return {}

    store = Store(tmp_path)
    with pytest.raises(DllmBenchError, match="without a score"):
        run(fakes.spec(3), store=store, deps=fakes.deps(benchmark=Broken(scores_fast=False)))
    entry = store.entry(fakes.spec(3))
    assert (entry.state, entry.done, entry.total) == ("failed", 3, 3)
    assert "without a score" in entry.error


def test_two_requests_of_one_id_are_refused(tmp_path: Path) -> None:
    class Twice(fakes.Letters):
        def requests(self, encode: Encode) -> list[Request]:
            return super().requests(encode)[:2] * 2

    with pytest.raises(DllmBenchError, match="one id"):
        run(fakes.spec(4), store=Store(tmp_path), deps=fakes.deps(benchmark=Twice()))


def test_lines_are_json_with_the_raw_facts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run(fakes.spec(2), store=store, deps=fakes.deps())
    line = json.loads((store.path(fakes.spec(2)) / SAMPLES).read_text().splitlines()[0])
    assert line["trace"]["ms"] == [5.0, 6.0, 7.0]
    assert line["trace"]["kind"] == ["denoise"] * 3
    assert len(line["ids"]) == len(line["born"]) == 12


# --- more items, or fewer -------------------------------------------------------------------------


SPEC = fakes.spec(4)


class Grading(fakes.Letters):
    """Counts the texts that it grades; slow, so that none is graded for the progress display."""

    def __init__(self) -> None:
        super().__init__(scores_fast=False)
        self.graded: list[str] = []

    def score(self, texts):
        self.graded += texts
        return super().score(texts)


def test_more_items_decode_and_grade_only_the_rest(tmp_path: Path) -> None:
    log, benchmark = tmp_path / "log", Grading()
    deps = fakes.deps(decoder=fakes.FakeDecoder(log=log), benchmark=benchmark)
    store = Store(tmp_path / "runs")
    for limit in (4, 7, 7, 12):
        record = run(replace(SPEC, limit=limit), store=store, deps=deps)
        assert record.items == limit
    counts = Counter(key for _, key in fakes.calls(log))
    warmed_up = {f"item-{i}" for i in range(WARMUPS)}
    assert {key for key, count in counts.items() if count > 1} == warmed_up
    assert len(counts) == 12 and benchmark.graded == [f"item-{i}" for i in range(12)]
    assert len(store.folders()) == 1


def test_a_run_that_grew_is_the_run_of_all_items_at_once(tmp_path: Path) -> None:
    grown, whole = Store(tmp_path / "grown"), Store(tmp_path / "whole")
    for limit in (3, 8):
        last = run(replace(SPEC, limit=limit), store=grown, deps=fakes.deps())
    at_once = run(replace(SPEC, limit=8), store=whole, deps=fakes.deps())
    assert fakes.timeless(last) == fakes.timeless(at_once)


def test_fewer_items_are_the_first_ones_of_the_record(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "runs"), Store(tmp_path / "other")
    log = tmp_path / "log"
    logged = fakes.deps(decoder=fakes.FakeDecoder(log=log))
    run(replace(SPEC, limit=9), store=store, deps=logged)
    before = log.read_text()
    part = run(replace(SPEC, limit=5), store=store, deps=logged)
    assert log.read_text() == before
    alone = run(replace(SPEC, limit=5), store=other, deps=fakes.deps())
    assert fakes.timeless(part) == fakes.timeless(alone)


def test_a_larger_limit_than_the_benchmark_has_items_is_complete_with_all(tmp_path: Path) -> None:
    store = Store(tmp_path)
    deps = fakes.deps(benchmark=fakes.Letters(n=6))
    assert run(replace(SPEC, limit=50), store=store, deps=deps).items == 6
    for limit in (None, 60, 6):
        record = store.record(replace(SPEC, limit=limit))
        assert record is not None and record.items == 6


def test_an_interrupted_growth_keeps_the_smaller_record(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run(SPEC, store=store, deps=fakes.deps())
    bigger = replace(SPEC, limit=8)
    with pytest.raises(ZeroDivisionError):
        run(bigger, store=store, deps=fakes.deps(decoder=fakes.BrokenDecoder()))
    assert store.record(bigger) is None and store.record(SPEC) is not None
    entry = store.entry(bigger)
    assert entry is not None and entry.state is RunState.SEALED and entry.done == 4
    assert run(bigger, store=store, deps=fakes.deps()).items == 8


def test_repeated_items_grow_by_item(tmp_path: Path) -> None:
    deps = fakes.deps(benchmark=fakes.Repeating(repeats=3))
    spec = fakes.repeating(2)
    store = Store(tmp_path)
    assert len(run(spec, store=store, deps=deps).columns["id"]) == 6
    grown = run(replace(spec, limit=4), store=store, deps=deps)
    assert len(grown.columns["id"]) == 12 and grown.items == 4
    part, ids = store.record(spec), [f"item-{i}#{k}" for i in range(2) for k in range(3)]
    assert part is not None and sorted(part.columns["id"]) == ids


def test_samples_beyond_the_record_are_no_damage_and_lost_ones_are(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run(replace(SPEC, limit=8), store=store, deps=fakes.deps())
    (folder,) = store.folders()
    kept = (folder / RECORD).read_text()
    run(replace(SPEC, limit=10), store=store, deps=fakes.deps())
    (folder / RECORD).write_text(kept)
    assert verify(folder) == []
    text = (folder / "samples.jsonl").read_text()
    for rest in (text.partition("\n")[2], ""):
        (folder / "samples.jsonl").write_text(rest)
        assert "'item-0' is missing" in (verify(folder) or [""])[0]
