"""Speed against score: the Pareto front, and the area under a curve of runs (AUP).

A point is (tokens per forward, score in percent) of one run. AUP is d3LLM's "accuracy under
parallelism": the area under score over tokens per forward. Scores below the best known one
(`y_max`) have a lower weight, and points that lost more than `drop` are left out. AUP is relative
to a set of methods: a better `y_max` changes the AUP of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from dllm_bench.core.errors import DllmBenchError

ALPHA = 3.0
"""Decay rate of the weight of lower scores; as in d3LLM's leaderboard."""
DROP = 5.0
"""Points of score that may be lost; as in d3LLM's leaderboard."""
NEARLY = 1e-9  # scores are sums of floats

N = TypeVar("N", float, Any)  # a number, or an array of resampled ones


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of the points that no other point beats.

    Larger is better in both coordinates; a point beats another if it is better in one and at least
    as good in the other.
    """
    return [
        i
        for i, (x, y) in enumerate(points)
        if not any(u >= x and v >= y and (u, v) != (x, y) for u, v in points)
    ]


def within_drop(
    points: Sequence[tuple[float, float]], drop: float = DROP, cut: bool = False
) -> list[int]:
    """Return indices of the points that lost at most `drop` against the slowest, from slow to fast.

    Raises DllmBenchError without points, or if the fastest lost more and `cut` does not allow that.
    """
    if not points:
        raise DllmBenchError("A curve without points has no area; give at least one point.")
    order = sorted(range(len(points)), key=lambda i: points[i][0])
    (first_x, first_y), (last_x, last_y) = points[order[0]], points[order[-1]]
    least = first_y - drop - NEARLY
    if last_y < least and not cut:
        raise DllmBenchError(
            f"The fastest point scores {last_y:.1f} at {last_x:.2f} and the slowest {first_y:.1f} "
            f"at {first_x:.2f}, {first_y - last_y:.1f} lost where {drop:g} are allowed: such a "
            "curve has no area; end the sweep earlier."
        )
    return [i for i in order if points[i][1] >= least]


def area(points: Sequence[tuple[N, N]], y_max: N, alpha: float = ALPHA) -> N:
    """Return the rectangle below the first point and the trapezoids from point to point.

    In the trapezoids a score y has the weight exp(-alpha (1 - y / y_max)), at most 1.
    """
    import numpy as np

    weighted = [y * np.minimum(1.0, np.exp(-alpha * (1 - y / y_max))) for _, y in points]
    total = points[0][0] * points[0][1]
    for k in range(1, len(points)):
        total = total + (points[k][0] - points[k - 1][0]) * (weighted[k] + weighted[k - 1]) / 2
    return total
