"""Drawings: points are those computed by hand from made-up runs, and a reader can use the figures.

Ours and the paper's share a panel, all printed numbers are drawn, nothing overlaps: checked on the
committed points, so on the drawings that readers see. A drawing says what was run, on what and how
often, shows nothing that was not measured, and has words where numbers are absent.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from dllm_bench.api.compose import compose as real_compose
from dllm_bench.cli.table import missing_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures import style
from dllm_bench.figures.draw import as_csv, common_origin, drawing, footnote, grid, images, stated
from dllm_bench.figures.panels import BARS, DODGE, FRONT_LINE, PANEL_KINDS, REPORTED_BAR
from dllm_bench.figures.points import (
    UNDEFINED,
    BuiltFigure,
    build_figure,
    frame_of_points,
    with_front,
)
from dllm_bench.figures.run_series import COUNTED, RUN_SERIES, SIMULATED, Point
from dllm_bench.figures.spec import (
    REPORTED_FIGURES,
    ParetoFront,
    SeriesCall,
    StatedNumber,
    XAxis,
    load_figure,
)
from dllm_bench.runs import token_replay
from dllm_bench.store.store import Store
from dllm_bench.tables.frame import BuiltTable
from dllm_bench.tables.load import load_profile, names_of, read_csv
from dllm_bench.tables.spec import Instead
from scripts.redraw_figures import measured_points
from tests.figures.builders import (
    built,
    built_full,
    record_of,
    samples_of,
    small,
    small_built,
)
from tests.tables.builders import planned_small, settings
from tests.tiers import covering

FIGURES = names_of("figure")
SWEEP = {"alpha_min", "alpha_max", "beta_min", "beta_max", "grid_step", "fixed_beta", "fixed_alpha"}
"""Numbers of CreditDecoding's Figure 6 that say what is swept, and so are settings of ours."""
MEASURED = cast(BuiltTable, SimpleNamespace(hardware=("a CPU, float32",)))


def committed(name: str) -> BuiltFigure:
    """Return a figure with the points of results/reference."""
    figure = load_figure(name)
    points = frame_of_points([*measured_points(figure), *figure.reported])
    return BuiltFigure(figure, MEASURED, points)


@pytest.fixture(autouse=True)
def the_style() -> Iterator[None]:
    """Ticks depend on the style as long as a drawing is looked at."""
    with style.applied():
        yield


def drawn(found: BuiltFigure) -> Any:
    """Return the drawing, with all texts in their final place."""
    figure = drawing(found)
    figure.draw_without_rendering()
    return figure


def words(figure: Any) -> list[Any]:
    """Return the texts that a reader sees."""
    seen = []
    for ax in figure.axes:
        if not ax.axison:
            continue
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            seen += [label for place, label in ticks if low <= place <= high]
        seen += [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label]
    legends = [t for legend in figure.legends for t in (*legend.get_texts(), legend.get_title())]
    found = [*seen, *figure.texts, *legends]
    return [t for t in found if isinstance(t, Text) and t.get_visible() and t.get_text().strip()]


def corners(text: Any) -> Any:
    """Return the four corners of a text, which may be slanted."""
    angle = text.get_rotation()
    text.set_rotation(0)
    box = text.get_window_extent().padded(-0.75)
    anchor = text.get_transform().transform(text.get_position())
    text.set_rotation(angle)
    if angle % 90:
        return Affine2D().rotate_deg_around(*anchor, angle).transform(box.corners())[[0, 1, 3, 2]]
    return text.get_window_extent().padded(-0.75).corners()[[0, 1, 3, 2]]


def overlap(one: Any, other: Any) -> bool:
    """Return whether two convex shapes share more than an edge: no line separates them."""
    for shape in (one, other):
        for a, b in zip(shape, np.roll(shape, -1, axis=0), strict=True):
            normal = np.array([b[1] - a[1], a[0] - b[0]])
            mine, its = one @ normal, other @ normal
            if mine.max() <= its.min() or its.max() <= mine.min():
                return False
    return True


