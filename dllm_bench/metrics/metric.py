"""What a metric is: a named function of samples, its unit, its text, and its interval.

A `MetricDefinition` has a name like `tpf/committed`. A `MetricFamily` is one such metric for every
position of a draft, named `name@k` with k from 1. The metrics themselves are in `speed`, `served`,
`acceptance` and `calibration`; `definitions` finds them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from dllm_bench.metrics import accuracy
from dllm_bench.metrics.sample_stats import UNREPORTED, UNTIMED, SampleStats

Interval = tuple[float, float]
MetricFunction = Callable[[Sequence[SampleStats]], float | None]
"""Samples -> value; None where they do not define it."""
PerSample = Callable[[SampleStats], float]
"""One sample -> its contribution."""
IntervalFunction = Callable[[Sequence[SampleStats]], Interval | None]


@dataclass(frozen=True)
class TotalRatio:
    """Sum of `top` over samples / sum of `bottom` over samples."""

    top: PerSample
    bottom: PerSample

    def __call__(self, samples: Sequence[SampleStats]) -> float | None:
        divisor = sum(self.bottom(sample) for sample in samples)
        return sum(self.top(sample) for sample in samples) / divisor if divisor > 0 else None

    def amounts(self, sample: SampleStats) -> tuple[float, float]:
        """What one sample adds to each sum."""
        return self.top(sample), self.bottom(sample)


@dataclass(frozen=True)
class EachRatio:
    """Mean of the `n` largest of `top` / `bottom` of each sample; None: of all."""

    top: PerSample
    bottom: PerSample
    n: int | None = None

    def __call__(self, samples: Sequence[SampleStats]) -> float | None:
        ratios = sorted((self.top(s) / self.bottom(s) for s in self.used(samples)), reverse=True)
        return fmean(ratios[: self.n]) if ratios else None

    def used(self, samples: Sequence[SampleStats]) -> list[SampleStats]:
        """The samples that have a ratio: those whose `bottom` is positive."""
        return [sample for sample in samples if self.bottom(sample) > 0]


@dataclass(frozen=True)
class MetricDefinition:
    """A metric; calling it gives its value over samples, None where they do not define it."""

    name: str
    unit: str
    text: str
    """What is counted, in words; shown under tables."""
    function: MetricFunction
    requires: str | None = None
    """A column of `SampleStats` that not every record has; the metric is undefined without it."""
    bounds: IntervalFunction | None = None
    """Its interval, where counts alone give one."""
    timed: bool = False
    """Whether it is undefined for samples without times of their own."""

    def __call__(self, samples: Sequence[SampleStats]) -> float | None:
        return None if self._missing(samples) else self.function(samples)

    def count(self, samples: Sequence[SampleStats]) -> int:
        """How many of the samples the value is made of."""
        each = self.function if isinstance(self.function, EachRatio) else None
        return len(each.used(samples) if each else samples)

    @property
    def is_of_largest(self) -> bool:
        """True for the mean of the largest samples alone, which grows with the number of items."""
        return isinstance(self.function, EachRatio) and self.function.n is not None

    def _missing(self, samples: Sequence[SampleStats]) -> str | None:
        """A required column that a sample has no value in."""
        required = [name for name in (self.requires, "seconds" if self.timed else None) if name]
        missing = (n for n in required if any(getattr(sample, n) is None for sample in samples))
        return next(missing, None)

    def why_undefined(self, samples: Sequence[SampleStats]) -> str:
        """Why the samples do not define the metric."""
        reasons = {**UNREPORTED, **UNTIMED}
        return reasons.get(self._missing(samples) or "", "the samples do not define this number")


@dataclass(frozen=True)
class MetricFamily:
    """A metric for each position k of a draft, from 1."""

    name: str
    unit: str
    text: str
    function: Callable[[int], MetricFunction]
    """k -> the function of that position."""
    requires: str
    """As in `MetricDefinition`."""
    bounds: Callable[[int], IntervalFunction] | None = None
    """k -> the interval of that position."""

    def at(self, k: int) -> MetricDefinition:
        """The metric called `name@k`."""
        return MetricDefinition(
            f"{self.name}@{k}",
            self.unit,
            f"position {k} of a proposal: {self.text}",
            self.function(k),
            self.requires,
            self.bounds(k) if self.bounds else None,
        )


def total_ratio(top: PerSample, bottom: PerSample) -> TotalRatio:
    """Sum of `top` over samples / sum of `bottom` over samples."""
    return TotalRatio(top, bottom)


def mean_ratio(top: PerSample, bottom: PerSample) -> EachRatio:
    """Mean over samples of `top` / `bottom`."""
    return EachRatio(top, bottom)


def best_ratio(top: PerSample, bottom: PerSample, n: int) -> EachRatio:
    """Mean of the `n` largest per-sample ratios."""
    return EachRatio(top, bottom, n)


def mean_of(amount: PerSample) -> MetricFunction:
    """Mean over samples."""
    return lambda samples: fmean(amount(sample) for sample in samples) if samples else None


def percentile_of(amount: PerSample, percent: int) -> MetricFunction:
    """Percentile over samples, with linear interpolation."""

    def compute(samples: Sequence[SampleStats]) -> float | None:
        values = [amount(sample) for sample in samples]
        if len(values) < 2:
            return values[0] if values else None
        return quantiles(values, n=100, method="inclusive")[percent - 1]

    return compute


def share_bounds(happened: PerSample) -> IntervalFunction:
    """Wilson interval of a share of samples; `happened` is 1 or 0."""

    def bounds(samples: Sequence[SampleStats]) -> Interval | None:
        return accuracy.wilson(int(sum(map(happened, samples))), len(samples)) if samples else None

    return bounds
