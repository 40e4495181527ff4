"""A run: what the clock sees, how a text is cut, what is recorded, and how it grows.

In batches it has the samples of one at a time and no times of their own. Tokens of a baseline are
compared with the run's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.launch import local
from dllm_bench.metrics.definitions import definition, measure
from dllm_bench.metrics.sample_stats import NO_TIME, SampleStats, frame_of
from dllm_bench.runs import runner
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.runs.progress import RunningMetrics, RunProgress, progress_text, summary
from dllm_bench.runs.runner import WARMUPS, cut, run
from dllm_bench.store import files
from dllm_bench.store.groups import role_of
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.spec import RunSpec, leaves
from dllm_bench.store.store import RECORD, SAMPLES, RunState, Store, read_samples, verify
from tests.helpers import noting
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


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_ends_at_the_first_end_or_stop_string_and_every_reason_is_kept(name: str) -> None:
    decoded, stop, text, cut_at = TEXTS[name]
    special = {"$": EOS, "_": MASK}
    ids = tuple(special[c] if c in special else MODEL.encode(c)[0] for c in decoded)
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


def test_more_items_decode_and_grade_only_the_rest_and_fewer_are_the_first(tmp_path: Path) -> None:
    """Every record is that of a run of as many items at once."""
    log, slow = tmp_path / "log", fakes.Letters(scores_fast=False)  # graded at the end alone
    benchmark, grades = noting(slow, "score", keep=list)
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
    graded = [key for keys, _ in grades for key in keys]
    assert len(counts) == 12 and graded == [f"item-{i}" for i in range(12)]
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


# --- batches --------------------------------------------------------------------------------------

TIMED = [
    *("tps/decode", "tps/e2e", "tps/no_first_step", "tps/max", "tps/top10", "step_ms"),
    *("latency/mean", "latency/p50", "latency/p95", "latency/no_first_step"),
]


@dataclass
class Many(fakes.FakeDecoder):
    """Ends in another order than it began; fails once it ended so many."""

    breaks_after: int | None = None
    asked: list[str] = field(default_factory=list)

    def _draw(self, request: Request) -> tuple[int, ...]:
        """Of the request alone, as random numbers of a masked decoder are."""
        torch.manual_seed(request.seed)
        return super()._draw(request)

    def generate_stream(
        self, model: Any, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        waiting, going, ended = iter(requests), list[Request](), 0
        while going := [*going, *islice(waiting, batch - len(going))]:
            self.asked += [request.id for request in going if request.id not in self.asked]
            yield self.generate(model, going.pop())
            ended += 1
            if ended == self.breaks_after:
                raise RuntimeError("by design")


def batched(root: Path, decoder: Any, n: int = 7, batch: int = 3, **changes: Any) -> RunRecord:
    deps = fakes.deps(decoder=decoder, **changes)
    return local.run(fakes.spec(n, batch=batch), store=Store(root), deps=deps)


def untimed(record: RunRecord) -> dict[str, Any]:
    """Return all columns but those of time."""
    clocked = {*fakes.CLOCKED, "began_s", "ended_s", "session"}
    return {name: column for name, column in record.columns.items() if name not in clocked}


def test_samples_are_those_of_one_at_a_time(tmp_path: Path) -> None:
    side_by_side, alone = batched(tmp_path, Many()), batched(tmp_path, Many(), batch=1)
    assert side_by_side.identity_hash != alone.identity_hash
    assert (untimed(side_by_side), side_by_side.score) == (untimed(alone), alone.score)
    stored = list(read_samples(Store(tmp_path).path(side_by_side.spec)))
    assert stored == [f"item-{i}" for i in (2, 3, 4, 5, 6, 1, 0)], "as they ended"
    assert side_by_side.columns["id"] == [f"item-{i}" for i in range(7)], "as they were asked"


def test_no_request_has_a_time_of_its_own(tmp_path: Path) -> None:
    now = [0.0]
    record = batched(tmp_path, Many(clock=now, pause_s=1.0), clock=lambda: now[0])
    assert all(record.columns[name] == [None] * 7 for name in fakes.CLOCKED)
    for name in TIMED:
        assert record.summary[name] is None
        assert definition(name).why_undefined(record.samples) == NO_TIME
    assert record.summary["requests/s"] == 1.0
    tokens = sum(record.columns["emitted"])
    assert record.summary["tps/throughput"] == pytest.approx(tokens / 7)
    assert record.summary["tpf/emitted"] == tokens / sum(record.columns["forwards"])
    assert f"left empty: {NO_TIME}" in summary(record)
    assert "ms" not in read_samples(Store(tmp_path).path(record.spec))["item-0"].trace


def test_a_broken_batch_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = batched(tmp_path / "whole", Many())
    with pytest.raises(RuntimeError, match="by design"):
        batched(tmp_path / "broken", Many(breaks_after=4))
    asked: list[str] = []
    record = batched(tmp_path / "broken", Many(asked=asked))
    assert set(asked) == {"item-0", "item-1", "item-6"}, "two of them warm up as well"
    assert untimed(record) == untimed(whole)
    assert [session.samples for session in record.sessions] == [4, 3]
    assert record.summary["requests/s"] is not None


def test_what_has_no_batches_is_refused(tmp_path: Path) -> None:
    cpu = fakes.spec(2).hardware
    refused: list[tuple[dict[str, Any], str]] = [
        ({"baseline": OTHER}, "baseline"),
        ({"hardware": {**cpu, "branch_parallel": 2}}, "asks for several"),
        ({"hardware": {**cpu, "tensor_parallel": 2}}, "asks for several"),
        ({"model": {"name": "fake", "compile": "max"}}, "not compiled"),
    ]
    for changes, words in refused:
        with pytest.raises(DllmBenchError, match=words):
            local.run(fakes.spec(2, batch=2, **changes), store=Store(tmp_path), deps=fakes.deps())


# --- a baseline decodes every request in turn, timed apart ----------------------------------------

OWN, BASELINE = "own", "baseline"
OTHER = {"_target_": "elsewhere", "name": "plain"}


@dataclass
class Noting(fakes.FakeDecoder):
    """Notes who decodes what."""

    who: str = OWN
    calls: list[tuple[str, str]] = field(default_factory=list)
    change: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple

    def generate(self, model: Any, request: Request) -> Generation:
        self.calls.append((self.who, request.id))
        made = super().generate(model, request)
        return replace(made, ids=self.change(made.ids))


def spec(n: int = 6) -> RunSpec:
    return fakes.spec(n, baseline=dict(OTHER))


def deps(own: Any, other: Any, **changes: Any) -> Dependencies:
    """Return what a run needs; the baseline's spec is that of a run of its own, without one."""

    def decoder(asked: RunSpec) -> Any:
        if asked.decoder == {"_target_": "elsewhere"}:
            assert (asked.label, asked.baseline) == ("plain", {})
            return other
        return own

    return replace(fakes.deps(**changes), decoder=decoder)


