"""What a training says of itself while it goes on: one line for every point of its curve.

Numbers are named as in the curve that is stored; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping

from dllm_bench.run.progress import duration


def line(point: Mapping[str, float], of: int, eta_s: float) -> str:
    """`step 200 of 2000: loss 1.2, ETA 0:31`; the point's first number counts, `of` is its end."""
    (counted, now), *rest = point.items()
    numbers = ", ".join(f"{name} {value:g}" for name, value in rest)
    return f"{counted} {now:g} of {of}: {numbers}, ETA {duration(eta_s)}"
