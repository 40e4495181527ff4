"""What a named number is: a `MetricDefinition` over the facts of samples, and the means they share.

`function` gives the number, `bounds` its interval where counts alone give one. A
`MetricFamily` is one definition per position of a proposal, requested as `name@k`, k from 1. The
numbers themselves are in `speed`, `acceptance` and `calibration`, their registry in `definitions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from dllm_bench.metrics import accuracy
from dllm_bench.metrics.sample_stats import UNREPORTED, UNTIMED, SampleStats

Interval = tuple[float, float]
MetricFunction = Callable[[Sequence[SampleStats]], float | None]
PerSample = Callable[[SampleStats], float]
IntervalFunction = Callable[[Sequence[SampleStats]], Interval | None]


@dataclass(frozen=True)
class TotalRatio:
    """Sum over samples of `top` / sum over samples of `bottom`."""

    top: PerSample
    bottom: PerSample

    def __call__(self, facts: Sequence[SampleStats]) -> float | None:
        divisor = sum(self.bottom(fact) for fact in facts)
        return sum(self.top(fact) for fact in facts) / divisor if divisor > 0 else None

    def amounts(self, fact: SampleStats) -> tuple[float, float]:
        """What one sample adds to each sum."""
        return self.top(fact), self.bottom(fact)

    def interval(self, facts: Sequence[SampleStats]) -> Interval | None:
        """What resampling the samples that add to a sum leaves open; two at least."""
        used = [pair for pair in map(self.amounts, facts) if any(pair)]
        tops, bottoms = zip(*used, strict=True) if used else ((), ())
        if sum(bottom > 0 for bottom in bottoms) < 2:
            return None
        ends = accuracy.bootstrap_ratio(tops, bottoms)
        return ends if all(map(math.isfinite, ends)) else None


@dataclass(frozen=True)
class MetricDefinition:
    """A named number: its unit, what it counts in words, and the function over samples.

    `fact` names a fact that not every record has; the number is undefined without it. timed: so it
    is without times of the samples' own.
    """

    name: str
    unit: str
    text: str
    function: MetricFunction
    fact: str | None = None
    bounds: IntervalFunction | None = None
    timed: bool = False

    def __call__(self, facts: Sequence[SampleStats]) -> float | None:
        return None if self._absent(facts) else self.function(facts)

    def interval(self, facts: Sequence[SampleStats]) -> Interval | None:
        """Its interval at `accuracy.LEVEL`: by `bounds`, else by resampling the samples of a ratio
        of sums; None for any other number.
        """
        if self._absent(facts):
            return None
        if self.bounds:
            return self.bounds(facts)
        return self.function.interval(facts) if isinstance(self.function, TotalRatio) else None

    def _absent(self, facts: Sequence[SampleStats]) -> str | None:
        """The name of a fact that a sample lacks."""
        asked = [name for name in (self.fact, "seconds" if self.timed else None) if name]
        missing = (n for n in asked if any(getattr(fact, n) is None for fact in facts))
        return next(missing, None)

    def why_undefined(self, facts: Sequence[SampleStats]) -> str:
        """Why the samples do not define the number."""
        reasons = {**UNREPORTED, **UNTIMED}
        return reasons.get(self._absent(facts) or "", "the samples do not define this number")


@dataclass(frozen=True)
class MetricFamily:
    """A number for each position k, from 1, of a proposal: `function` of k; otherwise as
    `MetricDefinition`.
    """

    name: str
    unit: str
    text: str
    function: Callable[[int], MetricFunction]
    fact: str
    bounds: Callable[[int], IntervalFunction] | None = None

    def at(self, k: int) -> MetricDefinition:
        """The definition called `name@k`."""
        return MetricDefinition(
            f"{self.name}@{k}",
            self.unit,
            f"position {k} of a proposal: {self.text}",
            self.function(k),
            self.fact,
            self.bounds(k) if self.bounds else None,
        )


def total_ratio(top: PerSample, bottom: PerSample) -> TotalRatio:
    """Sum over samples of `top` / sum over samples of `bottom`."""
    return TotalRatio(top, bottom)


def each_ratio(top: PerSample, bottom: PerSample, facts: Sequence[SampleStats]) -> list[float]:
    """`top` / `bottom` of every sample that has a positive `bottom`."""
    return [top(fact) / bottom(fact) for fact in facts if bottom(fact) > 0]


def mean_ratio(top: PerSample, bottom: PerSample) -> MetricFunction:
    """Mean over samples of `top` / `bottom`."""
    return best_ratio(top, bottom, None)


def best_ratio(top: PerSample, bottom: PerSample, n: int | None) -> MetricFunction:
    """Mean of the `n` largest (None: all) per-sample ratios."""

    def measure(facts: Sequence[SampleStats]) -> float | None:
        ratios = sorted(each_ratio(top, bottom, facts), reverse=True)[:n]
        return fmean(ratios) if ratios else None

    return measure


def mean_of(amount: PerSample) -> MetricFunction:
    """Mean over samples."""
    return lambda facts: fmean(amount(fact) for fact in facts) if facts else None


def percentile_of(amount: PerSample, percent: int) -> MetricFunction:
    """Percentile over samples, linear between neighbours."""

    def measure(facts: Sequence[SampleStats]) -> float | None:
        values = [amount(fact) for fact in facts]
        if len(values) < 2:
            return values[0] if values else None
        return quantiles(values, n=100, method="inclusive")[percent - 1]

    return measure


def share_bounds(happened: PerSample) -> IntervalFunction:
    """Wilson's interval of a share of samples."""

    def bounds(facts: Sequence[SampleStats]) -> Interval | None:
        return accuracy.wilson(int(sum(map(happened, facts))), len(facts)) if facts else None

    return bounds
