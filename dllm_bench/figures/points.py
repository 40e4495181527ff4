"""Turn sealed records into the points of a figure: a pandas frame, which is written as csv and
drawn.

A point is a cell of the figure's table with the number that its metric or its run series gives.
A cell whose run is missing or unavailable becomes a point without a number, with the state of its
run and the reason, so nothing is dropped silently. Reported points have another `kind`. Some run
series need token replays, which are recorded on request: `missing_replays` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from statistics import mode
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import show_error
from dllm_bench.figures.run_series import Point, StoredRun, run_series
from dllm_bench.figures.spec import PaperFigure, ParetoFront, SeriesCall, number_or_text
from dllm_bench.figures.trade_off import pareto_front
from dllm_bench.runs import token_replay
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, file_of_run, read_samples
from dllm_bench.tables.derive import leaves_of
from dllm_bench.tables.frame import BuiltTable, Row, build, setting_text
from dllm_bench.tables.plan import PlannedCell, distinct_runs
from dllm_bench.tables.spec import Profile, TableMetric

if TYPE_CHECKING:
    from pandas import DataFrame

MEASURED, STATED = "measured", "stated"
NO_REPLAY = "missing: token replay"
UNDEFINED = "the run's facts do not define these points"
BY_METRIC = "metric"  # the series are the metrics, not a facet's values


BLANK: Mapping[str, Any] = {
    **dict.fromkeys(("panel", "series", "quantity"), ""),
    **dict.fromkeys(("x", "y", "low", "high", "z")),
    "n": 0,
    "kind": MEASURED,
    **dict.fromkeys(("state", "reason", "source", "run", "switched", "at"), ""),
    "front": False,
}
"""The columns of a figure's points and of its csv, with the value that stands for an absent one.

Panel, series, and quantity on the y axis; x, a number or a category; y, with low and high ends of
its interval or band; z, the value of a heat map at (x, y); n, the number of samples, or of what a
run series counts. Kind: `measured`, or `printed`, `digitised` or `stated` for the paper's. State of
its run, a `CellState`, and the reason why it has no number. Source: what was measured, as "models
on benchmarks", or where a reported point stands. Hashes of its runs. Switched: settings of its run
that the profile replaced, such as a shorter block. At: its x in a sweep, or the axis of a stated
number. Front: whether no point of its panel beats it.
"""
NUMBERS = ("y", "low", "high", "z")


def frame_of_points(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """Return a row per point. Values stay as they are: whole numbers are written without a
    point."""
    import pandas as pd

    return pd.DataFrame([{**BLANK, **row} for row in rows], columns=list(BLANK), dtype=object)


@dataclass(frozen=True)
class BuiltFigure:
    """A figure with its points, ready to be written."""

    figure: PaperFigure
    """The specification of the figure."""
    built: BuiltTable
    """Its table, with the states of all runs."""
    points: DataFrame
    """All points, measured and reported, with or without a number; columns as in `BLANK`."""

    @cached_property
    def placed(self) -> DataFrame:
        """The points with a number, and `place`, their position on the x axis."""
        order = {x: place for place, x in enumerate(self.categories)}
        drawn = self.points[self.points.y.notna()].astype(dict.fromkeys(NUMBERS, float))
        return drawn.assign(
            place=[float(order[x] if isinstance(x, str) else x or 0) for x in drawn.x]
        )

    def drawn(self, measured: bool) -> DataFrame:
        """Return the points with a number: the measured ones, or the reported ones."""
        return self.placed[self.placed.kind.eq(MEASURED) == measured]

    @property
    def without_number(self) -> DataFrame:
        """The points whose runs are missing or unavailable."""
        return self.points[self.points.y.isna() & self.points.kind.eq(MEASURED)]

    @property
    def panels(self) -> list[str]:
        """Names of the panels: the facet's values, then those that run series or the paper add."""
        return in_order(self.points.panel, self.figure.facet_labels(self.figure.draw.panels))

    @cached_property
    def series(self) -> dict[str, int]:
        """Series that have a point to draw, in the order of their facet -> their number, from 1."""
        order = [*self.figure.facet_labels(self.figure.draw.series), *self.figure.rows]
        names = in_order(self.points.series[self.points.y.notna()], order)
        return {name: number for number, name in enumerate(names, start=1)}

    @cached_property
    def categories(self) -> list[str]:
        """Categories on the x axis, in the order of their facet; none where x is a number."""
        names = [x for x in self.points.x if isinstance(x, str)]
        return in_order(names, self.figure.facet_labels(self.figure.draw.x.facet))


