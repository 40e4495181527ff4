"""What a metric is: a ratio of two columns of the samples' frame, or a function of it.

The frame has a row per sample and the columns of `SampleStats` (`sample_stats.frame_of`). A ratio
gives the value and, item by item, what a bootstrap draws; a function, such as a percentile, gives
the value alone. A `MetricDefinition` has a name like `tpf/committed`. A `MetricFamily` is one such
metric for every position of a draft, named `name@k` with k from 1. The metrics themselves are in
`speed`, `served`, `acceptance` and `calibration`; `definitions` finds them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING, Any

from dllm_bench.metrics import accuracy
from dllm_bench.metrics.sample_stats import UNREPORTED, UNTIMED, Samples, frame_of

if TYPE_CHECKING:
    from pandas import DataFrame

Interval = tuple[float, float]
Column = Callable[["DataFrame"], Any]
"""The samples' frame -> a number per sample; missing ones count as 0."""
MetricFunction = Callable[["DataFrame"], float | None]
"""The samples' frame -> value; None where they do not define it."""


@dataclass(frozen=True)
class Ratio:
    """Sum of `top` over samples ÷ sum of `bottom` over samples."""

    top: Column
    bottom: Column
    each: bool = False
    """The mean over samples of `top` ÷ `bottom` instead, where `bottom` is positive."""
    largest: int | None = None
    """With `each`: the mean of this many largest ones alone."""

    def amounts(self, samples: DataFrame) -> Any:
        """What every sample adds to the two sums, as an array (2, samples)."""
        import numpy as np

        columns = (self.top(samples), self.bottom(samples))
        sums = np.array([np.broadcast_to(column, len(samples)) for column in columns], float)
        sums[np.isnan(sums)] = 0.0
        if not self.each:
            return sums
        top, bottom = sums
        used = bottom > 0
        return np.array([np.divide(top, bottom, where=used, out=np.zeros(len(samples))), used])

    def __call__(self, samples: DataFrame) -> float | None:
        tops, bottoms = self.amounts(samples)
        if self.largest:
            tops = sorted(tops[bottoms > 0], reverse=True)[: self.largest]
            bottoms = [1.0] * len(tops)
        divisor = fsum(bottoms)
        return fsum(tops) / divisor if divisor > 0 else None


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
    is_share: bool = False
    """Whether it is a `Ratio` of counts, whose interval is Wilson's."""
    timed: bool = False
    """Whether it is undefined for samples without times of their own."""

    def __call__(self, samples: Samples) -> float | None:
        table = frame_of(samples)
        return None if self._missing(table) else self.function(table)

    @property
    def ratio(self) -> Ratio | None:
        """The ratio that it is; None for a function, and for a mean of the largest samples alone,
        since resampling says nothing about a tail.
        """
        return (
            self.function if isinstance(self.function, Ratio) and not self.is_of_largest else None
        )

    def count(self, samples: Samples) -> int:
        """How many of the samples the value is made of."""
        table, function = frame_of(samples), self.function
        if isinstance(function, Ratio) and function.each:
            return int(function.amounts(table)[1].sum())
        return len(table)

    @property
    def is_of_largest(self) -> bool:
        """True for the mean of the largest samples alone, which grows with the number of items."""
        return isinstance(self.function, Ratio) and self.function.largest is not None

    def bounds(self, samples: Samples) -> Interval | None:
        """Wilson's interval of a share, corrected for events of one sample being alike."""
        if self.ratio is None:
            return None
        happened, of = self.ratio.amounts(frame_of(samples))
        return accuracy.wilson_of_clusters(happened, of) if any(of) else None

    def _missing(self, samples: DataFrame) -> str | None:
        """A required column that a sample has no value in."""
        required = [name for name in (self.requires, "seconds" if self.timed else None) if name]
        return next((name for name in required if samples[name].isna().any()), None)

    def why_undefined(self, samples: Samples) -> str:
        """Why the samples do not define the metric."""
        reasons, missing = {**UNREPORTED, **UNTIMED}, self._missing(frame_of(samples))
        return reasons.get(missing or "", "the samples do not define this number")


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
    is_share: bool = False
    """As in `MetricDefinition`."""

    def at(self, k: int) -> MetricDefinition:
        """The metric called `name@k`."""
        name, text = f"{self.name}@{k}", f"position {k} of a proposal: {self.text}"
        function, requires = self.function(k), self.requires
        return MetricDefinition(name, self.unit, text, function, requires, self.is_share)


def mean_of(amount: Column) -> Ratio:
    """Mean over samples."""
    return Ratio(amount, lambda samples: 1)


def percentile_of(amount: Column, percent: float) -> MetricFunction:
    """Percentile over the samples that have the amount, with linear interpolation."""

    def compute(samples: DataFrame) -> float | None:
        values = amount(samples).dropna()
        return float(values.quantile(percent / 100)) if len(values) else None

    return compute
