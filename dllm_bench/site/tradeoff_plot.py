"""The trade-off plots of compared runs, score against speed: SVGs that `macros.html` draws.

A point is a run, with the 95 % interval of its score. The front leads through the runs that no
other run beats (`tradeoff.pareto_front`). Places are computed here; the template only writes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.metrics.tradeoff import pareto_front
from dllm_bench.site.format import LISTED_METRICS, percent, significant
from dllm_bench.site.pages import RunPages
from dllm_bench.store.record import RunRecord

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 44, WIDTH - 16, 16, HEIGHT - 42  # of the area with points
COLOURS = 7  # decoders with a colour of their own; `site.css` has these and one for all others
TICKS = 5  # on an axis, about
AXES = dict(zip(LISTED_METRICS, ("Tokens per forward", "Tokens per second"), strict=True))


@dataclass(frozen=True)
class PlotTick:
    """A tick of an axis: where it is, and its number."""

    at: str
    text: str


@dataclass(frozen=True)
class PlotPoint:
    """A run: its place, the ends of its score's interval, and the page it leads to.

    title: what a reader sees who points at it; css: the class of its decoder's colour.
    """

    x: str
    y: str
    low: str
    high: str
    css: str
    title: str
    address: str


@dataclass(frozen=True)
class TradeoffPlot:
    """One plot.

    label: the x axis, and in brackets the metric; summary: the plot in words.
    front: the points of the front's line, as SVG has them.
    legend: (decoder, CSS class).
    """

    label: str
    summary: str
    x_ticks: list[PlotTick]
    y_ticks: list[PlotTick]
    points: list[PlotPoint]
    front: str
    legend: list[tuple[str, str]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


def tradeoff_plots(
    records: Sequence[RunRecord], title: str, run_pages: RunPages, up: str = ""
) -> list[TradeoffPlot]:
    """A plot against each of `LISTED_METRICS` that at least two of the runs have."""
    names = list(dict.fromkeys(record.spec.label for record in records))
    colours = {name: f"series-{min(place, COLOURS)}" for place, name in enumerate(names)}
    plots = []
    for metric in LISTED_METRICS:
        known = [
            (record, x, record.score)
            for record in records
            if record.score and (x := record.summary.get(metric)) is not None and math.isfinite(x)
        ]
        if len(known) > 1:
            plots.append(_plot(known, metric, title, colours, run_pages, up))
    return plots


def _plot(
    known: Sequence[tuple[RunRecord, float, MeanScore]],
    metric: str,
    title: str,
    colours: dict[str, str],
    run_pages: RunPages,
    up: str,
) -> TradeoffPlot:
    x_ticks = ticks(0.0, max(x for _, x, _ in known))
    lowest = min(score.low for _, _, score in known)
    y_ticks = ticks(100 * lowest, 100 * max(score.high for _, _, score in known))

    def across(x: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * x / x_ticks[-1]:.1f}"

    def up_to(share: float) -> str:
        bottom, top = y_ticks[0], y_ticks[-1]
        return f"{BOTTOM - (BOTTOM - TOP) * (100 * share - bottom) / (top - bottom):.1f}"

    points = [
        PlotPoint(
            x=across(x),
            y=up_to(score.mean),
            low=up_to(score.low),
            high=up_to(score.high),
            css=colours[record.spec.label],
            title=f"{record.spec.label}: {percent(score)} %, {significant(x)} ({metric})",
            address=run_pages.link(record.spec.short, up).address,
        )
        for record, x, score in known
    ]
    places = [(x, score.mean) for _, x, score in known]
    front = sorted(pareto_front(places), key=places.__getitem__)
    return TradeoffPlot(
        label=f"{AXES[metric]} ({metric})",
        summary=f"Score against {metric} of {len(points)} runs: {title}",
        x_ticks=[PlotTick(across(x), f"{x:g}") for x in x_ticks],
        y_ticks=[PlotTick(up_to(y / 100), f"{y:g}") for y in y_ticks],
        points=points,
        front=" ".join(f"{points[i].x},{points[i].y}" for i in front),
        legend=list(colours.items())[:COLOURS],
    )


def ticks(low: float, high: float) -> list[float]:
    """About `TICKS` round numbers, the first at most `low` and the last at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit * TICKS >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * place, 10) for place in range(first, max(last, first + 1) + 1)]
