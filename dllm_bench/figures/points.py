"""Sealed records to the points of a figure, in the long form that is written as csv and drawn.

A point is a cell of the figure's table with the number that its metric or its run series gives.
A cell whose run is missing or unavailable becomes a point without a number, with the state of its
run and the reason, so nothing is dropped silently. Reported points are told apart by their `kind`.
Some run series need token replays, which are recorded on request: `missing_replays` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from statistics import mode

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import show_error
from dllm_bench.figures.run_series import StoredRun, run_series
from dllm_bench.figures.spec import PaperFigure, ParetoFront, SeriesCall
from dllm_bench.metrics.tradeoff import pareto_front
from dllm_bench.runs import token_replay
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, file_of_run, read_samples
from dllm_bench.tables.derive import leaves_of
from dllm_bench.tables.frame import BuiltTable, Row, build, parse_number, setting_text
from dllm_bench.tables.plan import PlannedCell, distinct_runs
from dllm_bench.tables.spec import Profile, TableMetric

MEASURED, STATED = "measured", "stated"
NO_REPLAY = "missing: token replay"
UNDEFINED = "the run's facts do not define these points"
BY_METRIC = "metric"  # the series are the metrics, not a facet's values


@dataclass(frozen=True)
class FigurePoint:
    """One point of a figure; a line of its csv file has these fields."""

    panel: str
    """Name of its panel."""
    series: str
    """Name of its series."""
    quantity: str
    """Name of the quantity on the y axis."""
    x: float | str | None = None
    """A number or a category; None if unknown."""
    y: float | None = None
    """None if there is no number; `state` and `reason` say why."""
    low: float | None = None
    """Lower end of its interval or band."""
    high: float | None = None
    """Upper end of its interval or band."""
    z: float | None = None
    """Value of a heat map at (x, y)."""
    n: int = 0
    """How many samples (or what a run series counts) are behind it."""
    kind: str = MEASURED
    """`measured`, or `printed`, `digitised` or `stated` for the paper's."""
    state: str = ""
    """State of its run, a `CellState`."""
    reason: str = ""
    """Why it has no number."""
    source: str = ""
    """What was measured, as "models on benchmarks", or where a reported point stands."""
    run: str = ""
    """Hashes of the runs behind it."""
    switched: str = ""
    """Settings of its run that the profile has in place of those asked, such as a shorter block."""
    at: str = ""
    """Its x in a sweep; the axis of a stated number."""
    front: bool = False
    """True if no point of its panel beats it."""

    @property
    def measured(self) -> bool:
        """False for a point of the paper."""
        return self.kind == MEASURED


@dataclass(frozen=True)
class BuiltFigure:
    """A figure with its points, ready to be written."""

    figure: PaperFigure
    """What is drawn."""
    built: BuiltTable
    """The table behind it, with the states of all runs."""
    points: tuple[FigurePoint, ...]
    """All points, measured and reported, with or without a number."""

    def drawn(self, measured: bool) -> list[FigurePoint]:
        """The points with a number: the measured ones, or the reported ones."""
        return [p for p in self.points if p.y is not None and p.measured == measured]

    def without_number(self) -> list[FigurePoint]:
        """The points whose runs are missing or unavailable."""
        return [point for point in self.points if point.y is None and point.measured]


def build_figure(
    figure: PaperFigure, profile: Profile, planned: Sequence[PlannedCell], store: Store
) -> BuiltFigure:
    """The figure with every point that the sealed records give."""
    built = build(figure.table, profile, planned)
    builder = _PointBuilder(
        figure,
        {row.Index: row for row in built.cells.itertuples()},
        {r.identity_hash: StoredRun(r, store.path(r.spec)) for r in _records(planned)},
        profile,
    )
    points = [
        point
        for cell in built.cells.itertuples()
        if cell.Index[-1] != figure.draw.x.metric
        for point in builder.points(cell)
    ]
    if figure.draw.front:
        points = list(with_front(points, figure.draw.front))
    return BuiltFigure(figure, built, (*points, *reported_points(figure)))


def with_front(points: Sequence[FigurePoint], front: ParetoFront) -> Iterator[FigurePoint]:
    """The points, with `front` set for those that no other of their panel beats."""
    sign = 1 if front.better == "high" else -1
    panels: dict[tuple[str, str], list[FigurePoint]] = {}
    for point in points:
        if point.y is not None and point.series not in front.without:
            panels.setdefault((point.panel, point.quantity), []).append(point)
    best = {
        id(panel[i])
        for panel in panels.values()
        for i in pareto_front([(sign * float(p.x or 0), float(p.y or 0)) for p in panel])
    }
    yield from (replace(point, front=id(point) in best) for point in points)


def missing_replays(
    figure: PaperFigure, planned: Iterable[PlannedCell], store: Store
) -> Iterator[tuple[RunSpec, int]]:
    """Sealed runs that have samples, but not the token replays that a run series needs, and of how
    many samples it needs them.
    """
    needed: dict[RunSpec, tuple[int, RunRecord]] = {}
    for entry in planned:
        call, spec = figure.calls.get(entry.cell.metric.name), entry.run.spec
        if call and call.replay_samples and spec and entry.run.record:
            known = needed[spec][0] if spec in needed else 0
            needed[spec] = (max(call.replay_samples, known), entry.run.record)
    for spec, (samples, record) in needed.items():
        folder = store.path(spec)
        has_samples = read_samples(folder).keys() >= set(record.columns["id"])
        if has_samples and file_of_run(folder, token_replay.FILE) is None:
            yield spec, samples


