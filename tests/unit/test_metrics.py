"""Metrics by name, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.metrics import drafts
from dllm_bench.metrics.accuracy import wilson
from dllm_bench.metrics.definitions import (
    DEFINITIONS,
    FAMILIES,
    SECTIONS,
    definition,
    measure,
    measure_all,
)
from dllm_bench.metrics.drafts import DraftRound
from dllm_bench.metrics.sample_stats import SampleStats
from tests.sample_stats import drafted, interval, sample

A = SampleStats(
    allocated=32, committed=30, content=12, emitted=10, forwards=5, rows=200, forced=1,
    seconds=2.0, steps_s=1.6, first_step_s=0.5, truncated=False, empty=False,
    first_tokens=6, idle=1, idle_dinfer=3, baseline_s=3.0, baseline_equal=True, remasked=5,
    cache_read=900, cache_kept=300, encoding=2, through_end=12,
)  # fmt: skip
B = SampleStats(
    allocated=16, committed=16, content=16, emitted=16, forwards=4, rows=64, forced=3,
    seconds=1.0, steps_s=0.9, first_step_s=0.2, truncated=True, empty=False,
    first_tokens=4, idle=0, idle_dinfer=1, baseline_s=2.0, baseline_equal=False,
    cache_read=100, cache_kept=60, encoding=1, through_end=15,
)  # fmt: skip
C = SampleStats(
    allocated=16, committed=8, content=0, emitted=0, forwards=1, rows=16, forced=0,
    seconds=0.6, steps_s=0.5, first_step_s=0.5, truncated=False, empty=True,
    first_tokens=8, idle=0, idle_dinfer=0, baseline_s=0.4, baseline_equal=True,
    cache_read=0, cache_kept=0, encoding=0, through_end=1,
)  # fmt: skip
BY_HAND = {
    "tpf/committed": 59 / 10,
    "tpf/net": 54 / 10,
    "tpf/emitted": 26 / 10,
    "tpf/lopa": 64 / 13,
    "tpf/lopa_dist": 54 / 13,
    "tpf/lopa_coder": 28 / 10,
    "tpf/dinfer": (12 / 8 + 16 / 5 + 0 / 1) / 3,
    "tpf/diffusion_gemma": (12 / 3 + 15 / 3 + 1 / 1) / 3,
    "tps/decode": 26 / 3.0,
    "tps/e2e": 26 / 3.6,
    "tps/no_first_step": (30 / 1.5 + 16 / 0.8) / 2,
    "tps/after_first_step": (24 / 1.5 + 12 / 0.8) / 2,
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
    "cache/bytes_read": 1000 / 10,
    "cache/bytes_kept": 360 / 3,
    "forced_steps": 4 / 54,
    "empty_rate": 1 / 3,
    "end_only_rate": 1 / 3,
    "truncated_rate": 1 / 3,
    "speedup/baseline": 5.4 / 3.6,
    "equal/baseline": 2 / 3,
}


@pytest.mark.parametrize("name", SECTIONS["speed"])
def test_by_hand(name: str) -> None:
    assert measure(name, [A, B, C]) == pytest.approx(BY_HAND[name], rel=1e-12)


def test_top_ten_takes_the_ten_fastest() -> None:
    samples = [SampleStats(**{**asdict(A), "committed": 15 * n}) for n in range(1, 21)]
    found = [measure(f"tps/{name}", samples) for name in ("top10", "max", "no_first_step")]
    assert found == pytest.approx([10 * sum(range(11, 21)) / 10, 200, 105])


def test_speed_up_and_equality_have_intervals() -> None:
    many = [A, B, C] * 20
    low, high = interval("speedup/baseline", many) or (0, 0)
    assert 1 < low < 5.4 / 3.6 < high < 2
    low, high = interval("equal/baseline", many) or (0, 0)
    assert 0.5 < low < 2 / 3 < high < 0.8
    low, high = interval("equal/baseline", [A, C]) or (0, 0)
    assert (low < 0.5, high) == (True, 1.0), "two equal texts prove little"
    assert interval("speedup/baseline", [A]) is None


def test_what_gave_nothing_is_in_the_interval_as_in_the_number() -> None:
    """An empty text costs rows and gives no token."""
    empty = replace(C, rows=400)
    many = [A, empty] * 20
    low, high = interval("row_cost", many) or (0, 0)
    assert low < (measure("row_cost", many) or 0) == 600 / 10 < high
    assert interval("row_cost", [A, A]) == (20, 20)
    assert interval("row_cost", [A, A, *[empty] * 20]) is None, "resamples without a token"


def test_a_text_of_one_step_is_not_counted() -> None:
    for name, counted in (("tps/no_first_step", 2), ("tps/after_first_step", 2), ("tps/e2e", 3)):
        assert definition(name).count([A, B, C]) == counted


@pytest.mark.parametrize(
    "name",
    "tpf  tpf/emitted@1  acceptance/conditional  acceptance/conditional@0  acceptance/conditional@ "
    "acceptance/conditional@two  acceptance/conditional@-1  calibration/x@1".split(),
)
def test_an_unknown_name_is_a_sentence_that_lists_the_nearest(name: str) -> None:
    words = r"no metric .*Choose one of: .* \(the nearest of \d+\)"
    with pytest.raises(DllmBenchError, match=words):
        definition(name)


def test_without_samples_there_is_no_number_and_no_interval() -> None:
    every = [*DEFINITIONS, *(f"{name}@{k}" for name in FAMILIES for k in (1, 7))]
    found = {name: (measure(name, []), interval(name, [])) for name in every}
    assert found == dict.fromkeys(every, (None, None))
    assert measure_all([sample()]).keys() == DEFINITIONS.keys()


TIMES = {"draft_s": 0.02, "head_s": 0.01, "verify_s": 0.05, "prefill_s": 9.0}
FIRST = drafted([(3, 3, 4), (3, 0, 1), (1, 1, 2)], **TIMES)
SECOND = drafted([(3, 1, 2), (0, 0, 1)], **TIMES | {"verify_s": 0.07})
OF_ROUNDS = {
    "acceptance/length": 10 / 5,
    "acceptance/length_per_sample": (7 / 3 + 3 / 2) / 2,
    "acceptance/drafts": 5 / 5,
    "acceptance/verify_rate": 10 / (10 + 5),
    "acceptance/proposed": 10 / 5,
    "acceptance/rate": 5 / 10,
    **{f"acceptance/survival@{k}": share for k, share in enumerate([3 / 4, 1 / 3, 1 / 3, None], 1)},
    **{f"acceptance/conditional@{k}": at for k, at in enumerate([3 / 4, 1 / 2, 1.0, None], 1)},
    "round_ms": 180 / 5,
    "round_ms/draft": 40 / 5,
    "round_ms/head": 20 / 5,
    "round_ms/verify": 120 / 5,
}


def test_drafts_by_hand() -> None:
    assert {name: measure(name, [FIRST, SECOND]) for name in OF_ROUNDS} == pytest.approx(OF_ROUNDS)
    names = [*SECTIONS["acceptance"], "round_ms"]
    assert all(measure(name, [drafted([], verify_s=1.0)]) is None for name in names)
    assert interval("acceptance/survival@2", [FIRST, SECOND]) == pytest.approx(wilson(1, 3))
    assert interval("acceptance/conditional@2", [FIRST, SECOND]) == pytest.approx(wilson(1, 2))
    assert interval("acceptance/conditional@4", [FIRST, SECOND]) is None


def test_a_tree_reaches_as_far_as_its_longest_path() -> None:
    """Its positions are those of paths, what is verified are all its tokens."""
    tree = {"proposed": 4, "drafted": (7, 8, 7, 5, 6), "parents": (0, 0, 1, 3, 4)}
    rows = [
        Forward(ForwardKind.PREFILL, 1, 5, 0),
        Forward(ForwardKind.VERIFY, 1, 5, 5, accepted=1, **tree),
        Forward(ForwardKind.VERIFY, 1, 5, 7, accepted=2, **tree),
    ]
    born, ids = (0, 1, 1, 2, 2), (3, 8, 9, 7, 7)
    found = drafts.rounds_of(Trace(rows), born)
    assert found == [DraftRound(4, 1, 2, 3), DraftRound(2, 2, 2, 2)]
    columns = drafts.speculative_columns(Trace(rows), born, ids)
    assert (columns["rounds"], columns["right"]) == ([[4, 1, 2, 3], [2, 2, 2, 2]], [1, 2])
    assert measure("acceptance/verified", [drafted(found)]) == (5 + 3) / 2
    shares = [measure(f"acceptance/survival@{k}", [drafted(found)]) for k in (1, 2, 3, 4)]
    assert shares == [1.0, 0.5, 0.0, None]
