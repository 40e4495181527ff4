"""AUP against the published points and areas of d3LLM's leaderboard; laws of areas and fronts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.trade_off import pareto_front
from dllm_bench.tables.derive import DROP, area, within_drop

Points = list[tuple[float, float]]


def aup(points: Points, y_max: float, drop: float = DROP) -> float:
    """Return the area under the curve of the points that lost at most `drop`."""
    return float(area([points[i] for i in within_drop(points, drop)], y_max))


# d3LLM's leaderboard (commit e5bfcac): tasks; scores of one token per forward (autoregressive and
# diffusion models), which may be the best of a task; points of each method and the area below them.
LLADA = """
GSM8K MATH MBPP HumanEval Long-GSM8K
74.1 41.15 63.6 67.73 82.56
72.55 32.2 41.72 38.28 78.58
1:74.79 2.77:74.68 = 205.8 | 1:32.1 1.97:30.82 = 47.2 | 1:41.58 2.13:38.6 = 56.6 | \
1:38.16 2.56:37.8 = 54.0 | 1:78.45 2.45:78.01 = 175.4
1:74.98 2.88:74.39 = 213.8 | 1:29.1 2.66:28.94 = 49.0 | 1:39.1 2.13:39.0 = 53.0 | \
1:41.02 2.69:40.64 = 62.0 | 1:76.0 2.7:75.66 = 176.9
1:74.0 5.14:72.63 = 358.1 | 1:32.0 3.17:30.18 = 64.5 | 1:41.62 2.35:40.0 = 60.5 | \
1:39.68 4.93:39.02 = 83.7 | 1:79.15 4.49:76.65 = 309.1
1:74.02 9.11:73.09 = 637.7 | 1:32.76 5.74:30.36 = 107.6 | 1:42.0 4.21:40.6 = 88.4 | \
1:39.8 5.95:39.63 = 96.6 | 1:78.32 6.95:74.22 = 441.1
"""


def test_every_published_area() -> None:
    lines = LLADA.strip().splitlines()[1:]
    alone = [[float(word) for word in line.split()] for line in lines if ":" not in line]
    rows = [line.split("|") for line in lines if ":" in line]
    assert (len(alone), [len(row) for row in rows]) == (2, [5] * 4)
    for task in range(5):
        areas = [row[task].split("=") for row in rows]
        curves = [[tuple(map(float, p.split(":"))) for p in points.split()] for points, _ in areas]
        scores = [row[task] for row in alone] + [y for points in curves for _, y in points]
        for points, (_, expected) in zip(curves, areas, strict=True):
            assert aup(points, max(scores)) == pytest.approx(float(expected), abs=0.0501), points


def test_a_loss_of_more_than_five_points_is_left_out() -> None:
    kept = [(1.0, 70.0), (4.0, 68.0)]
    assert aup([*kept, (2.0, 64.9)], 70.0) == aup(kept, 70.0) != aup([*kept, (2.0, 65.0)], 70.0)
    assert aup([*kept, (5.0, 64.9)], 70.0, drop=6) > aup(kept, 70.0)
    with pytest.raises(DllmBenchError, match="without points"):
        aup([], 70.0)


scores = st.floats(1, 100)
points_of = st.lists(st.tuples(st.floats(1, 20), scores), min_size=1, max_size=8)


@given(points_of, st.randoms())
def test_the_order_of_points_says_nothing(points: Points, random) -> None:
    assume(len({x for x, _ in points}) == len(points))
    shuffled = random.sample(points, len(points))
    assert aup(shuffled, 100.0, drop=100) == pytest.approx(aup(points, 100.0, drop=100))


@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=5))
def test_an_area_of_arrays_is_the_area_of_each(draws: list[tuple[float, float]]) -> None:
    ys = np.array(draws).T
    found = area([(1.0, ys[0]), (3.0 + ys[1] / 100, ys[1])], ys.max(0))
    for k, (first, last) in enumerate(draws):
        one = area([(1.0, first), (3.0 + last / 100, last)], max(first, last))
        assert found[k] == pytest.approx(one)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=10))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    front = pareto_front(points)
    for j, (u, v) in enumerate(points):
        beaten = any(x >= u and y >= v and (x > u or y > v) for x, y in points)
        assert (j in front) == (not beaten)