@pytest.mark.parametrize("name", covering(6, FIGURES))
def test_no_text_lies_on_another_or_is_cut_off_and_ticks_are_plain_numbers(name: str) -> None:
    figure, draw = drawn(committed(name)), load_figure(name).draw
    placed = [(text.get_text(), corners(text)) for text in words(figure)]
    assert not [(a[0], b[0]) for a, b in combinations(placed, 2) if overlap(a[1], b[1])]
    page = figure.bbox
    outside = [
        text for text, shape in placed
        if shape.min() < -1 or shape[:, 0].max() > page.x1 + 1 or shape[:, 1].max() > page.y1 + 1
    ]  # fmt: skip
    assert not outside
    axes = [axis for ax in figure.axes if ax.axison for axis in (ax.xaxis, ax.yaxis)]
    scaled = [axis for axis in axes if axis.get_scale() != "linear"]
    said = [label.get_text() for axis in scaled for label in axis.get_ticklabels()]
    assert bool(said) == bool(draw.x.log or draw.log_y)
    assert all(re.fullmatch(r"[\d.]+(\n[a-z]+ \d+(\n\(\d/\d\))?)?", text) for text in said), said


@pytest.mark.parametrize("name", FIGURES)
def test_ours_and_the_papers_share_a_panel(name: str) -> None:
    """Only a panel of another target than ours is the paper's alone."""
    found = committed(name)
    slots = [slot for row in grid(found) for slot in row if slot]
    places = Counter((slot.quantity, panel) for slot in slots for panel in slot.names)
    assert set(places.values()) == {1}
    own = set(found.figure.facet_labels(found.figure.draw.panels))
    for slot in slots:
        if len(slot.placed) and slot.measured.empty:
            ours = slot.points[slot.points.kind == "measured"]
            assert slot.names[0] not in own or not any(ours.y)


ROWS = read_csv(REPORTED_FIGURES / "figure_numbers.csv")
NUMBERS = [row for row in ROWS if f"{row['paper']}/figure{row['figure']}" in FIGURES]
"""Those that the papers print for a figure that we draw."""
DRAWN = [row for row in NUMBERS if row["metric"] not in SWEEP]


@pytest.mark.parametrize("row", DRAWN, ids=lambda row: "-".join(list(row.values())[:5]))
def test_every_printed_number_is_drawn(row: dict[str, str]) -> None:
    figure = load_figure(f"{row['paper']}/figure{row['figure']}")
    points = {point["y"] for point in figure.reported if point["kind"] == "printed"}
    said = {end for n in figure.stated for end in n.value.split("–")}
    ends = row["value"].strip("%+").split("-")
    assert set(ends) <= said or float(ends[0]) in points


def test_the_numbers_of_a_sweep_are_those_of_ours() -> None:
    figure = load_figure("creditdecoding/figure6")
    said = {row["metric"]: float(row["value"]) for row in NUMBERS if row["metric"] in SWEEP}
    assert set(said) == SWEEP
    for name, other in (("alpha", "beta"), ("beta", "alpha")):
        at = [float(x) for value, x in figure.at.items() if figure.group[value] == name]
        assert (min(at), max(at)) == (said[f"{name}_min"], said[f"{name}_max"])
        assert {round(b - a, 9) for a, b in pairwise(at)} == {said["grid_step"]}
        run = next(v.run for v in figure.table.facets["number"] if v.name.startswith(name))
        assert f"decoder.score.{other}={said[f'fixed_{other}']:g}" in run


def figure_of(*points: Point, **changes: Any) -> BuiltFigure:
    """Return a figure of one quantity with these points."""
    found, kind = small_built(), changes.pop("kind", "lines")
    draw = replace(found.figure.draw, kind=kind, x=changes.pop("x", found.figure.draw.x))
    figure = replace(found.figure, draw=draw, quantities={"tpf": "TPF"}, **changes)
    return replace(found, figure=figure, built=MEASURED, points=frame_of_points(points))


def point(series: str = "alpha", x: Any = 1.0, y: float | None = 1.0, **fields: Any) -> Point:
    source = "" if fields.get("kind") else "tiny-alpha on miniquiz"
    of = {"panel": "quiz", "quantity": "tpf", "source": source}
    return {**of, "series": series, "x": x, "y": y, **fields}


