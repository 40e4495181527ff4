"""Run series of hand-built samples equal what is counted by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import log2
from pathlib import Path
from random import Random
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Forward, ForwardKind
from dllm_bench.figures import run_series
from dllm_bench.figures.run_series import run_series as series_named
from dllm_bench.metrics import drafts
from dllm_bench.metrics.sample_stats import frame_of
from dllm_bench.runs.token_replay import TokenReplay
from dllm_bench.store.groups import ModelGroup
from dllm_bench.store.record import SampleRecord
from tests.figures.builders import drafted_sample, sample
from tests.sample_stats import sample as stats

STEP = Forward(ForwardKind.DENOISE, 1, 4, 0, ms=1.0)
EMPTY: dict[str, Any] = {}


@dataclass(frozen=True, eq=False)
class FakeRun:
    """Samples and token replays without a store."""

    samples: list[SampleRecord] = field(default_factory=list)
    replays: list[tuple[SampleRecord, TokenReplay]] = field(default_factory=list)
    record: Any = None


def greedy(model: str) -> Namespace:
    """Return the specification of a greedy run."""
    return Namespace(model=ModelGroup({"name": model}), decoder={}, short="0123456789")


def masked(born: list[int]) -> SampleRecord:
    return sample("a", [7] * len(born), born, [STEP] * (max(born) + 1))


def xy(reads: Any) -> list[tuple[Any, Any]]:
    return [(read["x"], read["y"]) for read in reads]


def test_tokens_per_step_are_means_over_those_still_decoding() -> None:
    run = FakeRun([masked([0, 0, 1, 2]), masked([0, 1, 1, 1])])
    reads = list(run_series.tokens_per_step(run, EMPTY))
    assert (xy(reads), [read["n"] for read in reads]) == ([(1, 1.5), (2, 2.0), (3, 1.0)], [2, 2, 1])
    assert (reads[0]["low"], reads[0]["high"]) == (1.25, 1.75)


PROGRESS = [(0, 0.0), (25, 37.5), (50, 62.5), (75, 87.5), (100, 100.0)]  # percent


@pytest.mark.parametrize(
    ("name", "settings", "born", "expected"),
    [
        ("progress", {"every": 25}, ([0, 0, 1, 2], [3, 2, 1, 0]), PROGRESS),
        ("step_of_position", {}, ([0, 2, 1], [0, 0, 3]), [(1, 1.0), (2, 2.0), (3, 3.0)]),
        ("steps_per_block", {}, ([0, 0, 1, 2], [0, 1, 2, 3]), [(1, 1), (2, 3)]),  # of two positions
    ],
)
def test_a_series_counts_the_steps_that_decoded_positions(name, settings, born, expected) -> None:
    spec = Namespace(decoder={"schedule": {"block": 2}})
    run = FakeRun([*map(masked, born)], record=Namespace(spec=spec))
    assert xy(getattr(run_series, name)(run, settings)) == expected


def evolved(born: list[int], found: list[list[int]], chance: Any = None) -> FakeRun:
    """Return one sample; `found` and `chance` by step and position."""
    found_SP = np.array(found, dtype="int8")
    chance_SP = np.array(chance if chance is not None else found, dtype="float32")
    rank_SP = np.where(found_SP == 1, 1, 4).astype("int32")
    one = masked(born)
    return FakeRun([one], [(one, TokenReplay("a", chance_SP, rank_SP, found_SP))])


FOUND = [[1, 0, 0], [-1, 1, 0], [-1, 0, 1], [-1, 1, -1]]  # position 1: at 2, lost, at 4
BORN = [0, 3, 2]


def test_gaps_count_from_the_first_right_prediction() -> None:
    run = evolved(BORN, FOUND)
    assert run_series.first_right_steps(run.replays[0]) == [(1, 1), (2, 4), (3, 3)]
    assert xy(run_series.waiting_steps(run, EMPTY)) == [(0, 2), (1, 0), (2, 1)]
    both = list(run_series.first_right_and_committed(run, EMPTY))[2:4]
    assert [(r["series"], r["x"], r["y"]) for r in both] == [("first", 2, 2), ("decoded", 2, 4)]
    assert xy(run_series.first_right_step(run, EMPTY)) == [(1, 1), (2, 2), (3, 3)]


CHANCE = [[0.9, 0.25, np.nan], [np.nan, 0.5, 0.75], [np.nan, 0.75, 1.0], [np.nan, 1.0, np.nan]]


def test_a_tokens_way_ends_with_its_decoding() -> None:
    run = evolved(BORN, FOUND, CHANCE)
    reads = list(run_series.RUN_SERIES["probability"](run, {"at": [0.67], "sample": 0}))
    assert xy(reads) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert {read["panel"] for read in reads} == {"position 2"}
    assert [r["y"] for r in run_series.RUN_SERIES["rank"](run, {"at": [0.67]})] == [4, 1, 4, 1]
    together = run_series.RUN_SERIES["probability"](run, {"at": [0.0, 0.67], "one_panel": True})
    assert {read["series"] for read in together} == {"token 1", "token 2"}
    assert list(run_series.RUN_SERIES["probability"](run, {"at": [0.67], "sample": 5})) == []


def test_consistency_counts_back_from_decoding() -> None:
    run = evolved(BORN, FOUND, CHANCE)
    reads = list(run_series.probability_before_commit(run, {"groups": [2, 4]}))
    by_group = {g: xy(r for r in reads if r["series"] == g) for g in ("up to 2", "up to 4")}
    assert by_group["up to 2"] == [(0, pytest.approx(0.95)), (1, 0.75)]
    assert by_group["up to 4"] == [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)]


def test_maps_hold_a_value_per_position_and_step() -> None:
    run = evolved(BORN, FOUND, CHANCE)
    ranks = list(run_series.rank_map(run, EMPTY))
    assert {"x": 2, "y": 1, "z": log2(4), "n": 1} in ranks
    assert [(r["x"], r["y"]) for r in ranks if "z" not in r] == [(1, 1), (2, 4), (3, 3)]
    chances = {(r["x"], r["y"]): r["z"] for r in run_series.probability_map(run, EMPTY)}
    assert chances[2, 3] == 0.75 and (3, 1) not in chances


def test_reliability_is_of_the_second_half() -> None:
    rng = np.random.default_rng(0)
    logits = [[float(v) for v in rng.normal(1, 1, 3)] for _ in range(40)]
    pairs = zip([[3, int(rng.integers(0, 4)), 1] for _ in range(40)], logits, strict=True)
    facts = [stats(rounds=[counts], survival=[said]) for counts, said in pairs]
    record = Namespace(samples=frame_of(facts))
    reads = list(run_series.reliability(FakeRun(record=record), {"positions": [2], "bins": 5}))
    before = [r for r in reads if r["series"] == "before"]
    bars = drafts.reliability_bins(drafts.outcomes_of(record.samples, "unscaled", 2), 5)
    assert xy(before) == [(bar.predicted, bar.happened) for bar in bars]
    assert sum(read["n"] for read in before) == 20
    assert {read["panel"] for read in reads} == {"2"}
    record.samples = frame_of([replace(facts[0], survival=None)])
    assert list(run_series.reliability(FakeRun(record=record), {"positions": [1]})) == []


PROFILE = {"tiny-qwen3": "assets/profiles/tiny-qwen3-cpu.json"}


def test_a_load_is_simulated_from_stored_drafts() -> None:
    samples = [drafted_sample(f"s{i}", Random(i), 0, surviving=True) for i in range(24)]

    def load(name: str, rule: str, model: str = "tiny-qwen3") -> list[tuple[Any, Any]]:
        run = FakeRun(samples, record=Namespace(spec=greedy(model)))
        return xy(series_named(name)(run, {"profile": PROFILE, "requests": [1, 4], "rule": rule}))

    assert load("verified_per_request", "none") == [(1, 1.0), (4, 1.0)]
    assert load("verified_per_request", "fixed") == [(1, 8.0), (4, 8.0)]
    assert all(1 <= y <= 8 for _, y in load("verified_per_request", "hardware_aware"))
    speed, front = load("device_speed", "none"), load("user_and_device_speed", "none")
    assert front == [(pytest.approx(y / x), y) for x, y in speed]
    with pytest.raises(DllmBenchError, match="no step profile of qwen3-4b"):
        load("verified_per_request", "none", "qwen3-4b")


def test_a_chain_asked_for_one_token_makes_one_call() -> None:
    """Of two drafters that cost the same in all, one block is paid whole, of seven calls one is."""

    def speed(calls: int, **rule: Any) -> float:
        made = [drafted_sample(f"s{i}", Random(i), 0, surviving=False) for i in range(4)]
        for one in made:
            one.trace["calls"] = [calls if kind == "draft" else 1 for kind in one.trace["kind"]]
            one.trace["fed"] = [7 if kind == "draft" else 1 for kind in one.trace["kind"]]
        run = FakeRun(made, record=Namespace(spec=greedy("tiny-qwen3")))
        settings = {"profile": PROFILE, "requests": [1], "rule": "fixed", **rule}
        return next(iter(series_named("device_speed")(run, settings)))["y"]

    assert speed(7, tokens=1) > 1.1 * speed(1, tokens=1) and speed(7) == pytest.approx(speed(1))


def test_a_learning_curve_belongs_to_its_weights(tmp_path: Path) -> None:
    weights = b"weights"
    (tmp_path / run_series.WEIGHTS_FILE).write_bytes(weights)
    rows = [{"epoch": e, "train": 0.5 / e, "validation": 0.6 / e} for e in (1, 2)]
    (tmp_path / run_series.CURVE_FILE).write_text("\n".join(map(json.dumps, rows)))
    head = {"source": str(tmp_path), "sha256": sha256(weights).hexdigest()}
    spec = Namespace(decoder={"select": {"first": {"head": head}}})
    run = FakeRun(record=Namespace(spec=spec))
    reads = list(run_series.filter_loss(run, EMPTY))
    assert [read["series"] for read in reads] == ["train", "validation"] * 2
    assert xy(reads) == [(1, 0.5), (1, 0.6), (2, 0.25), (2, 0.3)]
    head["sha256"] = "0" * 64
    assert list(run_series.filter_loss(run, EMPTY)) == []
