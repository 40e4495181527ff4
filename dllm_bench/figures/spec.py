"""A figure as data: a table's facets, run queries and metrics, and how the numbers are drawn.

A `Figure` is read from `conf/figure/<paper>/<figure>.yaml`. What is planned, run and measured is
its `table`, read and expanded by `tables/spec`; `draw` says which facet makes the panels, which the
series, and what stands on the x axis. `positions` (one metric per position of a draft) is spelled
out here, sweeps in `tables/sweeps`. A metric with a `reading` takes its points from a run's facts
instead of one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import PACKAGE, conf_dir
from dllm_bench.tables.load import REPORTED as TABLES
from dllm_bench.tables.load import read_csv, read_yaml, steps_of, table_of
from dllm_bench.tables.options import names
from dllm_bench.tables.spec import PaperTable

REPORTED = PACKAGE / "figures" / "reported"
PLAIN = "score"  # the definition a reading is planned under; it is never shown


@dataclass(frozen=True)
class XAxis:
    """What stands on the x axis: a facet's value, a setting of the run (a dotted key of its
    configuration), a metric, or (none of them) what the points say.
    """

    label: str
    facet: str = ""
    setting: str = ""
    metric: str = ""
    log: bool = False


@dataclass(frozen=True)
class ParetoFront:
    """Marks the points that nothing beats: a high y is better, and a `high` or `low` x; `without`
    these series, which no method can reach.
    """

    better: Literal["high", "low"]
    without: Sequence[str] = ()


@dataclass(frozen=True)
class DrawSpec:
    """How the points become a drawing.

    panels, series: facets, empty where there is none; a series may be "metric"; z: what colours
    mean; labels: names that are no facet's values, in words; front: of measured panels.
    """

    kind: str
    x: XAxis
    panels: str = ""
    series: str = ""
    z: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    front: ParetoFront | None = None


@dataclass(frozen=True)
class SeriesCall:
    """A reading by name with its settings; `of`: facet value -> settings of its cells alone.

    evolve: of how many samples it reads the tokens' evolution (`run/token_replay`).
    """

    reading: str
    settings: Mapping[str, Any]
    of: Mapping[str, Mapping[str, Any]]
    evolve: int = 0

    def settings_for(self, values: Sequence[str]) -> dict[str, Any]:
        """The settings of a cell with these facet values."""
        own = {key: v for value in values for key, v in self.of.get(value, {}).items()}
        return {**self.settings, **own}


@dataclass(frozen=True)
class ReportedPoint:
    """A point of the paper's own figure. kind: `printed`, or `digitised` from the drawn curve."""

    panel: str
    series: str
    quantity: str
    x: str
    y: float
    kind: str
    source: str


@dataclass(frozen=True)
class PaperFigure:
    """One figure. quantities: the rows of panels, name -> label; rows: metric -> the quantity it
    belongs to; calls: metric -> its reading; at, group: value of a swept facet -> its x, and the
    sweep it belongs to.
    """

    table: PaperTable
    draw: DrawSpec
    quantities: Mapping[str, str]
    rows: Mapping[str, str]
    calls: Mapping[str, SeriesCall]
    at: Mapping[str, str]
    group: Mapping[str, str]
    reported: tuple[ReportedPoint, ...]

    @property
    def name(self) -> str:
        """`<paper>/<figure>`."""
        return self.table.name

    def facet_labels(self, facet: str) -> dict[str, str]:
        """Names of a facet's values and their labels, in order; groups of sweeps by theirs."""
        values = self.table.facets.get(facet, ())
        found = {self.group.get(value.name, value.name): value.label for value in values}
        return found

    def label(self, name: str) -> str:
        """A panel's or series' name in words."""
        facets = (self.draw.panels, self.draw.series)
        known = {key: text for facet in facets for key, text in self.facet_labels(facet).items()}
        metrics = {m.name.partition("@")[0]: m.label for m in self.table.metrics}
        return {**metrics, **known, **self.draw.labels}.get(name, name)


@lru_cache
def load_figure(name: str) -> PaperFigure:
    """The figure called `<paper>/<figure>`."""
    known = names("figure")
    if name not in known:
        raise DllmBenchError(f"There is no figure {name!r}; choose one of: {', '.join(known)}.")
    return read_figure(name, conf_dir() / "figure" / f"{name}.yaml", REPORTED)


