"""Sealed records to points: the long form that is written as csv and drawn.

A point is a cell of the figure's table with the number its metric or its reading gives. Nothing is
left out in silence: a cell whose run is open or impossible here becomes a point without a number,
with the state of its run and the reason. Reported points stand apart by their `kind`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.readings import StoredRun, reading
from dllm_bench.figures.spec import PaperFigure, ParetoFront, SeriesCall
from dllm_bench.metrics.tradeoff import pareto_front
from dllm_bench.tables.build import BuiltCell, BuiltTable, build, setting_text
from dllm_bench.tables.plan import PlannedCell, distinct_runs
from dllm_bench.tables.spec import Profile, TableMetric

if TYPE_CHECKING:
    from dllm_bench.store.record import RunRecord
    from dllm_bench.store.store import Store

MEASURED = "measured"
EVOLUTION = "missing: evolution of its tokens"
UNDEFINED = "the run's facts do not define these points"
BY_METRIC = "metric"  # series by metric, not by facet
Position = float | str | None


@dataclass(frozen=True)
class FigurePoint:
    """One number of a figure. panel, series, quantity: names; x: a number or a category.

    z: the value at (x, y) of a heat map; kind: measured, printed or digitised; n: samples (or what
    the reading counts) behind it; state, reason: of a run that gives no number; run: hashes of
    the runs behind it; at: its place in a sweep; front: nothing in its panel beats it.
    """

    panel: str
    series: str
    quantity: str
    x: Position = None
    y: float | None = None
    low: float | None = None
    high: float | None = None
    z: float | None = None
    n: int = 0
    kind: str = MEASURED
    state: str = ""
    reason: str = ""
    source: str = ""
    run: str = ""
    at: str = ""
    front: bool = False

    @property
    def measured(self) -> bool:
        """Ours, or the paper's."""
        return self.kind == MEASURED


@dataclass(frozen=True)
class BuiltFigure:
    """A figure ready to be written: its points, and the table behind them with all states."""

    figure: PaperFigure
    built: BuiltTable
    points: tuple[FigurePoint, ...]

    def drawn(self, measured: bool) -> list[FigurePoint]:
        """The measured points that have a number, or the reported ones."""
        return [p for p in self.points if p.y is not None and p.measured == measured]

    def without(self) -> list[FigurePoint]:
        """The cells that have no number yet, or cannot have one here."""
        return [point for point in self.points if point.y is None]


def build_figure(
    figure: PaperFigure, profile: Profile, planned: Sequence[PlannedCell], store: Store
) -> BuiltFigure:
    """The figure with every point that the sealed records give."""
    built = build(figure.table, profile, planned)
    building = _Building(
        figure,
        {(*c.cell.keys.values(), c.cell.metric.name): c for c in built.cells},
        {r.identity_hash: StoredRun(r, store.path(r.spec)) for r in _records(planned)},
    )
    points = [
        point
        for cell in built.cells
        if cell.cell.metric.name != figure.draw.x.metric
        for point in building.points(cell)
    ]
    if figure.draw.front:
        points = list(with_front(points, figure.draw.front))
    return BuiltFigure(figure, built, (*points, *_reported(figure)))


def with_front(points: Sequence[FigurePoint], front: ParetoFront) -> Iterator[FigurePoint]:
    """The points, those marked that nothing of their panel beats."""
    side = 1 if front.better == "high" else -1
    panels: dict[tuple[str, str], list[FigurePoint]] = {}
    for point in points:
        if point.y is not None and point.series not in front.without:
            panels.setdefault((point.panel, point.quantity), []).append(point)
    best = {
        id(panel[i])
        for panel in panels.values()
        for i in pareto_front([(side * float(p.x or 0), float(p.y or 0)) for p in panel])
    }
    yield from (replace(point, front=id(point) in best) for point in points)


def _records(planned: Sequence[PlannedCell]) -> Iterator[RunRecord]:
    return (run.record for run in distinct_runs(planned) if run.record)


@dataclass(frozen=True)
class _Building:
    """Cells to points: all cells by their keys, and the sealed runs by hash."""

    figure: PaperFigure
    cells: Mapping[tuple[str, ...], BuiltCell]
    runs: Mapping[str, StoredRun]

    def points(self, cell: BuiltCell) -> Iterator[FigurePoint]:
        """The point of a cell, or those of its reading."""
        blank, call = self._blank(cell), self.figure.calls.get(self._metric(cell))
        if call and cell.run.record:
            yield from self._read(cell, call, blank)
            return
        x = self._x(cell)
        if cell.measured is None or call or x is None:
            yield replace(blank, x=x, reason=cell.cell.only or cell.run.short or cell.why)
            return
        low, high = cell.interval or (None, None)
        yield replace(blank, x=x, y=cell.measured, low=low, high=high, n=cell.n)

    def _metric(self, cell: BuiltCell) -> str:
        """The metric's name in the yaml, without a position."""
        return cell.cell.metric.name.partition("@")[0]

    def _blank(self, cell: BuiltCell) -> FigurePoint:
        """All of a point but its numbers."""
        figure, keys, metric = self.figure, cell.cell.keys, self._metric(cell)
        named = {**keys, BY_METRIC: metric}
        series = named.get(figure.draw.series, "")
        chosen = cell.run.chosen
        return FigurePoint(
            panel=keys.get(figure.draw.panels, ""),
            series=figure.group.get(series, series),
            quantity=figure.rows.get(metric, metric),
            state=str(cell.run.state),
            source=" on ".join(chosen[key] for key in ("model", "benchmark") if key in chosen),
            run=" ".join(run.spec.identity_hash for run in cell.runs if run.spec),
            at=" ".join(figure.at[name] for name in keys.values() if name in figure.at),
        )

    def _x(self, cell: BuiltCell) -> Position:
        """Where the cell stands on the x axis."""
        axis, keys = self.figure.draw.x, cell.cell.keys
        if axis.metric:
            return self.cells[(*keys.values(), axis.metric)].measured
        if axis.setting:
            configs = [run.config for run in cell.planned.runs if run.config]
            asked = TableMetric("x", "x", setting=axis.setting)
            return number(setting_text(configs[0], asked)) if configs else None
        if axis.facet:
            return number(self.figure.at.get(keys[axis.facet], keys[axis.facet]))
        return number(cell.cell.metric.name.partition("@")[2]) or None

    def _read(self, cell: BuiltCell, call: SeriesCall, blank: FigurePoint) -> Iterator[FigurePoint]:
        """What a reading finds in a sealed run; it may name panel and series itself."""
        assert cell.run.record
        run = self.runs[cell.run.record.identity_hash]
        settings = call.settings_for(list(cell.cell.keys.values()))
        why = EVOLUTION if call.evolve and not run.evolutions else UNDEFINED
        try:
            found = list(reading(call.reading)(run, settings))
        except DllmBenchError as error:
            found, why = [], str(error)
        if not found:
            yield replace(blank, reason=why)
        for r in found:
            whose = replace(blank, panel=r.panel or blank.panel, series=r.series or blank.series)
            yield replace(whose, x=r.x, y=r.y, low=r.low, high=r.high, z=r.z, n=r.n)


def _reported(figure: PaperFigure) -> Iterator[FigurePoint]:
    for p in figure.reported:
        x = number(p.x)
        yield FigurePoint(p.panel, p.series, p.quantity, x, p.y, kind=p.kind, source=p.source)


def number(text: str) -> float | str:
    """The number a text is, or the text."""
    try:
        return float(text)
    except ValueError:
        return text
