"""A figure as data: facets, run queries and metrics as in a table, and a specification of the
drawing.

A `PaperFigure` is read from `conf/figure/<paper>/<figure>.yaml`. Its `table`, read by
`tables/load`, defines what is planned, run and measured; `draw` says which facet makes the panels,
which the series, and what is on the x axis. Two short forms exist for figures only: `positions: 7`
makes one metric for each position of a draft, and `run_series` takes points from a run with a named
function (`run_series.py`) instead of one number. The paper's points are `reported`; numbers in its
text that are not points ("best at 64") are `stated`, by their name in reported/figure_numbers.csv.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from dllm_bench.core.declared import made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import PACKAGE, read_yaml
from dllm_bench.registry import require_known
from dllm_bench.tables import load
from dllm_bench.tables.spec import SCORE, PaperTable, parse_number

REPORTED_FIGURES = PACKAGE / "figures" / "reported"
STATED_NUMBERS = "figure_numbers.csv"
OWN_METRIC_KEYS = ("positions", "run_series", "with", "of", "row", "replay_samples")
"""Keys of a figure's metric that a table's metric does not have."""
Kind = Literal["lines", "band", "scatter", "bars", "histogram", "heat", "reliability"]


@dataclass(frozen=True)
class XAxis:
    """The quantity on the x axis. Without facet, setting and metric it comes from the points: the
    position of a metric, or the x of a run series.
    """

    label: str
    """Text below the axis."""
    facet: str = ""
    """The facet whose values are the x of their cells."""
    setting: str = ""
    """Dotted key of the run configuration whose value is x."""
    metric: str = ""
    """The metric whose number is x; the other metrics are drawn against it."""
    log: bool = False
    """True for a logarithmic axis; its ticks are plain numbers."""


@dataclass(frozen=True)
class ParetoFront:
    """Marks the points that no other of their panel beats in both numbers; a high y is better."""

    better: Literal["high", "low"]
    """Which x is better."""
    without: Sequence[str] = ()
    """Series that are left out, such as an oracle, which no method can reach."""


@dataclass(frozen=True)
class DrawSpec:
    """The specification of a drawing."""

    kind: Kind
    """How points are drawn, see `panels.PANEL_KINDS`."""
    x: XAxis
    """The x axis."""
    panels: str = ""
    """The facet whose values are the panels; empty for one panel."""
    series: str = ""
    """The facet whose values are the series, or "metric" for a series per metric."""
    z: str = ""
    """What the colours of a heat map mean."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Name -> text shown, for names that are not values of a facet."""
    front: ParetoFront | None = None
    """Which measured points are marked as Pareto front."""
    log_y: Sequence[str] = ()
    """Quantities with a logarithmic y axis: ours and the paper's are of different magnitude."""


class SeriesSettings(dict[str, Any]):
    """Settings of a run series; to read one that the figure does not give is a DllmBenchError."""

    def __missing__(self, key: str) -> Any:
        raise DllmBenchError(f"Its run series needs the setting {key!r}; give it under `with`.")


@dataclass(frozen=True)
class SeriesCall:
    """A run series by name, with its settings."""

    name: str
    """A key of `run_series.RUN_SERIES`."""
    settings: Mapping[str, Any]
    """Settings for all cells."""
    by_value: Mapping[str, Mapping[str, Any]]
    """Facet value -> settings of its cells, which add to the others or replace them."""
    replay_samples: int = 0
    """From how many samples it needs the token replay (`runs/token_replay`)."""

    def settings_for(self, values: Sequence[str]) -> SeriesSettings:
        """Return the settings of a cell with these facet values."""
        own = {key: v for value in values for key, v in self.by_value.get(value, {}).items()}
        return SeriesSettings({**self.settings, **own})


@dataclass(frozen=True)
class StatedNumber:
    """A number in the paper's text about a figure that is not one of its points: a place on an axis
    (the best block length), a range, or neither (a speedup).
    """

    metric: str
    """Its name in figure_numbers.csv."""
    text: str
    """What it is, in words; `{}` stands for the printed number."""
    value: str
    """As printed, without a unit: `64`, or `0.2–0.65` for a range."""
    low: float
    """The number, or the lower end of a range."""
    high: float
    """The number, or the upper end of a range."""
    axis: str = ""
    """The axis that it is a place on, `x` or `y`; empty if it is only written below the panels."""
    quantity: str = ""
    """The quantity whose panels it belongs to; empty: all."""
    panel: str = ""
    """The panel that it belongs to; empty: all."""
    series: str = ""
    """The series whose measured values over a range are written beside it."""

    @property
    def sentence(self) -> str:
        """The text with the number."""
        return self.text.format(self.value)


