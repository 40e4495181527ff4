"""Points equal what is computed by hand from made-up runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dllm_bench.figures.draw import as_csv, grid, lines
from dllm_bench.figures.points import BuiltFigure, build_figure
from dllm_bench.figures.spec import PaperFigure, XAxis, load_figure, read_figure
from dllm_bench.store.store import Store
from dllm_bench.tables.load import load_profile
from dllm_bench.tables.spec import Instead
from tests.figures.builders import planned, record_of, samples_of, store_run
from tests.tables.builders import TINY, compose, start

SMALL = Path(__file__).parent / "small"
ALPHA = replace(TINY, replace={**TINY.replace, "model": {"alpha": "tiny-alpha"}})


def small() -> PaperFigure:
    return read_figure("small/figure", SMALL / "figure.yaml", SMALL)


def built(
    root: Path, monkeypatch: pytest.MonkeyPatch, figure: PaperFigure | None = None
) -> BuiltFigure:
    """Return the small figure: quiz sealed but for beta-4, code not run."""
    figure, store = figure or small(), Store(root)
    for cell in planned(figure, ALPHA, store, compose, monkeypatch):
        keys, spec = cell.cell.keys, cell.run.spec
        if keys["task"] == "quiz" and spec and store.record(spec) is None:
            if keys["number"] == "beta-4":
                (store.path(spec)).exists() or start(store, spec, done=3, total=20)
            else:
                store_run(store, spec, samples_of(spec))
    return build_figure(figure, ALPHA, planned(figure, ALPHA, store, compose, monkeypatch), store)


def test_a_point_is_its_runs_number(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    [point] = [
        p
        for p in found.points.itertuples()
        if (p.panel, p.series, p.x) == ("quiz", "alpha", 0.5) and p.run
    ]
    spec = found.built.cells.xs("alpha-0.5", level="number").planned.iloc[0].run.spec
    assert spec
    record = record_of(spec, samples_of(spec))
    forwards = sum(record.columns["forwards"])
    assert point.y == pytest.approx(sum(record.columns["committed"]) / forwards)
    assert point.low is not None
    assert point.low <= point.y <= (point.high or 0)
    assert (point.quantity, point.n, point.kind, point.state) == ("tpf", 8, "measured", "sealed")
    assert (point.source, point.run) == ("tiny-alpha on miniquiz", spec.identity_hash)


def test_what_has_no_number_says_why(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    why = {
        (p.panel, p.series, p.x, p.quantity): (p.state, p.reason)
        for p in found.without_number.itertuples()
    }
    assert why["quiz", "beta", 4.0, "tpf"] == ("partial", "3 of 20 samples")
    assert why["code", "alpha", 0.5, "tpf"] == ("missing", "missing")
    assert why["code", "alpha", 0.5, "steps"] == ("missing", "missing")
    text = as_csv(found)
    assert text.count(",missing,") == 4
    assert text.count("partial,3 of 20 samples") == 2
    said = "\n".join(lines(found))
    assert "3 runs to fill" in said
    assert said.count("open (") == 3
    assert "dllm-bench run decoder=lopa model=tiny-alpha" in said


def test_a_run_series_gives_the_points_of_a_run(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    steps = [
        p
        for p in found.drawn(measured=True).itertuples()
        if p.quantity == "steps" and p.series == "alpha"
    ]
    assert {p.panel for p in steps} == {"quiz"}
    assert {p.x for p in steps} >= {1, 2, 3}
    assert all(p.low <= p.high and p.y > 0 for p in steps), "quartiles, which a mean may leave"


def test_reported_points_stay_apart(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    reported = list(found.drawn(measured=False).itertuples())
    assert [(p.panel, p.series, p.x, p.y, p.kind) for p in reported] == [
        ("quiz", "alpha", 0.5, 2.5, "printed"),
        ("quiz", "beta", 2.0, 3.0, "printed"),
    ]
    assert all(not p.run and not p.state for p in reported)


def test_x_may_be_a_setting_or_another_metric(tmp_path, monkeypatch) -> None:
    figure = small()
    setting = replace(figure.draw, x=XAxis("Length", setting="benchmark.max_new_tokens"))
    found = built(tmp_path, monkeypatch, replace(figure, draw=setting))
    assert set(found.drawn(measured=True).query("quantity == 'tpf'").x) == {64.0}
    metric = replace(figure.draw, x=XAxis("TPF", metric="tpf"))
    found = built(tmp_path, monkeypatch, replace(figure, draw=metric, calls={}))
    assert set(found.drawn(measured=True).quantity) == {"steps"}
    by_hand = found.built.cells.xs(("quiz", "tpf"), level=["task", "metric"]).value
    assert set(found.drawn(measured=True).x) == {by_hand[n] for n in ("alpha-0.5", "alpha-1")}


def test_the_papers_points_are_in_the_panel_of_ours(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    assert (found.panels, list(found.series)) == (["quiz", "code"], ["alpha", "beta"])
    rows = grid(found)
    shapes = [[slot and (slot.quantity, slot.names) for slot in row] for row in rows]
    assert shapes == [
        [("tpf", ("quiz",)), ("tpf", ("code",))],
        [("steps", ("quiz",)), ("steps", ("code",))],
    ]
    assert rows[0][0] is not None
    assert set(rows[0][0].placed.kind) == {"measured", "printed"}
    assert rows[0][1] is not None
    assert rows[0][1].placed.empty


def test_one_panel_has_its_quantities_side_by_side(tmp_path, monkeypatch) -> None:
    figure = small()
    draw = replace(figure.draw, panels="")
    rows = grid(built(tmp_path, monkeypatch, replace(figure, draw=draw, reported=())))
    assert [[place and place.quantity for place in row] for row in rows] == [["tpf", "steps"]]


def test_a_mean_says_in_how_many_of_its_runs_a_setting_was_replaced(tmp_path, monkeypatch) -> None:
    """Its place on the axis is that of most of them: of five lengths of 256 tokens, two are 96. A
    setting that is the axis is seen there, and not said again.
    """
    figure, profile = load_figure("creditdecoding/figure7"), load_profile("embedded")
    block = "decoder.schedule.block=8"
    asked = ("model=tiny-llada-free", "decoder.schedule.block=64")
    instead = (*profile.instead, Instead(asked, (asked[0], block)))
    profile, store = replace(profile, instead=instead), Store(tmp_path)
    cells = planned(figure, profile, store, compose, monkeypatch)

    def said(axis: str) -> dict[object, str]:
        shown = replace(figure, draw=replace(figure.draw, x=XAxis("x", setting=axis)))
        points = build_figure(shown, profile, cells, store).points
        missing = points[(points.kind == "measured") & (points.state == "missing")]
        return dict(zip(missing.x, missing.switched, strict=True))

    part = f"{block} (2/5)"
    assert said("benchmark.max_new_tokens") == {32: part, 64: part, 96: part, 128: part}
    assert set(said("decoder.schedule.block").values()) == {""}