def in_order(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Return the distinct names, first those of `order` in its order."""
    known = list(dict.fromkeys(names))
    return [name for name in dict.fromkeys([*order, *known]) if name in known]


def build_figure(
    figure: PaperFigure, profile: Profile, planned: Sequence[PlannedCell], store: Store
) -> BuiltFigure:
    """Return the figure with every point that the sealed records give."""
    built = build(figure.table, profile, planned)
    records = (run.record for run in distinct_runs(planned) if run.record)
    runs = {record.identity_hash: StoredRun(record, store.path(record.spec)) for record in records}
    builder = _PointBuilder(figure, built, runs)
    measured = [
        point
        for cell in built.cells.itertuples()
        if cell.Index[-1] != figure.draw.x.metric
        for point in builder.points(cell)
    ]
    points = frame_of_points([*measured, *figure.reported])
    return BuiltFigure(figure, built, with_front(points, figure.draw.front))


def with_front(points: DataFrame, front: ParetoFront | None) -> DataFrame:
    """Return the points, with `front` set for the measured ones that no other of their panel
    beats."""
    if front is None:
        return points
    sign = 1 if front.better == "high" else -1
    can_win = points.y.notna() & points.kind.eq(MEASURED) & ~points.series.isin(front.without)
    if words := [x for x in points.x[can_win] if isinstance(x, str)]:
        raise DllmBenchError(
            f"A Pareto front needs numbers on the x axis, which has {words[0]!r}; remove `front`."
        )
    best = [
        panel.index[i]
        for _, panel in points[can_win].groupby(["panel", "quantity"])
        for i in pareto_front([(sign * float(p.x or 0), p.y) for p in panel.itertuples()])
    ]
    return points.assign(front=points.index.isin(best))


def missing_replays(
    figure: PaperFigure, planned: Iterable[PlannedCell], store: Store
) -> Iterator[tuple[RunSpec, int]]:
    """Return the sealed runs that have samples but lack token replays that a run series needs, and
    the number of samples to replay.
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
    """Record the token replays of these runs, one after the other; return the errors."""
    failures = []
    for index, (spec, samples) in enumerate(missing, start=1):
        show_error(f"[{index}/{len(missing)}] token replay of {spec.folder}")
        try:
            token_replay.record_replays(spec, store, samples)
        except DllmBenchError as error:
            failures.append(f"{spec.folder}: {error}")
    return failures


@dataclass(frozen=True)
class _PointBuilder:
    """Turns cells into points."""

    figure: PaperFigure
    """The figure."""
    built: BuiltTable
    """Its table."""
    runs: Mapping[str, StoredRun]
    """Hash -> sealed run."""

    def points(self, cell: Row) -> Iterator[Point]:
        """Yield the point of a cell, or those of its run series."""
        blank, call = self._blank(cell), self.figure.calls.get(self._metric(cell))
        if call and cell.planned.run.record:
            yield from self._series_points(cell, call, blank)
            return
        x = self._x(cell)
        if isnan(cell.value) or call or x is None:
            reason = cell.planned.cell.reported_only or cell.planned.run.short or cell.reason
            yield {**blank, "x": x, "reason": reason}
            return
        ends = {} if isnan(cell.low) else {"low": cell.low, "high": cell.high}
        yield {**blank, "x": x, "y": cell.value, **ends, "n": cell.n}

    def _metric(self, cell: Row) -> str:
        """Return the metric's name in the yaml, without a position."""
        return cell.Index[-1].partition("@")[0]

    def _blank(self, cell: Row) -> Point:
        """Return the cell's point without its numbers."""
        figure, keys, metric = self.figure, cell.planned.cell.keys, self._metric(cell)
        series = {**keys, BY_METRIC: metric}.get(figure.draw.series, "")
        return {
            "panel": keys.get(figure.draw.panels, ""),
            "series": figure.group.get(series, series),
            "quantity": figure.row(metric),
            "state": cell.state,
            "source": _source(cell),
            "run": " ".join(run.spec.identity_hash for run in cell.runs if run.spec),
            "switched": " ".join(self._switched(cell)),
            "at": " ".join(figure.at[name] for name in keys.values() if name in figure.at),
        }

    def _switched(self, cell: Row) -> Iterator[str]:
        """Yield the replaced settings, except the one on the x axis; for a mean, also in how many
        of its runs, if not in all.
        """
        profile, leaves = self.built.profile, leaves_of(cell.planned)
        on_axis = f"{self.figure.draw.x.setting}="
        switched = (o for leaf in leaves for o in profile.switched(self.figure.name, leaf.cell))
        counts = Counter(o for o in switched if not o.startswith(on_axis))
        for override, count in counts.items():
            yield override if count == len(leaves) else f"{override} ({count}/{len(leaves)})"

    def _x(self, cell: Row) -> float | str | None:
        """Return the cell's position on the x axis."""
        axis, keys = self.figure.draw.x, cell.planned.cell.keys
        if axis.metric:
            x = float(self.built.cells.value[*keys.values(), axis.metric])
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

    def _series_points(self, cell: Row, call: SeriesCall, blank: Point) -> Iterator[Point]:
        """Yield the points that a run series gives for a sealed run; it may name panel and
        series."""
        assert cell.planned.run.record
        run = self.runs[cell.planned.run.record.identity_hash]
        settings = call.settings_for(list(cell.planned.cell.keys.values()))
        try:
            points = list(run_series(call.name)(run, settings))
            why = NO_REPLAY if call.replay_samples and not run.replays else UNDEFINED
        except DllmBenchError as error:
            points, why = [], str(error).replace(str(run.folder), cell.planned.run.folder)
        yield from ({**blank, **point} for point in points or [{"reason": why}])


def _source(cell: Row) -> str:
    """Return "models on benchmarks" that were measured; for a mean, those of all its parts."""
    chosen = [leaf.run.chosen for leaf in leaves_of(cell.planned)]
    names = (sorted({c[key] for c in chosen if key in c}) for key in ("model", "benchmark"))
    return " on ".join(", ".join(found) for found in names if found)