@dataclass(frozen=True)
class PaperFigure:
    """One figure, published or (without reported points) of this project."""

    table: PaperTable
    """Facets, run queries and metrics: what is planned, run and measured."""
    draw: DrawSpec
    """How it is drawn."""
    quantities: Mapping[str, str]
    """The rows of panels: name -> label of the y axis."""
    rows: Mapping[str, str]
    """Metric -> quantity that it belongs to, where that is not the metric itself."""
    calls: Mapping[str, SeriesCall]
    """Metric -> the run series that gives its points."""
    at: Mapping[str, str]
    """Value of a swept facet -> its x."""
    group: Mapping[str, str]
    """Value of a swept facet -> name of the sweep that it belongs to."""
    reported: tuple[Mapping[str, Any], ...]
    """The paper's own points, by the names of `points.BLANK`: `printed` or, drawn, `digitised`."""
    stated: tuple[StatedNumber, ...] = ()
    """Numbers of the paper's text that are no points."""

    @property
    def name(self) -> str:
        """`<paper>/<figure>`."""
        return self.table.name

    def facet_labels(self, facet: str) -> dict[str, str]:
        """Return the name -> label of a facet's values, in order; a sweep is one name."""
        values = self.table.facets.get(facet, ())
        return {self.group.get(value.name, value.name): value.label for value in values}

    def row(self, metric: str) -> str:
        """Return the quantity that a metric belongs to."""
        return self.rows.get(metric, metric)

    def label(self, name: str) -> str:
        """Return the text shown for the name of a panel or series."""
        facets = (self.draw.panels, self.draw.series)
        known = {key: text for facet in facets for key, text in self.facet_labels(facet).items()}
        metrics = {m.name.partition("@")[0]: m.label for m in self.table.metrics}
        return {**metrics, **known, **self.draw.labels}.get(name, name)


@lru_cache
def load_figure(name: str) -> PaperFigure:
    """Return the figure called `<paper>/<figure>`."""
    load.require_name("figure", name)
    file, data = load.file_and_data("figure", name, REPORTED_FIGURES)
    with load.errors_of(file, "figure"):
        return read_figure(name, file, data)


def read_figure(name: str, path: Path, data: Path) -> PaperFigure:
    """Return a figure from its yaml file; the csv files of its reported points lie below `data`,
    those of its facets and rules below `tables_beside(data)`."""
    plain = read_yaml(path)
    facets, metrics = plain["facets"], plain["metrics"]
    own = {"layout": {"rows": list(facets)}, "metrics": dict(_table_metrics(metrics))}
    own_keys = ("draw", "reported", "stated")
    rest = {key: entry for key, entry in plain.items() if key not in own_keys}
    table = load.parse_table(name, {**rest, **own}, tables_beside(data))
    draw = made_from(DrawSpec, plain["draw"])
    _check_names(draw, list(facets), list(metrics))
    rows = {name: metric["row"] for name, metric in metrics.items() if "row" in metric}
    drawn = {rows.get(k, k): m["label"] for k, m in metrics.items() if k != draw.x.metric}
    steps = load.sweep_steps(facets)
    return PaperFigure(
        table=table,
        draw=draw,
        quantities={name: draw.labels.get(name, label) for name, label in drawn.items()},
        rows=rows,
        calls={key: _call(metric) for key, metric in metrics.items() if "run_series" in metric},
        at={step.value: step.x for step in steps},
        group={step.value: step.group for step in steps if step.group},
        reported=tuple(
            p for entry in plain.get("reported", ()) for p in _reported(entry, data, table.source)
        ),
        stated=tuple(_stated(name, plain.get("stated", {}), data)),
    )


def _check_names(draw: DrawSpec, facets: list[str], metrics: list[str]) -> None:
    """Raise DllmBenchError if a drawing names a facet or metric that the figure lacks."""
    for facet in filter(None, (draw.panels, draw.x.facet)):
        require_known("facet", facet, facets)
    if draw.series:
        require_known("facet", draw.series, [*facets, "metric"])
    if draw.x.metric:
        require_known("metric", draw.x.metric, metrics)


