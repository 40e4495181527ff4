"""Acceptance by name, and the time of a round, on rounds that can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.metrics import drafts
from dllm_bench.metrics.accuracy import wilson
from dllm_bench.metrics.definitions import SECTIONS, measure
from dllm_bench.metrics.drafts import DraftRound
from tests.sample_stats import drafted, interval, sample

FIRST = [DraftRound(3, 3, 4), DraftRound(3, 0, 1), DraftRound(1, 1, 2)]
SECOND = [DraftRound(3, 1, 2), DraftRound(0, 0, 1)]


def test_by_hand() -> None:
    samples = [drafted(FIRST), drafted(SECOND)]
    assert measure("acceptance/length", samples) == 10 / 5
    assert measure("acceptance/length_per_sample", samples) == (7 / 3 + 3 / 2) / 2
    assert measure("acceptance/drafts", samples) == 5 / 5
    assert measure("acceptance/verify_rate", samples) == 10 / (10 + 5)
    assert measure("acceptance/proposed", samples) == 10 / 5
    assert measure("acceptance/rate", samples) == 5 / 10


def test_positions_by_name() -> None:
    samples = [drafted(FIRST), drafted(SECOND), drafted([])]
    by_hand = {"survival": [3 / 4, 1 / 3, 1 / 3, None], "conditional": [3 / 4, 1 / 2, 1.0, None]}
    for name, values in by_hand.items():
        assert [measure(f"acceptance/{name}@{k}", samples) for k in (1, 2, 3, 4)] == values
    assert interval("acceptance/survival@2", samples) == pytest.approx(wilson(1, 3))
    assert interval("acceptance/conditional@2", samples) == pytest.approx(wilson(1, 2))
    assert interval("acceptance/conditional@4", samples) is None


def test_time_of_a_round() -> None:
    times = {"draft_s": 0.02, "head_s": 0.01, "verify_s": 0.05, "prefill_s": 9.0}
    samples = [drafted(FIRST, **times), drafted(SECOND, **{**times, "verify_s": 0.07})]
    by_hand = {"": 0.18, "/draft": 0.04, "/head": 0.02, "/verify": 0.12}
    for part, seconds in by_hand.items():
        assert measure(f"round_ms{part}", samples) == pytest.approx(1000 * seconds / 5)
    assert measure("round_ms", [sample(verify_s=1.0)]) is None


def test_an_interval_comes_from_the_samples() -> None:
    """Samples that agree leave no doubt, whatever their rounds; samples that do not, do."""
    agreeing, torn = drafted([(3, 3, 4), (3, 1, 2)]), drafted([(3, 0, 1), (3, 0, 1)])
    assert interval("acceptance/length", [agreeing] * 10) == (3.0, 3.0)
    low, high = interval("acceptance/length", [agreeing, torn] * 10) or (0, 0)
    assert low < 2.0 < high
    assert interval("acceptance/length", [agreeing]) is None


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
    assert columns["rounds"] == [[4, 1, 2, 3], [2, 2, 2, 2]]
    assert columns["right"] == [1, 2]
    samples = [drafted(found)]
    assert measure("acceptance/verified", samples) == (5 + 3) / 2
    shares = [measure(f"acceptance/survival@{k}", samples) for k in (1, 2, 3, 4)]
    assert shares == [1.0, 0.5, 0.0, None]


def test_nothing_is_undefined() -> None:
    for samples in ([], [drafted([])]):
        assert all(measure(name, samples) is None for name in SECTIONS["acceptance"])


@given(st.lists(st.integers(0, 5), min_size=1))
def test_length_follows_from_conditional_acceptance(accepted: list[int]) -> None:
    """tau = 1 + sum over k of the product of the first k rates, where all proposals are whole."""
    samples = [drafted([(5, a, a + 1) for a in accepted])]
    tau, product = 1.0, 1.0
    for k in range(1, 6):
        product *= measure(f"acceptance/conditional@{k}", samples) or 0.0
        tau += product
    assert measure("acceptance/length", samples) == pytest.approx(tau)
