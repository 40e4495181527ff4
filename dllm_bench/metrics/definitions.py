"""All metrics by name: speed, served models, acceptance of drafts, calibration, a cache's error.

Tables, figures, pages and notebooks request a metric here: `definition` for its unit, text and
function, `measure` for its value over samples. A metric is a ratio of two columns of the samples'
frame (`sample_stats.frame_of`), which gives the value and the per-item sums for a bootstrap, or a
function of the frame, such as a percentile, which gives only the value. `definitions.yaml` says
what each metric counts; the columns that it names are those of `SampleStats` and of `COLUMNS`. A
metric is None where the samples do not define it (no sample, or no time after the first step).

A `MetricFamily` is one such metric for every position of a draft, named `name@k` with k from 1;
these are not part of `measure_all`, which fills a record's summary. Published numbers about drafts
differ in what they count (with or without the target's own token, prefix survival or conditional
acceptance) and in how they average (over rounds or over samples), so each has its own name. Scores
are in `accuracy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError, unknown_name
from dllm_bench.metrics import drafts
from dllm_bench.metrics.drafts import BINS, DraftRound, Outcomes
from dllm_bench.metrics.sample_stats import UNREAD, UNREPORTED, UNTIMED, Samples, frame_of
from dllm_bench.paths import read_yaml

if TYPE_CHECKING:
    from pandas import DataFrame, Series

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


def _later_s(samples: DataFrame) -> Series:
    """Return seconds after the first step; 0 for a sample that took a single step.

    The steps of a served model are unknown; its first step ends with the first content.
    """
    later = samples.seconds - samples.first_step_s.fillna(0)
    return later.mask(samples.forwards.isin([0, 1]), 0.0)


def _ms_per_token(samples: DataFrame) -> Series:
    """Return milliseconds between the tokens of one request; missing for fewer than two tokens."""
    later = samples.emitted.where(samples.emitted >= 2) - 1
    return 1000 * (samples.seconds - samples.ttft_s.fillna(0)) / later


def over_rounds(count: Callable[[DraftRound], Any]) -> Column:
    """Return a column: the sum over the rounds of each sample.

    count: function from all rounds, whose fields are arrays (rounds,), to a number per round.
    """

    def summed(samples: DataFrame) -> Any:
        import numpy as np

        none = drafts.rounds_array(())
        each = [none if rounds is None else rounds for rounds in samples.rounds]
        sample = np.repeat(np.arange(len(each)), list(map(len, each)))
        rounds = DraftRound(*np.concatenate([none, *each]).T)
        counts = np.broadcast_to(count(rounds), len(sample))
        return np.bincount(sample, counts, minlength=len(each))

    return summed


COLUMNS: dict[str, Column] = {
    "one": lambda s: 1,
    "commits": lambda s: s.committed + s.remasked.fillna(0),
    "later_tokens": lambda s: s.committed - s.first_tokens,
    "later_s": _later_s,
    "steps_ms": lambda s: 1000 * s.steps_s,
    "lopa_forwards": lambda s: s.forwards + 1,  # its last round is empty
    "fast_dllm_forwards": lambda s: s.forwards + s.idle,
    "dinfer_forwards": lambda s: s.forwards + s.idle_dinfer,
    "canvas_forwards": lambda s: s.forwards - s.encoding,
    "end_only": lambda s: (s.committed > 0) & (s.content == 0),
    "ms_per_token": _ms_per_token,
    "request_tps": lambda s: s.emitted / s.seconds,
    "answered": lambda s: s.ended_s.notna(),
    "retried": lambda s: s.tries > 1,
    "round_count": over_rounds(lambda r: 1),
    "proposed_drafts": over_rounds(lambda r: r.proposed),
    "accepted_drafts": over_rounds(lambda r: r.accepted),
    "round_tokens": over_rounds(lambda r: r.committed),
    "verified_positions": over_rounds(lambda r: r.proposed + 1),
    "round_ms": lambda s: 1000 * s[["draft_s", "head_s", "verify_s"]].sum(axis=1),
    "draft_ms": lambda s: 1000 * s.draft_s.fillna(0),
    "head_ms": lambda s: 1000 * s.head_s.fillna(0),
    "verify_ms": lambda s: 1000 * s.verify_s.fillna(0),
}
"""Name in definitions.yaml -> column that is computed from those of `SampleStats`."""


def column(name: str) -> Column:
    """Return the column of this name: one of `COLUMNS`, else a field of `SampleStats`."""
    return COLUMNS.get(name) or itemgetter(name)


def percentile_of(amount: Column, percent: float) -> MetricFunction:
    """Return a percentile over the samples that have the amount, with linear interpolation."""

    def compute(samples: DataFrame) -> float | None:
        values = amount(samples).dropna()
        return float(values.quantile(percent / 100)) if len(values) else None

    return compute


def per_second(amount: Column) -> MetricFunction:
    """Return the sum over samples ÷ the time from the first start to the last end.

    That time is summed over sessions: it includes failed tries, waits, and the end of a session,
    when fewer requests are in flight.
    """

    def compute(samples: DataFrame) -> float | None:
        sessions = samples.fillna({"session": 0}).groupby("session")
        took_s = float((sessions.ended_s.max() - sessions.began_s.min()).sum())
        amounts = amount(samples)
        return None if amounts.isna().any() or not took_s else float(amounts.sum() / took_s)

    return compute


def _definition(name: str, entry: dict[str, Any]) -> MetricDefinition:
    """Return the metric of an entry of definitions.yaml."""
    top = column(entry.pop("top"))
    if "percentile" in entry:
        function: MetricFunction = percentile_of(top, entry.pop("percentile"))
    elif entry.pop("per_second", False):
        function = per_second(top)
    else:
        ratio = {key: entry.pop(key) for key in ("each", "largest") if key in entry}
        function = Ratio(top, column(entry.pop("bottom", "one")), **ratio)
    return MetricDefinition(name, function=function, **entry)


SECTIONS: dict[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))
"""Section of definitions.yaml -> its metrics, by name."""
TEXTS: dict[str, str] = SECTIONS.pop("texts")
"""Definitions in words of what is no metric by itself."""
DECIMALS: dict[str, int] = SECTIONS.pop("decimals")
"""Unit -> decimals shown, if not one."""
TITLES: dict[str, str] = SECTIONS.pop("titles")
"""Beginning of a metric's name -> title of its group."""
DEFINITIONS = {
    name: _definition(name, dict(entry))
    for section in SECTIONS.values()
    for name, entry in section.items()
}
"""Metrics without a position, by name."""
MEASURES: dict[str, Callable[[Outcomes], float | None]] = {
    measure.__name__: measure for measure in (drafts.ece, drafts.auroc, drafts.brier)
}
PARTS = {"": "all", "_unscaled": "unscaled", "_scaled": "scaled"}
"""End of a calibration's name -> `part` of `drafts.outcomes_of`."""


