"""The Pareto front of a figure: which points are marked, that it is drawn and written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dllm_bench.figures import style
from dllm_bench.figures.draw import drawing
from dllm_bench.figures.panels import FRONT_LINE
from dllm_bench.figures.points import BuiltFigure, FigurePoint, with_front
from dllm_bench.figures.spec import ParetoFront, load_figure
from dllm_bench.figures.write import as_csv
from tests.figures.test_points import built

# series, x, score
POINTS = [
    ("vanilla", 1.0, 90.0),
    ("fast_dllm", 3.0, 90.0),
    ("fast_dllm", 4.0, 80.0),
    ("credit", 5.0, 85.0),
    ("credit", 6.0, 60.0),
    ("oracle", 9.0, 95.0),
]
HIGH = {("fast_dllm", 3.0), ("credit", 5.0), ("credit", 6.0)}
LOW = {("vanilla", 1.0)}


def points(panel: str) -> list[FigurePoint]:
    source = "tiny-alpha on miniquiz"
    return [FigurePoint(panel, series, "tpf", x, y, source=source) for series, x, y in POINTS]


@pytest.mark.parametrize(("better", "expected"), [("high", HIGH), ("low", LOW)])
def test_what_nothing_beats_is_marked(better, expected) -> None:
    open_one = replace(points("quiz")[0], y=None, reason="missing")
    found = list(with_front([*points("quiz"), open_one], ParetoFront(better, without=["oracle"])))
    assert {(p.series, p.x) for p in found if p.front} == expected
    assert len([p for p in found if p.front]) == len(expected)
    twice = list(with_front([*points("quiz"), *points("quiz")], ParetoFront(better, ["oracle"])))
    assert len([p for p in twice if p.front]) == 2 * len(expected)  # neither beats the other
    everyone = list(with_front(points("quiz"), ParetoFront("high")))
    assert {(p.series, p.x) for p in everyone if p.front} == {("oracle", 9.0)}


def test_panels_have_fronts_of_their_own() -> None:
    worse = [replace(p, panel="code", y=float(p.y or 0) / 2) for p in points("quiz")]
    found = list(with_front([*points("quiz"), *worse], ParetoFront("high", without=["oracle"])))
    for panel in ("quiz", "code"):
        assert {(p.series, p.x) for p in found if p.front and p.panel == panel} == HIGH


def with_points(found: BuiltFigure, front: ParetoFront | None) -> BuiltFigure:
    marked = tuple(with_front(points("quiz"), front) if front else points("quiz"))
    draw = replace(found.figure.draw, kind="lines", front=front)
    figure = replace(found.figure, draw=draw, quantities={"tpf": "TPF"})
    return replace(found, figure=figure, points=marked)


def test_the_front_is_drawn_and_written(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    with style.applied():
        plain = drawing(with_points(found, None))
        marked = drawing(with_points(found, ParetoFront("high", without=["oracle"])))
    pale = [
        line for line in marked.axes[0].lines if line.get_linewidth() == FRONT_LINE["linewidth"]
    ]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in pale] == [
        ([3.0, 5.0, 6.0], [90.0, 85.0, 60.0])
    ]
    assert len(marked.axes[0].lines) == len(plain.axes[0].lines) + 1
    said = [text.get_text() for text in marked.legends[0].get_texts()]
    assert said[-1] == "Pareto front"
    assert "Pareto front" not in [text.get_text() for text in plain.legends[0].get_texts()]
    rows = as_csv(with_points(found, ParetoFront("high", without=["oracle"]))).splitlines()
    assert rows[0].endswith(",at,front")
    assert sum(row.endswith(",yes") for row in rows) == len(HIGH)


def test_both_tradeoffs_leave_the_oracle_apart() -> None:
    """More tokens per forward and fewer positions per token are better."""
    fronts = [
        load_figure(f"decoders/{name}").draw.front for name in ("tradeoff", "tradeoff_row_cost")
    ]
    assert fronts == [ParetoFront("high", ["oracle"]), ParetoFront("low", ["oracle"])]
