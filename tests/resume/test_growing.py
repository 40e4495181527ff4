"""A run that is asked for more items decodes the rest; one asked for fewer is read in part."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dllm_bench.runs.runner import WARMUPS, run
from dllm_bench.store.store import RECORD, RunState, Store, verify
from tests.resume import fakes

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
    part = store.record(spec)
    assert part is not None and sorted(part.columns["id"]) == sorted(
        f"item-{i}#{k}" for i in range(2) for k in range(3)
    )


def test_samples_beyond_the_record_are_no_damage_and_lost_ones_are(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run(replace(SPEC, limit=8), store=store, deps=fakes.deps())
    (folder,) = store.folders()
    kept = (folder / RECORD).read_text()
    run(replace(SPEC, limit=10), store=store, deps=fakes.deps())
    (folder / RECORD).write_text(kept)
    assert verify(folder) == []
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(lines[1:]))
    assert "'item-0' is missing" in (verify(folder) or [""])[0]
