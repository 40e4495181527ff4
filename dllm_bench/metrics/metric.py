"""A metric: a ratio of two columns of the samples' frame, or a function of the frame.

The frame has a row per sample and the columns of `SampleStats` (`sample_stats.frame_of`). A ratio
gives the value and the per-item sums for a bootstrap; a function, such as a percentile, gives only
the value. A `MetricDefinition` has a name like `tpf/committed`. A `MetricFamily` is one such metric
for every position of a draft, named `name@k` with k from 1. `definitions` has the metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING, Any

from dllm_bench.metrics import accuracy
from dllm_bench.metrics.sample_stats import UNREAD, UNREPORTED, UNTIMED, Samples, frame_of

if TYPE_CHECKING:
    from pandas import DataFrame

Interval = tuple[float, float]
Column = Callable[["DataFrame"], Any]
"""Function from the samples' frame to a number per sample; missing numbers count as 0."""
MetricFunction = Callable[["DataFrame"], float | None]
"""Function from the samples' frame to the value; None if the samples do not define it."""


@dataclass(frozen=True)
class Ratio:
    """Sum of `top` over samples ÷ sum of `bottom` over samples."""

    top: Column
    bottom: Column
    each: bool = False
    """Use the mean over samples of `top` ÷ `bottom` instead, where `bottom` is positive."""
    largest: int | None = None
    """With `each`: the mean of only this many largest values."""

    def amounts(self, samples: DataFrame) -> Any:
        """Return each sample's contributions to the two sums, as an array (2, samples)."""
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
    """A metric; calling it gives its value over samples, or None if they do not define it."""

    name: str
    unit: str
    text: str
    """Definition in words; shown under tables."""
    function: MetricFunction
    requires: str | None = None
    """A column of `SampleStats` that not every record has; the metric is undefined without it."""
    is_share: bool = False
    """Whether it is a `Ratio` of counts, whose interval is Wilson's."""
    timed: bool = False
    """Whether it is undefined for samples without their own timings."""

    def __call__(self, samples: Samples) -> float | None:
        table = frame_of(samples)
        return None if self._missing(table) else self.function(table)

    @property
    def ratio(self) -> Ratio | None:
        """Its ratio; None for a function, and for a mean of only the largest samples, because
        resampling says nothing about a tail.
        """
        return (
            self.function if isinstance(self.function, Ratio) and not self.is_of_largest else None
        )

    def count(self, samples: Samples) -> int:
        """Return the number of samples that the value is computed from."""
        table, function = frame_of(samples), self.function
        if isinstance(function, Ratio) and function.each:
            return int(function.amounts(table)[1].sum())
        return len(table)

    @property
    def is_of_largest(self) -> bool:
        """Whether it is a mean of only the largest samples, which grows with the number of
        items."""
        return isinstance(self.function, Ratio) and self.function.largest is not None

    def bounds(self, samples: Samples) -> Interval | None:
        """Return Wilson's interval of a share, corrected for correlated events within a sample."""
        if self.ratio is None:
            return None
        happened, of = self.ratio.amounts(frame_of(samples))
        return accuracy.wilson_of_clusters(happened, of) if any(of) else None

    def _missing(self, samples: DataFrame) -> str | None:
        """Return the required column if any sample has no value in it."""
        required = [name for name in (self.requires, "seconds" if self.timed else None) if name]
        return next((name for name in required if samples[name].isna().any()), None)

    def why_undefined(self, samples: Samples) -> str:
        """Return why the samples do not define the metric."""
        reasons, missing = {**UNREPORTED, **UNTIMED, **UNREAD}, self._missing(frame_of(samples))
        return reasons.get(missing or "", "the samples do not define this number")


@dataclass(frozen=True)
class MetricFamily:
    """A metric for each position k of a draft, from 1."""

    name: str
    unit: str
    text: str
    function: Callable[[int], MetricFunction]
    """Function from k to the metric function of that position."""
    requires: str
    """As in `MetricDefinition`."""
    is_share: bool = False
    """As in `MetricDefinition`."""

    def at(self, k: int) -> MetricDefinition:
        """Return the metric called `name@k`."""
        name, text = f"{self.name}@{k}", f"position {k} of a proposal: {self.text}"
        function, requires = self.function(k), self.requires
        return MetricDefinition(name, self.unit, text, function, requires, self.is_share)
