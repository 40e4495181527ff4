"""A drawing says what was run, on what and how often, and shows nothing that was not measured."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dllm_bench.figures.draw import common_origin, footnote, grid, stated
from dllm_bench.figures.panels import BARS, DODGE
from dllm_bench.figures.points import BuiltFigure, build_figure, frame_of_points
from dllm_bench.figures.run_series import COUNTED, RUN_SERIES, SIMULATED, Point
from dllm_bench.figures.spec import SeriesCall, StatedNumber, load_figure
from dllm_bench.store.store import Store
from dllm_bench.tables.load import load_profile
from tests.figures.builders import planned
from tests.figures.test_readable import drawn, point, small, the_style
from tests.tables.builders import compose

assert the_style  # the fixture applies to this file too
HARDWARE = ("a CPU, float32",)
WHY = "3 of 20 samples"


def with_hardware(found: BuiltFigure) -> BuiltFigure:
    return replace(found, built=SimpleNamespace(hardware=HARDWARE))  # type: ignore[arg-type]


def figure_of(tmp_path: Any, monkeypatch: Any, *points: Point, **changes: Any) -> BuiltFigure:
    return with_hardware(small(tmp_path, monkeypatch, points=points, **changes))


def test_only_a_measured_point_makes_a_caption_name_the_hardware(tmp_path, monkeypatch) -> None:
    measured, without = point(n=60), point(x=2.0, y=None, reason=WHY)
    assert "Measured on a CPU" in footnote(figure_of(tmp_path / "a", monkeypatch, measured))
    for points in ([without], [without, point(kind="printed", y=3.0)]):
        said = footnote(figure_of(tmp_path / str(len(points)), monkeypatch, *points))
        assert "easured on" not in said
        assert said.startswith("1 points have no number")


def test_the_caption_says_how_many_samples_are_behind_a_point(tmp_path, monkeypatch) -> None:
    points = [point(n=60), point(x=2.0, n=120), point(x=3.0, n=80), point(x=4.0, kind="printed")]
    found = figure_of(tmp_path, monkeypatch, *points, calls={})
    assert "; n = 60–120 (samples)." in footnote(found)
    same = replace(found, points=found.points.assign(n=60))
    assert "; n = 60 (samples)." in footnote(same)
    call = SeriesCall("waiting_steps", {}, {})
    assert "(tokens)" in footnote(replace(found, figure=replace(found.figure, calls={"w": call})))
    assert {*COUNTED, *SIMULATED} <= set(RUN_SERIES)


def test_a_figure_without_any_number_is_one_panel_that_says_why(tmp_path, monkeypatch) -> None:
    panels = [point(panel=panel, y=None, reason=WHY) for panel in ("quiz", "code")]
    figure = drawn(figure_of(tmp_path, monkeypatch, *panels))
    (ax,) = figure.axes
    assert not ax.axison
    assert [text.get_text() for text in ax.texts] == [f"no measured point:\n{WHY}"]
    assert ax.get_title() == ""


def test_panels_without_a_number_are_not_taken_for_equal_ones(tmp_path, monkeypatch) -> None:
    points = [point(panel=panel, y=None, reason=WHY) for panel in ("quiz", "code")]
    found = figure_of(tmp_path, monkeypatch, *points, point(panel="other"))
    assert [ax.get_title() for ax in drawn(found).axes] == ["Quiz", "Code", "other"]


def test_what_all_panels_measured_is_said_once_in_the_legend(tmp_path, monkeypatch) -> None:
    points = [point(panel=panel, y=y) for panel, y in (("quiz", 1.0), ("code", 2.0))]
    found = figure_of(tmp_path, monkeypatch, *points)
    figure = drawn(found)
    assert [ax.get_title() for ax in figure.axes] == ["Quiz", "Code"]
    assert figure.legends[0].get_title().get_text() == "tiny-alpha on miniquiz"
    other = {**points[1], "source": "tiny-beta on minicode"}
    several = replace(found, points=frame_of_points([points[0], other]))
    assert common_origin(grid(several)) == ""
    titles = [ax.get_title() for ax in drawn(several).axes]
    assert titles == ["Quiz\ntiny-alpha on miniquiz", "Code\ntiny-beta on minicode"]


def test_a_title_stands_once_above_the_panels_of_a_column(tmp_path, monkeypatch) -> None:
    found = figure_of(tmp_path, monkeypatch, point(), point(panel="code", y=2.0))
    tpf = found.points.to_dict("records")
    rows = frame_of_points([*tpf, *({**one, "quantity": "steps"} for one in tpf)])
    both = replace(found.figure, quantities={"tpf": "TPF", "steps": "Steps"})
    figure = drawn(replace(found, figure=both, points=rows))
    assert [ax.get_title() for ax in figure.axes] == ["Quiz", "Code", "", ""]


@pytest.mark.parametrize("kind", ["bars", "histogram"])
def test_a_logarithmic_axis_has_markers_for_bars(kind: str, tmp_path, monkeypatch) -> None:
    x: tuple[Any, ...] = ("a", "b") if kind == "bars" else (1.0, 2.0)
    points = [point(x=place, y=y) for place, y in zip(x, (0.5, 64.0), strict=True)]
    found = figure_of(tmp_path, monkeypatch, *points, kind=kind)
    assert len(drawn(found).axes[0].patches) == 2
    draw = replace(found.figure.draw, log_y=("tpf",))
    (ax,) = drawn(replace(found, figure=replace(found.figure, draw=draw))).axes
    assert not ax.patches
    assert list(ax.lines[0].get_ydata()) == [0.5, 64.0]


@pytest.mark.parametrize("kind", ["lines", "scatter"])
def test_intervals_that_would_hide_each_other_stand_apart(kind, tmp_path, monkeypatch) -> None:
    """The points stay where they are."""
    ends = {"alpha": (1.0, 1, 3), "beta": (1.002, 2, 4), "rate": (1.0, 8, 9), "auroc": (5.0, 2, 3)}
    points = [point(name, x, low, low=low, high=high) for name, (x, low, high) in ends.items()]
    (ax,) = drawn(figure_of(tmp_path, monkeypatch, *points, kind=kind)).axes
    moved = [bars.get_offsets()[0][0] for bars in ax.collections if bars.get_label() == BARS]
    assert moved == [-DODGE / 2, DODGE / 2, 0, 0]
    assert [line.get_xdata()[0] for line in ax.lines] == [1.0, 1.002, 1.0, 5.0]
    pixels = [bars.get_offset_transform().transform((72, 0))[0] for bars in ax.collections]
    assert pixels == [ax.figure.dpi] * 4


def test_categories_of_several_models_are_named_by_what_was_run(tmp_path, monkeypatch) -> None:
    points = [point(x=x, source=f"tiny-{x} on miniquiz") for x in ("a", "b")]
    points += [point(x="c", kind="printed", y=3.0)]
    (ax,) = drawn(figure_of(tmp_path, monkeypatch, *points, kind="bars")).axes
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["tiny-a\npaper: a", "tiny-b\npaper: b", "paper: c"]
    assert ax.get_title() == "Quiz"


def test_a_simulated_load_says_on_what_it_is_simulated(tmp_path, monkeypatch) -> None:
    profiles = {"tiny-qwen3": "assets/profiles/tiny-qwen3-cpu.json"}
    calls = {"tpf": SeriesCall("device_speed", {"profile": profiles}, {})}
    ours = point(source="tiny-qwen3 on minigsm_free", n=4)
    theirs = point(panel="paper", kind="printed", y=9.0)
    found = figure_of(tmp_path, monkeypatch, ours, theirs, calls=calls)
    labels = [ax.get_ylabel().replace("\n", " ") for ax in drawn(found).axes]
    assert labels == ["TPF, simulated on AMD EPYC", "TPF"]
    assert footnote(found) == (
        "Simulated on step times of AMD EPYC; drafts measured on a CPU, float32; n = 4 (requests)."
    )


def test_a_stated_range_comes_with_what_was_measured_there(tmp_path, monkeypatch) -> None:
    numbers = [StatedNumber("s", "stable for {}", "2–3", 2, 3, "x", "tpf", series="alpha")]
    points = [point(x=float(x), y=y) for x, y in ((1, 95.0), (2, 92.54), (3, 90.81), (4, 80.0))]
    points += [point("beta", 2.0, 50.0), point(x=2.5, y=1.0, kind="printed")]
    found = figure_of(tmp_path, monkeypatch, *points, stated=numbers)
    assert stated(found).endswith("stable for 2–3 (measured here: from 92.5 to 90.8).")
    assert "measured" not in stated(replace(found, points=frame_of_points([])))
    (alpha,) = [n for n in load_figure("creditdecoding/figure6").stated if n.series]
    assert (alpha.series, alpha.low, alpha.high) == ("alpha", 0.2, 0.65)


def test_the_source_of_a_mean_names_all_its_models_and_tasks(tmp_path, monkeypatch) -> None:
    figure, profile = load_figure("creditdecoding/figure7"), load_profile("embedded")
    cells = planned(figure, profile, Store(tmp_path), compose, monkeypatch)
    sources = set(build_figure(figure, profile, cells, Store(tmp_path)).points.source)
    tasks = "minicode, minigsm_free, miniread, minirule, minirule_range"
    assert sources - {""} == {f"tiny-llada, tiny-llada-free on {tasks}"}
