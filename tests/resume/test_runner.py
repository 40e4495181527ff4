"""A run: what the clock sees, how a text is cut, what is recorded, and how it grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
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


def test_only_decoding_is_timed_between_two_waits_for_the_device(tmp_path, monkeypatch) -> None:
    model, decoder, benchmark = fakes.FakeModel(), fakes.FakeDecoder(), fakes.Letters()
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return noting

    watched = [(model, "encode"), (model, "decode"), (benchmark, "score"), (decoder, "generate")]
    for thing, name in (*watched, (files.Appender, "append")):
        monkeypatch.setattr(thing, name, noted(name, getattr(thing, name)))
    parts = {"model": model, "decoder": decoder, "benchmark": benchmark}
    clock = noted("clock", lambda: float(len(events)))
    made = fakes.deps(**parts, clock=clock, sync=noted("sync", lambda device: None))
    record = run(fakes.spec(3), store=Store(tmp_path), deps=made)
    assert {"encode", "decode", "score", "append"} <= set(events)
    decoded = [event for event in events if event in ("generate", "clock")]
    assert decoded[:2] == ["generate", "generate"], "two warm-ups, not timed"
    assert " ".join(events).count("sync clock generate sync clock") == 3
    assert record.columns["seconds"] == [3.0] * 3, "each event takes a second"
    assert record.summary["latency/mean"] == 3.0


def test_a_sealed_run_is_read_and_nothing_is_built(tmp_path: Path) -> None:
    never = Mock(side_effect=AssertionError("built"))
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
    both = [fakes.timeless(run(spec, store=store, deps=made)) for store in (whole, parts)]
    assert both[0] == both[1]
    texts = {key: sample.text for key, sample in read_samples(parts.path(spec)).items()}
    assert texts == {key: sample.text for key, sample in samples.items()}
    assert len({texts[f"item-0#{k}"] for k in range(3)}) == 3


TEXTS: dict[str, Any] = {  # "$": the end token, "_": a mask
    "length": ("abc", (), "abc", {"length": 3}),
    "end token": ("hello$world again", (), "hello", {"eos": 5, "length": 17}),
    "first stop string": ("x = 1\nQ: y\nA: z", ("A:", "Q:"), "x = 1\n", {"stop": 6, "length": 15}),
    "stop string after the end": ("abc$STOP", ("STOP",), "abc", {"eos": 3, "length": 8}),
    "both": ("ab;cd$", (";",), "ab", {"eos": 5, "stop": 2, "length": 6}),
    "masks are no text": ("ab_c!_de", ("!",), "abc", {"stop": 4, "length": 8}),
}


def ids_of(decoded: str) -> tuple[int, ...]:
    special = {"$": EOS, "_": MASK}
    return tuple(special[c] if c in special else MODEL.encode(c)[0] for c in decoded)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_ends_at_the_first_end_or_stop_string_and_every_reason_is_kept(name: str) -> None:
    decoded, stop, text, cut_at = TEXTS[name]
    ids = ids_of(decoded)
    whole = Generation("r", ids, (0,) * len(ids), {})
    result = cut(whole, Request("r", (9,), len(ids), stop), MODEL)
    assert (result.text, result.cut, result.end) == (text, cut_at, min(cut_at.values()))


def test_a_prompt_may_hold_half_a_surrogate_pair(tmp_path, monkeypatch) -> None:
    [request], store = fakes.Letters(n=1).requests(MODEL.encode), Store(tmp_path)
    benchmark = fakes.Letters()
    monkeypatch.setattr(benchmark, "requests", lambda encode: [replace(request, prompt="a\ud800")])
    run(fakes.spec(1), store=store, deps=fakes.deps(benchmark=benchmark))
    assert read_samples(store.path(fakes.spec(1)))["item-0"].prompt == "a?"


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
    assert store.record(record.spec).to_json() == record.to_json()


@pytest.mark.parametrize(
    ("name", "fails", "words", "done"),
    [
        ("score", lambda texts: {}, "without a score", 3),
        ("requests", lambda encode: fakes.Letters(n=2).requests(encode) * 2, "one id", 0),
    ],
)
def test_a_failing_run_leaves_its_reason(name, fails, words, done, tmp_path, monkeypatch) -> None:
    store, benchmark = Store(tmp_path), fakes.Letters(scores_fast=False)
    monkeypatch.setattr(benchmark, name, fails)
    with pytest.raises(DllmBenchError, match=words):
        run(fakes.spec(3), store=store, deps=fakes.deps(benchmark=benchmark))
    entry = store.entry(fakes.spec(3))
    assert (entry.state, entry.done) == ("failed", done) and words in entry.error


# --- more items, or fewer -------------------------------------------------------------------------

SPEC = fakes.spec(4)


class Grading(fakes.Letters):
    """Notes the texts that it grades; slow, so that none is graded for the progress display."""

    def __init__(self) -> None:
        super().__init__(scores_fast=False)
        self.graded: list[str] = []

    def score(self, texts):
        self.graded += texts
        return super().score(texts)


def test_more_items_decode_and_grade_only_the_rest_and_fewer_are_the_first(tmp_path: Path) -> None:
    """Every record is that of a run of as many items at once."""
    log, benchmark = tmp_path / "log", Grading()
    backwards = map(float, range(10_000, 0, -1))  # a clock that is set back
    deps = fakes.deps(
        decoder=fakes.FakeDecoder(log=log), benchmark=benchmark, now=lambda: next(backwards)
    )
    store = Store(tmp_path / "runs")
    for limit in (4, 7, 7, 12, 5):
        asked = replace(SPEC, limit=limit)
        record = run(asked, store=store, deps=deps)
        alone = run(asked, store=Store(tmp_path / f"alone-{limit}"), deps=fakes.deps())
        assert record.items == limit and fakes.timeless(record) == fakes.timeless(alone)
    counts = Counter(key for _, key in fakes.calls(log))
    warmed_up = {f"item-{i}" for i in range(WARMUPS)}
    assert {key for key, count in counts.items() if count > 1} == warmed_up
    assert len(counts) == 12 and benchmark.graded == [f"item-{i}" for i in range(12)]
    assert len(store.folders()) == 1


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
    deps, store, spec = fakes.deps(benchmark=fakes.Repeating()), Store(tmp_path), fakes.repeating(2)
    for limit in (2, 4):
        record = run(replace(spec, limit=limit), store=store, deps=deps)
        assert (record.items, len(record.columns["id"])) == (limit, 3 * limit)
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
    samples = folder / SAMPLES
    for rest in (samples.read_text().partition("\n")[2], ""):
        samples.write_text(rest)
        assert "'item-0' is missing" in (verify(folder) or [""])[0]