def test_the_papers_points_are_hollow_in_the_panel_of_ours() -> None:
    points = [point(y=2), point(x=2.0)]
    points += [point(y=5, kind="printed"), point(x=2.0, y=6, kind="printed")]
    figure = drawn(figure_of(*points))
    (ax,) = figure.axes
    lines = {tuple(line.get_ydata()): line.get_markerfacecolor() for line in ax.lines}
    assert lines == {(2, 1): style.look("alpha").colour, (5, 6): "white"}
    cells = [point("", x="quiz", y=2), point("", x="quiz", y=5, kind="printed")]
    figure = drawn(figure_of(*cells, kind="bars"))
    (ax,), said = figure.axes, figure.legends[0].get_texts()
    assert [text.get_text() for text in said] == ["measured here", "the paper's, printed"]
    assert [bar.get_height() for bar in ax.patches] == [2]
    (line,) = ax.lines
    assert (list(line.get_ydata()), line.get_marker()) == ([5], REPORTED_BAR["marker"])
    assert line.get_xdata()[0] == pytest.approx(ax.patches[0].get_center()[0])


def test_stated_numbers_are_lines_ranges_or_stand_above() -> None:
    numbers = (
        StatedNumber("a", "best at {}", "2", 2.0, 2.0, "x"),
        StatedNumber("b", "flat for {}", "1.2–1.5", 1.2, 1.5, "y"),
        StatedNumber("c", "worse from {}", "64", 64.0, 64.0, "x", quantity="tpf"),
        StatedNumber("d", "of another panel: {}", "3", 3, 3, "x", panel="code"),
        StatedNumber("e", "a {}× speedup", "4", 4, 4),
    )
    found = figure_of(point(), point(x=3.0, y=2.0), stated=numbers)
    (ax,) = drawn(found).axes
    assert list(ax.lines[-1].get_xdata()) == [2, 2]
    assert [(bar.get_y(), round(bar.get_height(), 6)) for bar in ax.patches] == [(1.2, 0.3)]
    assert {text.get_text() for text in ax.texts} == {"2", "1.2–1.5", "64 →"}
    assert ax.get_xlim()[1] < 4, "the range stays that of the points"
    assert stated(found).endswith("worse from 64; of another panel: 3; a 4× speedup.")
    rows = list(csv.DictReader(as_csv(found).splitlines()))[2:]
    assert [(r["kind"], r["at"], r["x"], r["low"], r["reason"]) for r in rows[:3]] == [
        ("stated", "x", "2.0", "", "best at 2"),
        ("stated", "y", "", "1.2", "flat for 1.2–1.5"),
        ("stated", "x", "64.0", "", "worse from 64"),
    ]
    assert found.without_number.empty


def test_stated_numbers_are_read_from_their_csv() -> None:
    alpha = {n.metric: n for n in load_figure("creditdecoding/figure6").stated}["alpha_stable_min"]
    assert (alpha.series, alpha.low, alpha.high) == ("alpha", 0.2, 0.65)
    steps = {n.panel: n.low for n in load_figure("creditdecoding/figure5").stated if n.axis}
    assert steps == {"vanilla": 256, "credit": 50}
    (plateau,) = [n for n in load_figure("learn2pd/figure8").stated if n.metric == "loss_plateau"]
    assert (plateau.low, plateau.high, plateau.value) == (0.21, 0.23, "0.21–0.23")


def titles(*points: Point) -> list[str]:
    return [ax.get_title() for ax in drawn(figure_of(*points)).axes]


def test_equal_panels_are_one_unless_they_have_no_number() -> None:
    twice = [point(panel=panel) for panel in ("quiz", "code")]
    assert titles(*twice) == ["Quiz = Code"]
    assert titles(*twice, point(y=3, kind="printed")) == ["Quiz", "Code\nthe runs of Quiz"]
    without = [point(panel=panel, y=None, reason=WHY) for panel in ("quiz", "code")]
    assert titles(*without, point(panel="other")) == ["Quiz", "Code", "other"]


def test_categories_are_named_by_what_was_run() -> None:
    bars = [point(x=x, y=y, run=r) for x, y, r in (("a", 1, "r1"), ("b", 1, "r1"), ("c", 2, "r2"))]
    of_models = [point(x=x, source=f"tiny-{x} on miniquiz") for x in ("a", "b")]
    of_models.append(point(x="c", kind="printed", y=3.0))
    for points, names in (
        (bars, ["a", "b\n= a", "c"]),
        (of_models, ["tiny-a\npaper: a", "tiny-b\npaper: b", "paper: c"]),
    ):
        (ax,) = drawn(figure_of(*points, kind="bars")).axes
        assert [label.get_text() for label in ax.get_xticklabels()] == names


