"""The Pareto front of a figure: which points are marked, that it is drawn and written."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from pandas import DataFrame

from dllm_bench.figures import style
from dllm_bench.figures.draw import as_csv, drawing
from dllm_bench.figures.panels import FRONT_LINE
from dllm_bench.figures.points import BuiltFigure, frame_of_points, with_front
from dllm_bench.figures.run_series import Point
from dllm_bench.figures.spec import ParetoFront, load_figure
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


def points(panel: str) -> list[Point]:
    of = {"panel": panel, "quantity": "tpf", "source": "tiny-alpha on miniquiz"}
    return [{**of, "series": series, "x": x, "y": y} for series, x, y in POINTS]


def marked(points: list[Point], better: Literal["high", "low"], *without: str) -> DataFrame:
    """Return the points on the front."""
    found = with_front(frame_of_points(points), ParetoFront(better, without))
    return found[found.front]


def places(points: DataFrame) -> set[tuple[str, float]]:
    return set(zip(points.series, points.x, strict=True))


@pytest.mark.parametrize(("better", "expected"), [("high", HIGH), ("low", LOW)])
def test_what_nothing_beats_is_marked(better, expected) -> None:
    open_one = {**points("quiz")[0], "y": None, "reason": "missing"}
    found = marked([*points("quiz"), open_one], better, "oracle")
    assert places(found) == expected
    assert len(found) == len(expected)
    twice = marked([*points("quiz"), *points("quiz")], better, "oracle")
    assert len(twice) == 2 * len(expected)  # neither beats the other
    assert places(marked(points("quiz"), "high")) == {("oracle", 9.0)}


def test_panels_have_fronts_of_their_own() -> None:
    worse = [{**p, "panel": "code", "y": p["y"] / 2} for p in points("quiz")]
    found = marked([*points("quiz"), *worse], "high", "oracle")
    for panel in ("quiz", "code"):
        assert places(found[found.panel == panel]) == HIGH


def with_points(found: BuiltFigure, front: ParetoFront | None) -> BuiltFigure:
    all_points = with_front(frame_of_points(points("quiz")), front)
    draw = replace(found.figure.draw, kind="lines", front=front)
    figure = replace(found.figure, draw=draw, quantities={"tpf": "TPF"})
    return replace(found, figure=figure, points=all_points)


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
