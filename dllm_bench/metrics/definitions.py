"""All metrics by name: speed, served models, acceptance of drafts, calibration, a cache's error.

Tables, figures, pages and notebooks request a metric here: `definition` for its unit, text and
function, `measure` for its value over samples. `definitions.yaml` says what each metric counts; the
columns that it names are those of `SampleStats` and of `COLUMNS`. A metric is None where the
samples do not define it (no sample, or no time after the first step). Metrics of one position of a
draft are called `name@k`, with k from 1; they are not part of `measure_all`, which fills a record's
summary. Scores are in `accuracy`.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError, unknown_name
from dllm_bench.metrics import acceptance, calibration
from dllm_bench.metrics.metric import (
    Column,
    MetricDefinition,
    MetricFamily,
    MetricFunction,
    Ratio,
)
from dllm_bench.metrics.sample_stats import Samples, frame_of
from dllm_bench.paths import read_yaml

if TYPE_CHECKING:
    from pandas import DataFrame, Series


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
    **acceptance.COLUMNS,
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


SECTIONS: dict[str, dict[str, MetricDefinition]] = {
    section: {name: _definition(name, entry) for name, entry in entries.items()}
    for section, entries in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}
"""Section of definitions.yaml -> its metrics, by name."""
DEFINITIONS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}
"""Metrics without a position, by name."""
FAMILIES: dict[str, MetricFamily] = {
    entry.name: entry for entry in (*acceptance.FAMILIES, *calibration.FAMILIES)
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