def position_share(name: str, counts: Callable[[Any, Any, int], Any]) -> MetricFamily:
    """Return the share of rounds that accepted the token at a position. `counts` selects rounds by
    (longest chain proposed, tokens accepted, position from 1), the first two as arrays.

    The interval is Wilson's, corrected for correlation between the rounds of one sample.
    """

    def share(k: int) -> Ratio:
        return Ratio(
            over_rounds(lambda r: (r.proposed >= k) & (r.accepted >= k)),
            over_rounds(lambda r: counts(r.depth, r.accepted, k)),
        )

    return MetricFamily(name, "share", TEXTS[name], share, "rounds", is_share=True)


def calibration(measured: str, covered: str) -> MetricFamily:
    """Return a metric family: one measure over one part of the samples, for every position."""

    def function(k: int) -> MetricFunction:
        def at(samples: DataFrame) -> float | None:
            outcomes = drafts.outcomes_of(samples, PARTS[covered], k)
            return MEASURES[measured](outcomes) if outcomes.predicted else None

        return at

    text = f"{TEXTS[measured].format(bins=BINS)} of the prefix, {TEXTS[PARTS[covered]]}."
    return MetricFamily(f"calibration/{measured}{covered}", "share", text, function, "survival")


FAMILIES: dict[str, MetricFamily] = {
    entry.name: entry
    for entry in (
        position_share(
            "acceptance/conditional",
            lambda proposed, accepted, k: (k <= proposed) & (k <= accepted + 1),
        ),
        position_share("acceptance/survival", lambda proposed, accepted, k: k <= proposed),
        *(calibration(measured, covered) for measured in MEASURES for covered in PARTS),
    )
}
"""Metrics of a position, by the name before the @."""


def definition(name: str) -> MetricDefinition:
    """Return the metric called `name` or `name@k`; for an unknown name, a DllmBenchError lists all
    names."""
    family, at, position = name.partition("@")
    if at and family in FAMILIES and position.isdecimal() and int(position) > 0:
        return FAMILIES[family].at(int(position))
    if name in DEFINITIONS:
        return DEFINITIONS[name]
    known = [*DEFINITIONS, *(f"{name}@1" for name in FAMILIES)]
    raise DllmBenchError(unknown_name("metric", name, known))


def measure(name: str, samples: Samples) -> float | None:
    """Return the value of the metric called `name`; None if the samples do not define it."""
    return definition(name)(samples)


def measure_all(samples: Samples) -> dict[str, float | None]:
    """Return the values of all metrics without a position, by name."""
    table = frame_of(samples)
    return {name: entry(table) for name, entry in DEFINITIONS.items()}
