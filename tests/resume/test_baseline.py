"""A run with a baseline: both decode every request in turn, timed apart, their tokens compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.core.request import Generation, Request
from dllm_bench.metrics.definitions import measure
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.runs.progress import RunningMetrics, RunProgress, progress_text, summary
from dllm_bench.runs.runner import run
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import RunSpec, leaves, role_of
from dllm_bench.store.store import SAMPLES, Store, read_samples
from tests.resume import fakes

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
    assert record.columns["seconds"] == [0.25] * 6
    assert record.columns["baseline_s"] == [1.0] * 6
    assert (record.summary["speedup/baseline"], record.summary["latency/mean"]) == (4.0, 0.25)
    assert "baseline: plain, in the same run" in summary(record)
    shown = [text.split() for text in summary(record)]
    assert ["speedup/baseline", "4", "×"] in shown and ["equal/baseline", "1", "share"] in shown
    assert all("4.00× the baseline · 100.0% equal texts" in text for text in seen)


def replaced(at: int, token: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda ids: (*ids[:at], token, *ids[at + 1 :])


LETTER, END = fakes.FIRST + ord("k"), fakes.SPECIAL.eos


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        (tuple, True),
        (replaced(10, LETTER), True),  # behind the end token, which comes at 6 to 9
        (replaced(5, LETTER), False),
        (replaced(0, LETTER), False),
        (replaced(3, END), False),  # the same tokens, but fewer
    ],
)
def test_tokens_are_compared_up_to_the_end_of_the_text(change, equal, tmp_path) -> None:
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
