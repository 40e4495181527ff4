"""Points equal what is computed by hand from made-up runs; drawings of every kind, equal bytes for
equal points, and words where numbers are absent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from dllm_bench.api.compose import compose as real_compose
from dllm_bench.cli.table import missing_lines
from dllm_bench.figures import style
from dllm_bench.figures.draw import as_csv, drawing, grid, images
from dllm_bench.figures.panels import FRONT_LINE, PANEL_KINDS
from dllm_bench.figures.points import (
    UNDEFINED,
    BuiltFigure,
    build_figure,
    frame_of_points,
    with_front,
)
from dllm_bench.figures.run_series import Point
from dllm_bench.figures.spec import ParetoFront, XAxis, load_figure
from dllm_bench.runs import token_replay
from dllm_bench.store.store import Store
from dllm_bench.tables.load import load_profile, names_of
from dllm_bench.tables.spec import Instead
from tests.figures.builders import (
    built,
    built_full,
    planned,
    record_of,
    samples_of,
    small,
    small_built,
)
from tests.figures.test_readable import figure_of, point
from tests.tables.builders import compose, settings
from tests.tiers import covering

CURVE = "learn2pd/figure8"  # of a filter's own training, which made-up runs have not


@pytest.mark.exhaustive
def test_equal_points_give_equal_bytes() -> None:
    found = small_built()
    first, second = images(found), images(found)
    assert first == second and set(first) == {"svg", "png"}
    for text in (b"Matplotlib", b"<dc:date>"):
        assert text not in first["svg"].replace(b"http://matplotlib.org", b"")
        assert text not in first["png"]


@pytest.mark.parametrize("kind", PANEL_KINDS)
def test_every_kind_draws(kind: str) -> None:
    more = {"z": 0.5} if kind == "heat" else {}
    places = ((1.0, 0.25), (2.0, 0.5), (3.0, 1.0))
    points = [point(x=x, y=y, low=y - 0.1, high=y + 0.1, **more) for x, y in places]
    with style.applied():
        drawn = drawing(figure_of(*points, kind=kind))
        drawn.draw_without_rendering()
    ax = drawn.axes[0]
    heights = [bar.get_height() for bar in ax.patches]
    lines = [list(line.get_ydata()) for line in ax.lines]
    meshes = [mesh.get_array().compressed().tolist() for mesh in ax.collections if kind == "heat"]
    assert [0.25, 0.5, 1.0] in [heights, *lines] or meshes == [[0.5] * 3]


@pytest.mark.xdist_group("reference claims")  # which share composed settings
@pytest.mark.parametrize("name", covering(10, names_of("figure"), often=6))
def test_committed_figures_draw(name: str, tmp_path: Path) -> None:
    """Every figure expands, composes, reads and draws on made-up runs of the embedded profile."""
    figure, profile = load_figure(name), load_profile("embedded")
    found = built_full(figure, profile, tmp_path, settings().compose)
    reasons = set(found.without_number.reason)
    own = [UNDEFINED] if name == CURVE else []
    elsewhere = ("unavailable: needs ", "a served", "runs on Ascend", *own)
    assert all(r.startswith(elsewhere) for r in reasons) or found.built.open, reasons
    assert len(found.drawn(measured=True)) or all(r.startswith(elsewhere) for r in reasons)
    with style.applied():
        texts = [text.get_text() for text in drawing(found).findobj(Text)]
    assert figure.table.title in " ".join(filter(None, texts)).replace("\n", " ")


def test_without_a_token_replay_a_run_series_says_so(tmp_path) -> None:
    figure, profile = load_figure("learn2pd/figure4"), load_profile("embedded")
    found = built_full(figure, profile, tmp_path, real_compose)
    assert found.without_number.empty
    for path in tmp_path.rglob(token_replay.FILE):
        path.unlink()
    again = build_figure(figure, profile, list(found.built.cells.planned), Store(tmp_path))
    assert set(again.without_number.reason) == {"missing: token replay"}


def test_a_point_is_its_runs_number() -> None:
    found = small_built()
    at = found.points.query("panel == 'quiz' and series == 'alpha' and x == 0.5 and run != ''")
    [point] = at.itertuples()
    spec = found.built.cells.xs("alpha-0.5", level="number").planned.iloc[0].run.spec
    assert spec
    record = record_of(spec, samples_of(spec))
    forwards = sum(record.columns["forwards"])
    assert point.y == pytest.approx(sum(record.columns["committed"]) / forwards)
    assert (point.low or 9) <= point.y <= (point.high or 0)
    assert (point.quantity, point.n, point.kind, point.state) == ("tpf", 8, "measured", "sealed")
    assert (point.source, point.run) == ("tiny-alpha on miniquiz", spec.identity_hash)


def test_what_has_no_number_says_why() -> None:
    found = small_built()
    why = {
        (p.panel, p.series, p.x, p.quantity): (p.state, p.reason)
        for p in found.without_number.itertuples()
    }
    assert why["quiz", "beta", 4.0, "tpf"] == ("partial", "3 of 20 samples")
    assert why["code", "alpha", 0.5, "tpf"] == ("missing", "missing")
    assert why["code", "alpha", 0.5, "steps"] == ("missing", "missing")
    text = as_csv(found)
    assert (text.count(",missing,"), text.count("partial,3 of 20 samples")) == (4, 2)
    said = "\n".join(missing_lines(found.built, "figure"))
    assert "3 runs to make" in said and said.count("one of them (") == 3
    assert "dllm-bench run decoder=lopa model=tiny-alpha" in said


def test_reported_points_stay_apart() -> None:
    reported = list(small_built().drawn(measured=False).itertuples())
    assert [(p.series, p.x, p.y) for p in reported] == [("alpha", 0.5, 2.5), ("beta", 2.0, 3.0)]
    assert {(p.panel, p.kind, p.run, p.state) for p in reported} == {("quiz", "printed", "", "")}


def test_x_may_be_a_setting_or_another_metric(tmp_path) -> None:
    figure = small()
    setting = replace(figure.draw, x=XAxis("Length", setting="benchmark.max_new_tokens"))
    found = built(tmp_path, replace(figure, draw=setting))
    assert set(found.drawn(measured=True).query("quantity == 'tpf'").x) == {64.0}
    metric = replace(figure.draw, x=XAxis("TPF", metric="tpf"))
    found = built(tmp_path, replace(figure, draw=metric, calls={}))
    assert set(found.drawn(measured=True).quantity) == {"steps"}
    by_hand = found.built.cells.xs(("quiz", "tpf"), level=["task", "metric"]).value
    assert set(found.drawn(measured=True).x) == {by_hand[n] for n in ("alpha-0.5", "alpha-1")}


def test_one_panel_has_its_quantities_side_by_side(tmp_path) -> None:
    figure = small()
    rows = grid(built(tmp_path, replace(figure, draw=replace(figure.draw, panels=""), reported=())))
    assert [[place and place.quantity for place in row] for row in rows] == [["tpf", "steps"]]


def test_a_mean_says_in_how_many_of_its_runs_a_setting_was_replaced(tmp_path) -> None:
    """Its place on the axis is that of most of them: of five lengths of 256 tokens, two are 96. A
    setting that is the axis is seen there, and not said again."""
    figure, profile = load_figure("creditdecoding/figure7"), load_profile("embedded")
    free, block = "model=tiny-llada-free", "decoder.schedule.block=8"
    instead = Instead((free, "decoder.schedule.block=64"), (free, block))
    profile, store = replace(profile, instead=(*profile.instead, instead)), Store(tmp_path)
    cells = planned(figure, profile, store, compose)

    def said(axis: str) -> dict[object, str]:
        shown = replace(figure, draw=replace(figure.draw, x=XAxis("x", setting=axis)))
        points = build_figure(shown, profile, cells, store).points
        missing = points[(points.kind == "measured") & (points.state == "missing")]
        return dict(zip(missing.x, missing.switched, strict=True))

    part = f"{block} (2/5)"
    assert said("benchmark.max_new_tokens") == {32: part, 64: part, 96: part, 128: part}
    assert set(said("decoder.schedule.block").values()) == {""}


POINTS = (
    *(("vanilla", 1.0, 90.0), ("fast_dllm", 3.0, 90.0), ("fast_dllm", 4.0, 80.0)),
    *(("credit", 5.0, 85.0), ("credit", 6.0, 60.0), ("oracle", 9.0, 95.0)),
)
"""Series, x, score."""
HIGH = {("fast_dllm", 3.0), ("credit", 5.0), ("credit", 6.0)}
LOW = {("vanilla", 1.0)}


def points(panel: str) -> list[Point]:
    of = {"panel": panel, "quantity": "tpf", "source": "tiny-alpha on miniquiz"}
    return [{**of, "series": series, "x": x, "y": y} for series, x, y in POINTS]


def marked(points: list[Point], better: Any, *without: str) -> list[tuple[str, str, float]]:
    """Return panel, series and x of the points on the front."""
    found = with_front(frame_of_points(points), ParetoFront(better, without))
    return sorted((p.panel, p.series, p.x) for p in found[found.front].itertuples())


@pytest.mark.parametrize(("better", "expected"), [("high", HIGH), ("low", LOW)])
def test_what_nothing_beats_is_marked_in_each_panel(better, expected) -> None:
    open_one = {**points("quiz")[0], "y": None, "reason": "missing"}
    worse = [{**p, "panel": "code", "y": p["y"] / 2} for p in points("quiz")]
    found = marked([*points("quiz"), open_one, *worse], better, "oracle")
    assert found == sorted((panel, *at) for panel in ("quiz", "code") for at in expected)
    assert marked(points("quiz"), "high") == [("quiz", "oracle", 9.0)]


def with_points(front: ParetoFront | None) -> BuiltFigure:
    found = figure_of(*points("quiz"))
    figure = replace(found.figure, draw=replace(found.figure.draw, front=front))
    return replace(found, figure=figure, points=with_front(found.points, front))


def test_the_front_is_drawn_and_written() -> None:
    with style.applied():
        plain = drawing(with_points(None))
        marked = drawing(with_points(ParetoFront("high", without=["oracle"])))
    drawn = marked.axes[0].lines
    (pale,) = (line for line in drawn if line.get_linewidth() == FRONT_LINE["linewidth"])
    assert list(zip(*pale.get_data(), strict=True)) == [(3.0, 90.0), (5.0, 85.0), (6.0, 60.0)]
    assert len(drawn) == len(plain.axes[0].lines) + 1
    legends = (one.legends[0].get_texts() for one in (marked, plain))
    with_it, without = ([text.get_text() for text in legend] for legend in legends)
    assert with_it == [*without, "Pareto front"]
    rows = as_csv(with_points(ParetoFront("high", without=["oracle"]))).splitlines()
    assert rows[0].endswith(",at,front") and sum(row.endswith(",yes") for row in rows) == len(HIGH)
