"""Compare sealed runs with the first of them, in pairs, on the samples that both have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import accuracy
from dllm_bench.metrics.definitions import measure_all
from dllm_bench.site.format import align, number, percent
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import flat_settings, setting_rows
from dllm_bench.store.store import RunEntry, read_record

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class RunComparison:
    """Two or more runs; the others are compared with the first."""

    records: tuple[RunRecord, ...]
    """The runs."""

    def __post_init__(self) -> None:
        require_two(self.records)

    @property
    def scores(self) -> list[accuracy.Effect]:
        """The difference of scores, first - other, with its interval and test, for each other."""
        first, *others = self.records
        return [accuracy.compare(first.values, other.values) for other in others]

    def to_pandas(self) -> DataFrame:
        """Return a row per metric and a column per run, over the samples that all runs share."""
        import pandas as pd

        measured = zip(titles(self.records), shared_metrics(self.records), strict=True)
        return pd.DataFrame(dict(measured)).dropna(how="all")

    def lines(self) -> Iterator[str]:
        """Yield what differs in the settings, then the scores with tests, then all metrics."""
        first, *others = self.records
        settings = [flat_settings(record.spec) for record in self.records]
        hashes = ("run", *(record.spec.short for record in self.records))
        heads = ("setting", *titles(self.records))
        yield from align([heads, hashes, *setting_rows(settings)])
        yield ""
        for other in others:
            yield score_line(first, other)
        yield ""
        yield from metric_lines(self.records)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(titles(self.records))})"

    def _repr_html_(self) -> str:
        """Return the score lines, then the metrics as a table."""
        first, *others = self.records
        scores = "".join(f"<p>{escape(score_line(first, other))}</p>" for other in others)
        shown = self.to_pandas().to_html(float_format="{:.3f}".format, na_rep="–", border=0)
        return scores + shown


def titles(records: Sequence[RunRecord]) -> list[str]:
    """Return each run's decoder name. Equal names are told apart by the one setting in which the
    runs differ, or by the run's hash.
    """
    labels = [record.spec.label for record in records]
    alike = {label: [r for r in records if r.spec.label == label] for label in labels}
    named = [_title(record, alike[record.spec.label]) for record in records]
    doubled = {name for name in named if named.count(name) > 1}
    return [
        f"{name} {record.spec.short}" if name in doubled else name
        for name, record in zip(named, records, strict=True)
    ]


def _title(record: RunRecord, alike: Sequence[RunRecord]) -> str:
    """Return the decoder's name and the one setting in which runs of that name differ."""
    label = record.spec.label
    rows = setting_rows([flat_settings(one.spec) for one in alike])
    if len(rows) != 1:
        return label if len(alike) == 1 else f"{label} {record.spec.short}"
    name = rows[0][0]
    return f"{label} {name}={flat_settings(record.spec).get(name, 'none')}"


def require_two(runs: Sequence[object]) -> None:
    """Raise DllmBenchError if there is nothing to compare."""
    if len(runs) < 2:
        given = ", ".join(one for one in runs if isinstance(one, str)) or "a record"
        raise DllmBenchError(f"compare was given one run, {given}; name two or more (see status).")


def sealed_record(entry: RunEntry) -> RunRecord:
    """Return the record of a run that must be complete."""
    record = read_record(entry.path)
    if record is None:
        raise DllmBenchError(
            f"Run {entry.spec.short} is {entry.state.value} ({entry.done} samples); complete it "
            "with the command that started it."
        )
    return record


def score_line(first: RunRecord, second: RunRecord) -> str:
    """Return the difference of two runs' scores on shared samples, with its test and verdict."""
    result = accuracy.compare(first.values, second.values)
    verdict = "the runs differ, since the interval excludes 0"
    if not result.differs:
        verdict = "no difference is shown, since the interval contains 0"
    p_value = "" if result.p_value is None else f", p = {result.p_value:.3g}"
    difference, low, high = (f"{100 * x:+.1f}" for x in (result.value, result.low, result.high))
    return (
        f"score {_graded(first)} and {_graded(second)} %: "
        f"difference {difference} [{low}, {high}] points on {result.n} shared samples "
        f"({result.method}{p_value}): {verdict}"
    )


def _graded(record: RunRecord) -> str:
    """Return the score in percent, with how many samples have no grade."""
    return f"{percent(record.score)}{f' ({record.ungraded})' if record.ungraded else ''}"


def metric_lines(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield every metric over the samples that all runs share, with its ratio to the first
    run's."""
    shared, measured = shared_ids(records), shared_metrics(records)
    first, *others = titles(records)
    rows = [("metric", first, *others, *(f"{first}/{other}" for other in others))]
    for name in measured[0]:
        own, *rest = (metrics[name] for metrics in measured)
        if own is None and not any(value is not None for value in rest):
            continue
        ratios = (own / value if own is not None and value else None for value in rest)
        rows.append((name, number(own, 3), *(number(v, 3) for v in rest), *map(number, ratios)))
    yield f"metrics over {len(shared)} shared samples"
    yield from align(rows)


def shared_ids(records: Sequence[RunRecord]) -> set[str]:
    """Return ids of the samples that all runs have."""
    return set.intersection(*(set(record.columns["id"]) for record in records))


def shared_metrics(records: Sequence[RunRecord]) -> list[dict[str, float | None]]:
    """Return all metrics of each run, over the samples that all runs share."""
    shared = shared_ids(records)
    chosen = ([name in shared for name in record.columns["id"]] for record in records)
    return [measure_all(record.samples[mask]) for record, mask in zip(records, chosen, strict=True)]