def test_a_curve_ends_where_the_profile_changes_a_setting() -> None:
    short = "decoder.schedule.block=32"
    points = [point(x=float(x), switched="" if x % 64 == 0 else short) for x in (32, 64, 96, 128)]
    found = figure_of(*points, x=XAxis("Length", log=True))
    (ax,) = drawn(found).axes
    assert [list(line.get_xdata()) for line in ax.lines] == [[32, 96], [64, 128]]
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["32\nblock 32", "64", "96\nblock 32", "128"]
    (ax,) = drawn(replace(found, points=found.points.assign(switched=short))).axes
    assert [list(line.get_xdata()) for line in ax.lines] == [[32, 64, 96, 128]]


def test_bins_of_a_reliability_diagram_show_their_counts() -> None:
    bins = [point("before", x, x, n=n) for x, n in ((0.1, 17), (0.9, 230))]
    bins += [point("after", x, x, n=n) for x, n in ((0.2, 40), (0.8, 207))]
    (ax,) = drawn(figure_of(*bins, kind="reliability")).axes
    said = {text.get_text(): text.get_position() for text in ax.texts}
    assert set(said) == {"17", "230", "40", "207"}
    assert said["17"][1] == said["230"][1] != said["40"][1] and all(y < 0 for _, y in said.values())


def test_numbers_of_a_scatter_stand_apart() -> None:
    places = (("alpha", 1, 1), ("beta", 1, 1), ("rate", 1.001, 1), ("auroc", 2, 2))
    (ax,) = drawn(figure_of(*[point(*place) for place in places], kind="scatter")).axes
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == 4 and not any(a.overlaps(b) for a, b in combinations(boxes, 2))


WHY = "3 of 20 samples"


def test_only_a_measured_point_makes_a_caption_name_the_hardware() -> None:
    measured, without = point(n=60), point(x=2.0, y=None, reason=WHY)
    assert "Measured on a CPU" in footnote(figure_of(measured))
    for points in ([without], [without, point(kind="printed", y=3.0)]):
        said = footnote(figure_of(*points))
        assert "easured on" not in said and said.startswith("1 points have no number")


def test_the_caption_says_how_many_samples_are_behind_a_point() -> None:
    points = [point(n=60), point(x=2.0, n=120), point(x=3.0, n=80), point(x=4.0, kind="printed")]
    found = figure_of(*points, calls={})
    assert "; n = 60–120 (samples)." in footnote(found)
    assert "; n = 60 (samples)." in footnote(replace(found, points=found.points.assign(n=60)))
    call = SeriesCall("waiting_steps", {}, {})
    assert "(tokens)" in footnote(replace(found, figure=replace(found.figure, calls={"w": call})))
    assert {*COUNTED, *SIMULATED} <= set(RUN_SERIES)


def test_a_figure_without_any_number_is_one_panel_that_says_why() -> None:
    why = "no file $A_$"
    (ax,) = drawn(figure_of(*(point(panel=p, y=None, reason=why) for p in ("quiz", "code")))).axes
    assert not ax.axison
    assert [text.get_text() for text in ax.texts] == [f"no measured point:\n{why}"]
    assert ax.get_title() == ""


def test_what_all_panels_measured_is_said_once_in_the_legend() -> None:
    points = [point(panel=panel, y=y) for panel, y in (("quiz", 1.0), ("code", 2.0))]
    assert titles(*points) == ["Quiz", "Code"]
    assert drawn(figure_of(*points)).legends[0].get_title().get_text() == "tiny-alpha on miniquiz"
    several = points[0], {**points[1], "source": "tiny-beta on minicode"}
    assert common_origin(grid(figure_of(*several))) == ""
    assert titles(*several) == ["Quiz\ntiny-alpha on miniquiz", "Code\ntiny-beta on minicode"]


def test_a_title_stands_once_above_the_panels_of_a_column() -> None:
    found = figure_of(point(), point(panel="code", y=2.0))
    tpf = found.points.to_dict("records")
    rows = frame_of_points([*tpf, *({**one, "quantity": "steps"} for one in tpf)])
    both = replace(found.figure, quantities={"tpf": "TPF", "steps": "Steps"})
    figure = drawn(replace(found, figure=both, points=rows))
    assert [ax.get_title() for ax in figure.axes] == ["Quiz", "Code", "", ""]