def test_both_decode_every_request_in_alternating_order(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []
    made = deps(Noting(calls=calls), Noting(who=BASELINE, calls=calls))
    run(spec(4), store=Store(tmp_path), deps=made)
    assert {(who, f"item-{i}") for who in (OWN, BASELINE) for i in (0, 1)} == set(calls[:4])
    turns = [(OWN, BASELINE), (BASELINE, OWN)] * 2
    assert calls[4:] == [(who, f"item-{i}") for i, turn in enumerate(turns) for who in turn]


def test_they_are_timed_apart_and_progress_shows_speed_up_and_equality(tmp_path: Path) -> None:
    now, seen = [0.0], list[str]()

    class Watching(RunProgress):
        def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
            assert running.metric("speedup/baseline") == measure("speedup/baseline", running.stats)
            seen.append(progress_text(running))

    own, other = Noting(clock=now, pause_s=0.25), Noting(clock=now, pause_s=1.0)
    made = deps(own, other, clock=lambda: now[0])
    record = run(spec(), store=Store(tmp_path), deps=made, progress=Watching())
    assert (record.columns["seconds"], record.columns["baseline_s"]) == ([0.25] * 6, [1.0] * 6)
    assert (record.summary["speedup/baseline"], record.summary["latency/mean"]) == (4.0, 0.25)
    assert "baseline: plain, in the same run" in summary(record)
    shown = [text.split() for text in summary(record)]
    assert ["speedup/baseline", "4", "×"] in shown and ["equal/baseline", "1", "share"] in shown
    assert all("4.00× the baseline · 100.0% equal texts" in text for text in seen)


LETTER = fakes.FIRST + ord("k")


@pytest.mark.parametrize(("at", "token"), [(10, LETTER), (5, LETTER), (0, LETTER), (3, EOS)])
def test_tokens_are_compared_up_to_the_end_of_the_text(at, token, tmp_path) -> None:
    """An end token comes at 6 to 9; one at 3 leaves the same tokens, but fewer."""
    equal = at == 10

    def change(ids: tuple[int, ...]) -> tuple[int, ...]:
        return (*ids[:at], token, *ids[at + 1 :])

    record = run(spec(), store=Store(tmp_path), deps=deps(Noting(), Noting(change=change)))
    assert record.columns["baseline_equal"] == [equal] * 6
    assert record.summary["equal/baseline"] == equal
    again = run(spec(), store=Store(tmp_path / "b"), deps=deps(Noting(change=change), Noting()))
    assert again.columns["baseline_equal"] == [equal] * 6, "whichever of them is longer"


def test_a_baseline_changes_nothing_of_the_run_itself(tmp_path: Path) -> None:
    alone = run(fakes.spec(6), store=Store(tmp_path / "a"), deps=fakes.deps())
    made = deps(Noting(), Noting(change=lambda ids: ids[::-1]))
    beside = run(spec(), store=Store(tmp_path / "b"), deps=made)
    stored = [Store(tmp_path / name).path(r.spec) for name, r in (("a", alone), ("b", beside))]
    one, other = ([s.ids for s in read_samples(folder).values()] for folder in stored)
    assert one == other
    assert not {"baseline_s", "baseline_equal"} & alone.columns.keys()
    assert alone.summary["speedup/baseline"] is alone.summary["equal/baseline"] is None
    assert "baseline" not in " ".join(summary(alone))


def test_an_interrupted_run_decodes_both_of_what_is_missing(tmp_path: Path) -> None:
    whole = run(spec(), store=Store(tmp_path / "whole"), deps=deps(Noting(), Noting()))
    store = Store(tmp_path / "parts")
    with pytest.raises(ZeroDivisionError):
        run(spec(), store=store, deps=deps(Noting(), fakes.BrokenDecoder(at="item-3")))
    stored = (store.path(spec()) / SAMPLES).read_text().splitlines()
    assert [set(json.loads(text)["baseline"]) for text in stored] == [{"ids", "seconds"}] * 3
    calls: list[tuple[str, str]] = []
    made = deps(Noting(calls=calls), Noting(who=BASELINE, calls=calls))
    record = run(spec(), store=store, deps=made)
    turns = [(3, BASELINE), (3, OWN), (4, OWN), (4, BASELINE), (5, BASELINE), (5, OWN)]
    assert calls[4:] == [(who, f"item-{i}") for i, who in turns], "turns go on as they were"
    one, other = fakes.timeless(record), fakes.timeless(whole)
    for found in (one, other):
        del found["columns"]["baseline_s"], found["summary"]["speedup/baseline"]
    assert one == other


def test_any_decoder_can_be_the_baseline() -> None:
    config = compose(["decoder=dspark", "decoder@baseline=ar_speculative"])
    assert config["baseline"] == compose(["decoder=ar_speculative"])["decoder"]
    assert (config["decoder"]["name"], config["baseline"]["name"]) == ("dspark", "ar_speculative")
    assert all(role_of(key) for key, _ in leaves(config))
    lower = compose(["decoder@baseline=vanilla", "baseline.schedule.block=8"])
    assert lower["baseline"]["schedule"]["block"] == 8 != lower["decoder"]["schedule"]["block"]
    assert "baseline" not in compose([])
