"""Named speed definitions against numbers worked out by hand, and laws that hold for any facts."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_bench.core.request import DllmBenchError, Generation, SpecialTokens
from dllm_bench.core.trace import Forward, Kind, Trace
from dllm_bench.metrics import speed
from dllm_bench.metrics.speed import (
    DEFINITIONS,
    Facts,
    count,
    definition,
    idle_forwards,
    measure,
    measure_all,
)

A = Facts(
    allocated=32, committed=30, content=12, emitted=10, forwards=5, rows=200, forced=1,
    seconds=2.0, steps_s=1.6, first_step_s=0.5, truncated=False, empty=False,
    idle=1, idle_dinfer=3,
)  # fmt: skip
B = Facts(
    allocated=16, committed=16, content=16, emitted=16, forwards=4, rows=64, forced=3,
    seconds=1.0, steps_s=0.9, first_step_s=0.2, truncated=True, empty=False,
    idle=0, idle_dinfer=1,
)  # fmt: skip
C = Facts(
    allocated=16, committed=8, content=0, emitted=0, forwards=1, rows=16, forced=0,
    seconds=0.6, steps_s=0.5, first_step_s=0.5, truncated=False, empty=True,
    idle=0, idle_dinfer=0,
)  # fmt: skip
BY_HAND = {
    "tpf/committed": 54 / 10,
    "tpf/emitted": 26 / 10,
    "tpf/lopa": 64 / 13,
    "tpf/lopa_dist": 54 / 13,
    "tpf/lopa_coder": 28 / 10,
    "tpf/dinfer": (12 / 8 + 16 / 5 + 0 / 1) / 3,
    "tps/decode": 26 / 3.0,
    "tps/e2e": 26 / 3.6,
    "tps/no_first_step": (30 / 1.5 + 16 / 0.8) / 2,
    "tps/max": 20.0,
    "tps/top10": 20.0,
    "latency/mean": 3.6 / 3,
    "latency/p50": 1.0,
    "latency/p95": 1.9,
    "latency/no_first_step": (1.5 + 0.8 + 0.0) / 3,
    "step_ms": 300.0,
    "forwards/mean": 10 / 3,
    "forwards/fast_dllm": 11 / 3,
    "forwards/dinfer": 14 / 3,
    "row_cost": 280 / 26,
    "forced_steps": 4 / 54,
    "empty_rate": 1 / 3,
    "end_only_rate": 1 / 3,
    "truncated_rate": 1 / 3,
}

facts = st.builds(
    Facts,
    allocated=st.integers(1, 99), committed=st.integers(1, 99), content=st.integers(0, 99),
    emitted=st.integers(1, 99), forwards=st.integers(2, 99), rows=st.integers(1, 999),
    forced=st.integers(0, 9), seconds=st.floats(1, 9), steps_s=st.floats(0.1, 0.9),
    first_step_s=st.floats(0.01, 0.5), truncated=st.booleans(), empty=st.booleans(),
    idle=st.integers(0, 9), idle_dinfer=st.integers(0, 9),
)  # fmt: skip


@pytest.mark.parametrize("name", DEFINITIONS)
def test_by_hand(name: str) -> None:
    assert measure(name, [A, B, C]) == pytest.approx(BY_HAND[name], rel=1e-12)


def test_top_ten_takes_the_ten_fastest() -> None:
    samples = [Facts(**{**asdict(A), "committed": 15 * n}) for n in range(1, 21)]
    assert measure("tps/top10", samples) == pytest.approx(10 * sum(range(11, 21)) / 10)
    assert measure("tps/max", samples) == pytest.approx(200)
    assert measure("tps/no_first_step", samples) == pytest.approx(105)


def test_without_samples_nothing_is_defined() -> None:
    assert set(measure_all([]).values()) == {None}
    assert measure("tps/no_first_step", [C]) is None
    assert measure("row_cost", [C]) is None


def test_an_unknown_name_is_a_sentence_that_lists_the_known() -> None:
    with pytest.raises(DllmBenchError, match=r"'tpf'.*tpf/committed, tpf/emitted"):
        definition("tpf")


def test_every_definition_says_what_it_counts() -> None:
    for name, entry in DEFINITIONS.items():
        assert entry.name == name
        assert entry.unit
        assert len(entry.text) > 20
    ratios = [e for e in DEFINITIONS.values() if e.name.startswith(("tpf/", "tps/"))]
    assert all("mean" in e.text or "ratio of sums" in e.text or "fastest" in e.text for e in ratios)


@given(st.lists(facts, min_size=1, max_size=30))
def test_laws(samples: list[Facts]) -> None:
    values = measure_all(samples)
    assert all(value is not None for value in values.values())
    numbers = {name: value for name, value in values.items() if value is not None}
    assert numbers["tps/max"] >= numbers["tps/top10"] >= numbers["tps/no_first_step"] * (1 - 1e-9)
    rounding = 1 + 1e-12  # percentiles of equal numbers are interpolated, up to the last bit
    assert numbers["latency/p50"] <= numbers["latency/p95"] * rounding
    assert numbers["latency/no_first_step"] < numbers["latency/mean"]
    assert numbers["tps/e2e"] <= numbers["tps/decode"]
    doubled = measure_all([*samples, *samples])
    for name in numbers.keys() - {"tps/top10", "latency/p50", "latency/p95"}:
        assert doubled[name] == pytest.approx(numbers[name])


@given(facts)
def test_one_sample_alone_has_no_aggregation(fact: Facts) -> None:
    assert measure("tpf/emitted", [fact]) == fact.emitted / fact.forwards
    assert measure("tpf/lopa_coder", [fact]) == fact.content / fact.forwards
    assert measure("tps/max", [fact]) == measure("tps/no_first_step", [fact])
    assert measure("latency/p95", [fact]) == fact.seconds


def test_counting_a_generation() -> None:
    special = SpecialTokens(mask=0, eos=1, pad=2, eot=3)
    ids = (50, 51, 0, 52, 3, 60, 1, 2, 0, 61)
    born = (0, 0, -1, 1, 1, 1, 2, 2, -1, 2)
    forwards = [
        Forward(Kind.PREFILL, 1, 20, 0, ms=1.0),
        Forward(Kind.DENOISE, 4, 10, 8, ms=1.0, winner=2, forced=2),
        Forward(Kind.DENOISE, 3, 10, 8, ms=1.0, forced=1),
    ]
    generation = Generation("r", ids, born, {"eos": 4, "length": 10}, Trace(forwards))
    assert count(generation, special) == {
        "allocated": 10,
        "committed": 8,
        "content": 5,
        "emitted": 3,
        "forwards": 3,
        "rows": 20 + 40 + 30,
        "forced": 3,
        "idle": 0,
        "idle_dinfer": 0,
    }


def generation_of(*blocks: list[tuple[Kind, int]]) -> Generation:
    """Blocks as lists of (kind, positions committed) of their forwards."""
    forwards, born = [], []
    for block in blocks:
        masks = sum(commits for _, commits in block)
        for kind, commits in block:
            born += [len(forwards)] * commits
            forwards.append(Forward(kind, 1, 8, 0, masks=masks))
            masks -= commits
    return Generation("r", (5,) * len(born), tuple(born), {}, Trace(forwards))


@pytest.mark.parametrize(
    ("blocks", "idle", "unrolled"),
    [
        ([[(Kind.DENOISE, 8)]], 0, 0),  # 8 masks // 8 = 1 round
        ([[(Kind.DENOISE, 30), (Kind.DENOISE, 2)]], 0, 2),  # 32 // 8 = 4 rounds at once
        ([[(Kind.DENOISE, 8), (Kind.DENOISE, 8), (Kind.DENOISE, 24)]], 0, 1),  # 4 rounds, not 5
        ([[(Kind.PREFILL, 16)]], 1, 2),  # two rounds of window after a renewal that filled it
        ([[(Kind.PREFILL, 4), (Kind.DENOISE, 4)], [(Kind.REFRESH, 8)]], 1, 1),
        ([[(Kind.PREFILL, 4), (Kind.REFRESH, 4), (Kind.REFRESH, 4)]], 1, 1),
    ],
)
def test_idle_forwards(blocks: list[list[tuple[Kind, int]]], idle: int, unrolled: int) -> None:
    generation = generation_of(*blocks)
    assert idle_forwards(generation) == idle
    assert idle_forwards(generation, unroll=4, tokens_per_forward=8) == unrolled


def test_a_block_left_with_masks_has_no_idle_forwards() -> None:
    generation = generation_of([(Kind.PREFILL, 8), (Kind.DENOISE, 24)])
    cut = Generation("r", (5,) * 8, (0,) * 8, {}, Trace(generation.trace.forwards[:1]))
    assert idle_forwards(cut, unroll=4, tokens_per_forward=8) == 0


def test_columns_and_back() -> None:
    columns = {name: [getattr(fact, name) for fact in (A, B)] for name in Facts.columns()}
    assert speed.from_columns({**columns, "id": ["a", "b"]}) == [A, B]
    older = {name: values for name, values in columns.items() if not name.startswith("idle")}
    facts_ = speed.from_columns(older)
    assert measure("forwards/mean", facts_) == 4.5
    assert measure("forwards/dinfer", facts_) is measure("forwards/fast_dllm", facts_) is None
    del columns["rows"]
    with pytest.raises(DllmBenchError, match="no column rows"):
        speed.from_columns(columns)