def make_replays(missing: Sequence[tuple[RunSpec, int]], store: Store) -> list[str]:
    """Record the token replays of these runs, one after the other; gives the errors."""
    failures = []
    for index, (spec, samples) in enumerate(missing, start=1):
        show_error(f"[{index}/{len(missing)}] token replay of {spec.folder}")
        try:
            token_replay.record_replays(spec, store, samples)
        except DllmBenchError as error:
            failures.append(f"{spec.folder}: {error}")
    return failures


def _records(planned: Sequence[PlannedCell]) -> Iterator[RunRecord]:
    return (run.record for run in distinct_runs(planned) if run.record)


@dataclass(frozen=True)
class _PointBuilder:
    """Turns cells into points."""

    figure: PaperFigure
    """The figure."""
    cells: Mapping[tuple[str, ...], Row]
    """(facet values …, metric) -> cell."""
    runs: Mapping[str, StoredRun]
    """Hash -> sealed run."""
    profile: Profile
    """What the runs were translated with."""

    def points(self, cell: Row) -> Iterator[FigurePoint]:
        """The point of a cell, or those of its run series."""
        blank, call = self._blank(cell), self.figure.calls.get(self._metric(cell))
        if call and cell.planned.run.record:
            yield from self._series_points(cell, call, blank)
            return
        x = self._x(cell)
        if isnan(cell.value) or call or x is None:
            yield replace(
                blank,
                x=x,
                reason=cell.planned.cell.reported_only or cell.planned.run.short or cell.reason,
            )
            return
        low, high = (None, None) if isnan(cell.low) else (cell.low, cell.high)
        yield replace(blank, x=x, y=cell.value, low=low, high=high, n=cell.n)

    def _metric(self, cell: Row) -> str:
        """The metric's name in the yaml, without a position."""
        return cell.Index[-1].partition("@")[0]

    def _blank(self, cell: Row) -> FigurePoint:
        """The cell's point without its numbers."""
        figure, keys, metric = self.figure, cell.planned.cell.keys, self._metric(cell)
        names = {**keys, BY_METRIC: metric}
        series = names.get(figure.draw.series, "")
        return FigurePoint(
            panel=keys.get(figure.draw.panels, ""),
            series=figure.group.get(series, series),
            quantity=figure.row(metric),
            state=cell.state,
            source=_source(cell),
            run=" ".join(run.spec.identity_hash for run in cell.runs if run.spec),
            switched=" ".join(self._switched(cell)),
            at=" ".join(figure.at[name] for name in keys.values() if name in figure.at),
        )

    def _switched(self, cell: Row) -> Iterator[str]:
        """Settings in place of those asked, but for the x axis'; of a mean, in how many of its
        runs if not in all.
        """
        leaves, on_axis = leaves_of(cell.planned), f"{self.figure.draw.x.setting}="
        switched = (
            o for leaf in leaves for o in self.profile.switched(self.figure.name, leaf.cell)
        )
        counts = Counter(o for o in switched if not o.startswith(on_axis))
        for override, count in counts.items():
            yield override if count == len(leaves) else f"{override} ({count}/{len(leaves)})"

    def _x(self, cell: Row) -> float | str | None:
        """Where the cell stands on the x axis."""
        axis, keys = self.figure.draw.x, cell.planned.cell.keys
        if axis.metric:
            x = self.cells[(*keys.values(), axis.metric)].value
            return None if isnan(x) else x
        if axis.setting:
            configs = [run.config for run in cell.planned.runs if run.config]
            setting = TableMetric("x", "x", setting=axis.setting)
            values = [setting_text(config, setting) for config in configs]
            most = mode(values) if values else None  # the runs of a mean may differ
            return number_or_text(most) if most is not None else None
        if axis.facet:
            return number_or_text(self.figure.at.get(keys[axis.facet], keys[axis.facet]))
        return number_or_text(cell.Index[-1].partition("@")[2]) or None

    def _series_points(
        self, cell: Row, call: SeriesCall, blank: FigurePoint
    ) -> Iterator[FigurePoint]:
        """The points that a run series gives for a sealed run; it may name panel and series."""
        assert cell.planned.run.record
        run = self.runs[cell.planned.run.record.identity_hash]
        settings = call.settings_for(list(cell.planned.cell.keys.values()))
        try:
            points = list(run_series(call.name)(run, settings))
            why = NO_REPLAY if call.replay_samples and not run.replays else UNDEFINED
        except DllmBenchError as error:
            points, why = [], str(error).replace(str(run.folder), cell.planned.run.folder)
        if not points:
            yield replace(blank, reason=why)
        for p in points:
            named = replace(blank, panel=p.panel or blank.panel, series=p.series or blank.series)
            yield replace(named, x=p.x, y=p.y, low=p.low, high=p.high, z=p.z, n=p.n)


def _source(cell: Row) -> str:
    """What was measured, "models on benchmarks"; of a mean, those of all its parts."""
    chosen = [leaf.run.chosen for leaf in leaves_of(cell.planned)]
    names = (sorted({c[key] for c in chosen if key in c}) for key in ("model", "benchmark"))
    return " on ".join(", ".join(found) for found in names if found)


def reported_points(figure: PaperFigure) -> Iterator[FigurePoint]:
    """The paper's points."""
    for p in figure.reported:
        x = number_or_text(p.x)
        yield FigurePoint(p.panel, p.series, p.quantity, x, p.y, kind=p.kind, source=p.source)


def number_or_text(text: str) -> float | str:
    """The number that a text spells, else the text."""
    number = parse_number(text)
    return text if number is None else number
