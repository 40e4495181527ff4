"""Intervals and paired tests against published values, coverage and symmetry."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.accuracy import (
    compare,
    mean_score,
    paired_shares,
    pass_at_k,
    repeated,
    wilson,
    wilson_of_clusters,
)


def test_wilson_against_published_values() -> None:
    """Newcombe (1998), Statistics in Medicine 17:857, Table I, method 3."""
    published = (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    )
    for right, n, low, high in published:
        score = mean_score([1.0] * right + [0.0] * (n - right))
        assert (score.mean, score.n, score.method) == (right / n, n, "wilson")
        assert (score.low, score.high) == pytest.approx((low, high), abs=5e-5)


def test_events_of_one_sample_alone_are_wilsons() -> None:
    assert wilson_of_clusters([1] * 81 + [0] * 182, [1] * 263) == pytest.approx(wilson(81, 263))
    assert wilson_of_clusters([3, 0], [3, 0]) == pytest.approx(wilson(3, 3)), "one sample"
    assert wilson_of_clusters([4, 5], [4, 5]) == pytest.approx(wilson(9, 9)), "no spread"


def test_an_interval_of_clusters_holds_as_often_as_it_says() -> None:
    """Shares of samples drawn from Beta(3, 1), 20 events each: 0.75 on average."""
    rng, held = random.Random(5), {"clusters": 0, "rounds": 0}
    for _ in range(400):
        shares = [rng.betavariate(3, 1) for _ in range(40)]
        right = [sum(rng.random() < share for _ in range(20)) for share in shares]
        ends = {"clusters": wilson_of_clusters(right, [20] * 40), "rounds": wilson(sum(right), 800)}
        for name, (low, high) in ends.items():
            held[name] += low < 0.75 < high
    assert 0.92 < held["clusters"] / 400 < 0.98 and held["rounds"] / 400 < 0.8


def test_fractional_scores_get_a_seeded_bootstrap() -> None:
    rng = random.Random(1)
    values = [rng.random() for _ in range(200)]
    score = mean_score(values, seed=3)
    assert score == mean_score(values, seed=3) != mean_score(values, seed=4)
    assert score.method == "bootstrap"
    error = (sum((v - score.mean) ** 2 for v in values) / 200) ** 0.5 / 200**0.5
    assert score.high - score.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert score.low < score.mean < score.high
    assert mean_score([]) is None
    alike = mean_score([0.25] * 9)
    assert alike.low == alike.mean == alike.high == 0.25


def test_shares_of_pairs_have_a_width_where_no_pair_differs() -> None:
    equal = paired_shares([([1.0] * 58 + [0.0] * 2, [1.0] * 58 + [0.0] * 2)])
    assert (equal.low, equal.value, equal.high) == pytest.approx((-1.96 / 62, 0, 1.96 / 62), 1e-4)
    assert paired_shares([([1.0, 1.0] + [0.0] * 18, [0.0] * 20)]).discordant == 0.1


def test_runs_are_compared_on_shared_samples_only() -> None:
    ours = {f"{i}": 1.0 for i in range(20)} | {"only-ours": 0.0}
    theirs = {f"{i}": float(i >= 10) for i in range(20)} | {"only-theirs": 1.0}
    found = compare(ours, theirs)
    assert (found.n, found.value, found.p_value) == (20, 0.5, pytest.approx(2 / 2**10))
    assert found.differs
    swapped = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, {"a": 0.0, "b": 0.0, "c": 0.0, "d": 1.0}
    assert compare(*swapped).p_value == pytest.approx(2 * (1 + 4) / 2**4), "McNemar's exact test"
    assert compare({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}).p_value == 1.0
    back = compare(theirs, ours)
    assert (back.value, back.p_value) == (-0.5, found.p_value)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))


def test_equal_runs_do_not_differ_and_slightly_better_ones_by_paired_bootstrap_do() -> None:
    for a, b, noise in ((1.0, 0.0, 0.0), (0.1, 0.6, 0.0), (0.1, 0.6, 1e-16)):
        assert not compare({"a": a, "b": b}, {"a": a + noise, "b": b + noise}).differs
    ours = {str(i): random.Random(i).random() for i in range(100)}
    found = compare(ours, {key: value - 0.02 for key, value in ours.items()})
    assert found.differs and found.p_value is None
    assert not compare({"a": 0.5}, {"a": 0.2}).differs, "one item is no evidence"
    with pytest.raises(DllmBenchError, match="share no sample"):
        compare({"a": 1.0}, {"b": 1.0})


def test_the_bootstrap_covers_no_difference() -> None:
    """About 5 % of 95 % intervals miss; 13 or more of 100 has a chance below 1 in 400."""
    rng, keys = random.Random(5), [str(i) for i in range(60)]
    pairs = [({k: rng.random() for k in keys}, {k: rng.random() for k in keys}) for _ in range(100)]
    assert 0 < sum(compare(ours, theirs).differs for ours, theirs in pairs) < 13


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    """Against all draws without replacement, which the estimator stands for."""
    for n in range(1, 7):
        for correct in range(n + 1):
            samples = [i < correct for i in range(n)]
            for k in range(1, n + 1):
                draws = [any(draw) for draw in combinations(samples, k)]
                assert pass_at_k(n, correct, k) == pytest.approx(sum(draws) / len(draws))
    with pytest.raises(DllmBenchError, match="pass@5 needs at least 5 samples per item, found 4"):
        pass_at_k(4, 1, 5)


def test_repeated_items() -> None:
    found = repeated([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    third = pytest.approx(1 / 3)
    assert found == {"avg@3": third, "pass@1": third, "pass@2": 0.5, "pass@3": 0.5}
    assert repeated([[0.2, 0.4], [0.6, 0.8]]) == {"avg@2": pytest.approx(0.5)}
    assert repeated([[1.0], [0.0]]) == repeated([[1.0, 0.0], [0.0]]) == repeated([]) == {}
