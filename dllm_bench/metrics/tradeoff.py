"""Speed against score: which points nothing beats, and the area under a curve of them (AUP).

A point is (tokens per forward, score in percent) of one run. AUP is d3LLM's "accuracy under
parallelism": the area under score over tokens per forward, in which a score below the best one
known (`y_max`) counts less and less, and points that lost more than `drop` do not count. It is a
number of a set of methods: a better `y_max` changes everyone's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from dllm_bench.core.errors import DllmBenchError

ALPHA = 3.0  # d3LLM's leaderboard
DROP = 5.0  # points of score; d3LLM's leaderboard
NEARLY = 1e-9  # scores are sums of floats

N = TypeVar("N", float, Any)  # a number, or an array of resampled ones


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points than which no other is better in one number and as good in the other;
    both are the better, the larger.
    """
    return [
        i
        for i, (x, y) in enumerate(points)
        if not any(u >= x and v >= y and (u, v) != (x, y) for u, v in points)
    ]


def aup(
    points: Sequence[tuple[float, float]], y_max: float, alpha: float = ALPHA, drop: float = DROP
) -> float:
    """The area under the curve of the points that count."""
    return float(area([points[i] for i in counted(points, drop)], y_max, alpha))


def counted(
    points: Sequence[tuple[float, float]], drop: float = DROP, cut: bool = False
) -> list[int]:
    """Indices of the points that lost at most `drop` against the slowest, from slow to fast.

    The fastest has to be among them: a curve that ends in a loss has no area, unless it is `cut`.
    """
    if not points:
        raise DllmBenchError("A curve without points has no area; give it the slowest at least.")
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
    """The rectangle below the first point and the trapezoids from point to point, whose scores
    weigh exp(-alpha (1 - y / y_max)), 1 at most.
    """
    import numpy as np

    weighted = [y * np.minimum(1.0, np.exp(-alpha * (1 - y / y_max))) for _, y in points]
    total = points[0][0] * points[0][1]
    for k in range(1, len(points)):
        total = total + (points[k][0] - points[k - 1][0]) * (weighted[k] + weighted[k - 1]) / 2
    return total