def read_figure(name: str, path: Path, data: Path) -> PaperFigure:
    """A figure from its yaml; the csv files of its reported points lie below `data`."""
    plain = read_yaml(path)
    facets, metrics = plain["facets"], plain["metrics"]
    own = {"layout": {"rows": list(facets)}, "metrics": dict(_metrics(metrics))}
    rest = {key: entry for key, entry in plain.items() if key not in ("draw", "reported")}
    table = table_of(name, {**rest, **own}, TABLES)
    draw = _draw(plain["draw"])
    rows = {name: metric["row"] for name, metric in metrics.items() if "row" in metric}
    drawn = {name: metric["label"] for name, metric in metrics.items() if name != draw.x.metric}
    return PaperFigure(
        table=table,
        draw=draw,
        quantities={rows.get(k, k): draw.labels.get(rows.get(k, k), t) for k, t in drawn.items()},
        rows=rows,
        calls={key: _call(metric) for key, metric in metrics.items() if "reading" in metric},
        at={step.value: step.x for step in steps_of(facets)},
        group={step.value: step.group for step in steps_of(facets) if step.group},
        reported=tuple(
            p for entry in plain.get("reported", ()) for p in _reported(entry, data, table.source)
        ),
    )


def _draw(plain: Mapping[str, Any]) -> DrawSpec:
    front = {"front": ParetoFront(**plain["front"])} if "front" in plain else {}
    return DrawSpec(**{**plain, "x": XAxis(**plain["x"]), **front})


def _metrics(plain: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Metrics as a table has them: one per position, a carrier for a reading."""
    own = ("positions", "reading", "with", "of", "row", "evolve")
    for name, entry in plain.items():
        kept = {key: value for key, value in entry.items() if key not in own}
        if "reading" in entry:
            yield name, {**kept, "definition": PLAIN}
            continue
        for k in range(1, entry.get("positions", 0) + 1):
            yield f"{name}@{k}", {**kept, "definition": f"{entry['definition']}@{k}"}
        if "positions" not in entry:
            yield name, kept


def _call(plain: Mapping[str, Any]) -> SeriesCall:
    settings, of = plain.get("with", {}), plain.get("of", {})
    return SeriesCall(plain["reading"], settings, of, plain.get("evolve", 0))


def _reported(entry: Mapping[str, Any], data: Path, source: str) -> Iterator[ReportedPoint]:
    """Points of a csv; rows whose columns hold another text than the ones named are left out."""
    for row in _rows(entry, data):
        parts = [_column(entry.get(key, ""), row) for key in ("panel", "series", "quantity", "x")]
        wanted = all(_matches(row, *pair) for pair in entry.get("where", {}).items())
        if wanted and None not in parts:
            panel, series, quantity, x = (str(part) for part in parts)
            y = float(row[entry.get("y", "value")].strip("%+")) * entry.get("scale", 1)
            where = entry.get("source", source)
            yield ReportedPoint(panel, series, quantity, x, y, entry["kind"], where)


def _rows(entry: Mapping[str, Any], data: Path) -> list[dict[str, str]]:
    """The rows of the csv; `pair: {column: [a, b]}` joins two numbers of one thing: x is the row
    of a, y that of b, all else being equal.
    """
    rows = read_csv((TABLES if entry.get("of_table") else data) / entry["file"])
    if "pair" not in entry:
        return rows
    [(column, names)] = entry["pair"].items()
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(text for name, text in row.items() if name not in (column, "value", "unit"))
        if row[column] in names:
            found.setdefault(key, dict(row))[row[column]] = row["value"]
    return [row for row in found.values() if all(name in row for name in names)]


def _matches(row: Mapping[str, str], column: str, wanted: Any) -> bool:
    return row[column] in (wanted if isinstance(wanted, list) else [str(wanted)])


def _column(plain: Any, row: Mapping[str, str]) -> str | None:
    """A fixed name, or the text of a column (or of several, joined by +) translated to one; None:
    it has no translation.
    """
    if not isinstance(plain, Mapping):
        return str(plain)
    [(columns, translations)] = plain.items()
    text = "+".join(row[column] for column in columns.split("+"))
    return text if translations is None else translations.get(text)