@pytest.mark.parametrize(("kind", "x"), [("bars", ("a", "b")), ("histogram", (1.0, 2.0))])
def test_a_logarithmic_axis_has_markers_for_bars(kind: str, x: tuple[Any, ...]) -> None:
    """Places that are words stand as far apart as on another axis."""
    points = [point(x=a, y=y, low=y / 4, high=y * 4) for a, y in zip(x, (0.5, 64), strict=True)]
    found = figure_of(*points, kind=kind, x=XAxis("Number", log=True))
    assert len(drawn(found).axes[0].patches) == 2
    draw = replace(found.figure.draw, log_y=("tpf",))
    (ax,) = drawn(replace(found, figure=replace(found.figure, draw=draw))).axes
    assert not ax.patches and list(ax.lines[0].get_ydata()) == [0.5, 64.0]
    assert ax.get_ylim()[0] < 0.125 and ax.get_ylim()[1] > 256, "the ends of intervals are shown"


@pytest.mark.parametrize("kind", ["lines", "scatter"])
def test_intervals_that_would_hide_each_other_stand_apart(kind) -> None:
    """The points stay where they are, and equal ones are drawn once."""
    ends = {"alpha": (1.0, 1, 3), "beta": (1.002, 2, 4), "rate": (1.0, 8, 9), "auroc": (5.0, 2, 3)}
    points = [point(name, x, low, low=low, high=high) for name, (x, low, high) in ends.items()]
    (ax,) = drawn(figure_of(*points, {**points[0], "at": "512"}, kind=kind)).axes
    moved = [bars.get_offsets()[0][0] for bars in ax.collections if bars.get_label() == BARS]
    assert moved == [-DODGE / 2, DODGE / 2, 0, 0]
    assert [line.get_xdata()[0] for line in ax.lines] == [1.0, 1.002, 1.0, 5.0]
    pixels = [bars.get_offset_transform().transform((72, 0))[0] for bars in ax.collections]
    assert pixels == [ax.figure.dpi] * 4


def test_a_simulated_load_says_on_what_it_is_simulated() -> None:
    profiles = {"tiny-qwen3": "assets/profiles/tiny-qwen3-cpu.json"}
    calls = {"tpf": SeriesCall("device_speed", {"profile": profiles}, {})}
    ours = point(source="tiny-qwen3 on minigsm_free", n=4)
    found = figure_of(ours, point(panel="paper", kind="printed", y=9.0), calls=calls)
    labels = [ax.get_ylabel().replace("\n", " ") for ax in drawn(found).axes]
    assert labels == ["TPF, simulated on AMD EPYC", "TPF"]
    said = "step times of AMD EPYC; drafts measured on a CPU, float32; n = 4 (requests)."
    assert footnote(found) == f"Simulated on {said}"


def test_a_stated_range_comes_with_what_was_measured_there() -> None:
    numbers = [StatedNumber("s", "stable for {}", "2–3", 2, 3, "x", "tpf", series="alpha")]
    points = [point(x=float(x), y=y) for x, y in ((1, 95.0), (2, 92.54), (3, 90.81), (4, 80.0))]
    points += [point("beta", 2.0, 50.0), point(x=2.5, y=1.0, kind="printed")]
    found = figure_of(*points, stated=numbers)
    assert stated(found).endswith("stable for 2–3 (measured here: from 92.5 to 90.8).")
    assert "measured" not in stated(replace(found, points=frame_of_points([])))


def test_the_source_of_a_mean_names_all_its_models_and_tasks(tmp_path) -> None:
    figure, profile = load_figure("creditdecoding/figure7"), load_profile("embedded")
    cells = planned_small(Store(tmp_path), profile, figure.table)
    sources = set(build_figure(figure, profile, cells, Store(tmp_path)).points.source)
    tasks = "minicode, minigsm_free, miniread, minirule, minirule_range"
    assert sources - {""} == {f"tiny-llada, tiny-llada-free on {tasks}"}


CURVE = "learn2pd/figure8"  # of a filter's own training, which made-up runs have not


@pytest.mark.exhaustive
def test_equal_points_give_equal_bytes() -> None:
    found = small_built()
    first, second = images(found), images(found)
    assert first == second and set(first) == {"svg", "png"}
    for text in (b"Matplotlib", b"<dc:date>"):
        assert text not in first["svg"].replace(b"http://matplotlib.org", b"")
        assert text not in first["png"]


