"""Runs in batches, which have the samples of one at a time and no times of their own, and runs with
a baseline, whose tokens are compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.launch import local
from dllm_bench.metrics.definitions import definition, measure
from dllm_bench.metrics.sample_stats import NO_TIME
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.runs.progress import RunningMetrics, RunProgress, progress_text, summary
from dllm_bench.runs.runner import run
from dllm_bench.store.groups import role_of
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec, leaves
from dllm_bench.store.store import SAMPLES, Store, read_samples
from tests.resume import fakes

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


def made(root: Path, decoder: Any, n: int = 7, batch: int = 3, **changes: Any) -> RunRecord:
    deps = fakes.deps(decoder=decoder, **changes)
    return local.run(fakes.spec(n, batch=batch), store=Store(root), deps=deps)


def untimed(record: RunRecord) -> dict[str, Any]:
    """Return all columns but those of time."""
    clocked = {*fakes.CLOCKED, "began_s", "ended_s", "session"}
    return {name: column for name, column in record.columns.items() if name not in clocked}


def test_samples_are_those_of_one_at_a_time(tmp_path: Path) -> None:
    side_by_side, alone = made(tmp_path, Many()), made(tmp_path, Many(), batch=1)
    assert side_by_side.identity_hash != alone.identity_hash
    assert (untimed(side_by_side), side_by_side.score) == (untimed(alone), alone.score)
    stored = list(read_samples(Store(tmp_path).path(side_by_side.spec)))
    assert stored == [f"item-{i}" for i in (2, 3, 4, 5, 6, 1, 0)], "as they ended"
    assert side_by_side.columns["id"] == [f"item-{i}" for i in range(7)], "as they were asked"


def test_no_request_has_a_time_of_its_own(tmp_path: Path) -> None:
    now = [0.0]
    record = made(tmp_path, Many(clock=now, pause_s=1.0), clock=lambda: now[0])
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
    whole = made(tmp_path / "whole", Many())
    with pytest.raises(RuntimeError, match="by design"):
        made(tmp_path / "broken", Many(breaks_after=4))
    asked: list[str] = []
    record = made(tmp_path / "broken", Many(asked=asked))
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


LETTER, END = fakes.FIRST + ord("k"), fakes.SPECIAL.eos


@pytest.mark.parametrize(("at", "token"), [(10, LETTER), (5, LETTER), (0, LETTER), (3, END)])
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