def tables_beside(data: Path) -> Path:
    """Return the folder of the csv files of tables that belongs to that of the figures."""
    return load.REPORTED_TABLES if data == REPORTED_FIGURES else data.with_name("table")


def _table_metrics(plain: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the metrics in a table's form: one per position. A run series is planned as a score, so
    that its run is planned; the score itself is never shown.
    """
    for name, entry in plain.items():
        kept = {key: value for key, value in entry.items() if key not in OWN_METRIC_KEYS}
        if "run_series" in entry:
            yield name, {**kept, "definition": SCORE}
            continue
        for k in range(1, entry.get("positions", 0) + 1):
            yield f"{name}@{k}", {**kept, "definition": f"{entry['definition']}@{k}"}
        if "positions" not in entry:
            yield name, kept


def _call(plain: Mapping[str, Any]) -> SeriesCall:
    settings, by_value = plain.get("with", {}), plain.get("of", {})
    return SeriesCall(plain["run_series"], settings, by_value, plain.get("replay_samples", 0))


def _reported(entry: Mapping[str, Any], data: Path, source: str) -> Iterator[dict[str, Any]]:
    """Yield the points of a csv file; rows that do not match `where`, or whose panel, series,
    quantity or x has no translation, are left out.
    """
    for row in _rows(entry, data):
        keys = ("panel", "series", "quantity", "x")
        named = {key: _column(entry.get(key, ""), row) for key in keys}
        where = entry.get("where", {}).items()
        matches = all(row[column] in load.as_tuple(allowed) for column, allowed in where)
        if matches and None not in named.values():
            y = float(row[entry.get("y", "value")].strip("%+")) * entry.get("scale", 1)
            of_paper = {"kind": entry["kind"], "source": entry.get("source", source)}
            yield {**named, "x": number_or_text(str(named["x"])), "y": y, **of_paper}


def number_or_text(text: str) -> float | str:
    """Return the number that a text spells, else the text."""
    number = parse_number(text)
    return text if number is None else number


def _stated(
    name: str, plain: Mapping[str, Mapping[str, Any]], data: Path
) -> Iterator[StatedNumber]:
    """Yield the numbers that the text gives for the figure called `<paper>/figure<number>`; `to`
    names the upper end of a range, and `panel: {keys: …}` the panel of each row.
    """
    paper, _, figure = name.partition("/figure")
    rows = load.read_csv(data / STATED_NUMBERS) if plain else []
    rows = [row for row in rows if (row["paper"], row["figure"]) == (paper, figure)]
    values = {row["metric"]: row["value"] for row in rows}
    for metric, entry in plain.items():
        rest = {key: entry[key] for key in ("axis", "quantity", "series") if key in entry}
        for row in (row for row in rows if row["metric"] == metric):
            printed = [row["value"], values[entry["to"]]] if "to" in entry else [row["value"]]
            ends = [end for text in printed for end in text.strip("%+").split("-")]
            panel = _column(entry.get("panel", ""), row)
            if panel is not None:
                yield StatedNumber(
                    metric, entry["text"], "–".join(ends), float(ends[0]), float(ends[-1]),
                    panel=panel, **rest,
                )  # fmt: skip


def _rows(entry: Mapping[str, Any], data: Path) -> list[dict[str, str]]:
    """Return the rows of the csv file. `pair: {column: [a, b]}` joins two rows that differ only in
    that column into one, which has their values under the names a and b.
    """
    rows = load.read_csv((tables_beside(data) if entry.get("of_table") else data) / entry["file"])
    if "pair" not in entry:
        return rows
    [(column, pair)] = entry["pair"].items()
    joined: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(text for name, text in row.items() if name not in (column, "value", "unit"))
        if row[column] in pair:
            joined.setdefault(key, dict(row))[row[column]] = row["value"]
    return [row for row in joined.values() if all(name in row for name in pair)]


def _column(plain: Any, row: Mapping[str, str]) -> str | None:
    """Return a fixed name, or the text of a column (of several, joined by +) in translation; None
    if the text has no translation.
    """
    if not isinstance(plain, Mapping):
        return str(plain)
    [(columns, translations)] = plain.items()
    text = "+".join(row[column] for column in columns.split("+"))
    return text if translations is None else translations.get(text)