@pytest.mark.parametrize("places", [{1.0: 0.25, 2.0: 0.5, 3.0: 1.0}, {1.0: 1.0}])
@pytest.mark.parametrize("kind", PANEL_KINDS)
def test_every_kind_draws(kind: str, places: dict[float, float]) -> None:
    """A single point too: the cell of a heat map has a size, whole shares leave ticks alone."""
    more = {"z": 0.5} if kind == "heat" else {}
    points = [point(x=x, y=y, low=y - 0.1, high=y + 0.1, **more) for x, y in places.items()]
    ax = drawn(figure_of(*points, kind=kind)).axes[0]
    heights = [bar.get_height() for bar in ax.patches]
    lines = [list(line.get_ydata()) for line in ax.lines]
    meshes = [mesh for mesh in ax.collections if kind == "heat"]
    said = [mesh.get_array().compressed().tolist() for mesh in meshes]
    assert [*places.values()] in [heights, *lines] or said == [[0.5] * len(places)]
    assert all(np.ptp(mesh.get_coordinates(), axis=(0, 1)).all() for mesh in meshes)


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
    cells = planned_small(store, profile, figure.table)

    def said(axis: str) -> dict[object, str]:
        shown = replace(figure, draw=replace(figure.draw, x=XAxis("x", setting=axis)))
        points = build_figure(shown, profile, cells, store).points
        missing = points[(points.kind == "measured") & (points.state == "missing")]
        return dict(zip(missing.x, missing.switched, strict=True))

    part = f"{block} (2/5)"
    assert said("benchmark.max_new_tokens") == {32: part, 64: part, 96: part, 128: part}
    assert set(said("decoder.schedule.block").values()) == {""}


POINTS = [
    *(point("vanilla", 1.0, 90.0), point("fast_dllm", 3.0, 90.0), point("fast_dllm", 4.0, 80.0)),
    *(point("credit", 5.0, 85.0), point("credit", 6.0, 60.0), point("oracle", 9.0, 95.0)),
]
HIGH = {("fast_dllm", 3.0), ("credit", 5.0), ("credit", 6.0)}
LOW = {("vanilla", 1.0)}


def marked(points: list[Point], better: Any, *without: str) -> list[tuple[str, str, float]]:
    """Return panel, series and x of the points on the front."""
    found = with_front(frame_of_points(points), ParetoFront(better, without))
    return sorted((p.panel, p.series, p.x) for p in found[found.front].itertuples())


@pytest.mark.parametrize(("better", "expected"), [("high", HIGH), ("low", LOW)])
def test_what_nothing_beats_is_marked_in_each_panel(better, expected) -> None:
    open_one = {**POINTS[0], "y": None, "reason": "missing"}
    worse = [{**p, "panel": "code", "y": p["y"] / 2} for p in POINTS]
    found = marked([*POINTS, open_one, *worse], better, "oracle")
    assert found == sorted((panel, *at) for panel in ("quiz", "code") for at in expected)
    assert marked(POINTS, "high") == [("quiz", "oracle", 9.0)]
    with pytest.raises(DllmBenchError, match="needs numbers on the x axis, which has 'GSM8K'"):
        marked([{**POINTS[0], "x": "GSM8K"}], better)


def with_points(front: ParetoFront | None) -> BuiltFigure:
    found = figure_of(*POINTS)
    figure = replace(found.figure, draw=replace(found.figure.draw, front=front))
    return replace(found, figure=figure, points=with_front(found.points, front))


def test_the_front_is_drawn_and_written() -> None:
    plain = drawing(with_points(None))
    marked = drawing(with_points(ParetoFront("high", without=["oracle"])))
    shown = marked.axes[0].lines
    (pale,) = (line for line in shown if line.get_linewidth() == FRONT_LINE["linewidth"])
    assert list(zip(*pale.get_data(), strict=True)) == [(3.0, 90.0), (5.0, 85.0), (6.0, 60.0)]
    assert len(shown) == len(plain.axes[0].lines) + 1
    legends = (one.legends[0].get_texts() for one in (marked, plain))
    with_it, without = ([text.get_text() for text in legend] for legend in legends)
    assert with_it == [*without, "Pareto front"]
    rows = as_csv(with_points(ParetoFront("high", without=["oracle"]))).splitlines()
    assert rows[0].endswith(",at,front") and sum(row.endswith(",yes") for row in rows) == len(HIGH)
