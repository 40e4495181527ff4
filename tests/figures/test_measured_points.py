"""No committed figure has fewer measured points in a series than before, and none has no point."""

from __future__ import annotations

from pathlib import Path

from scripts.figure_points import counted, fewer, known, raise_counts

HEADER = "panel,series,quantity,x,y,kind,run\n"
COMMAND = "run `python -m scripts.figure_points`"


def figure_file(folder: Path, *series: str) -> None:
    """The csv of a figure with one measured point for each name, one without, one of the paper."""
    rows = [f",{name},tpf,1,2,measured,r\n" for name in series]
    rows += [",alpha,tpf,2,,measured,r\n", ",alpha,tpf,1,2,printed,\n"]
    path = folder / "lopa" / "figure1.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + "".join(rows), "utf-8")


def test_no_committed_figure_lost_a_measured_point() -> None:
    assert not list(fewer(known(), counted()))


def test_the_points_gained_are_written_down() -> None:
    assert known() == counted(), COMMAND


def test_every_committed_figure_has_a_measured_point() -> None:
    assert not [name for name, series in counted().items() if not series]


def test_counts_rise_and_never_fall(tmp_path) -> None:
    path = tmp_path / "points.yaml"
    figure_file(tmp_path, "alpha", "", "")
    assert raise_counts(path, tmp_path) == []
    assert known(path)["lopa/figure1"] == {"-": 2, "alpha": 1}
    figure_file(tmp_path, "alpha", "alpha", "", "", "beta")
    assert raise_counts(path, tmp_path) == []
    assert known(path)["lopa/figure1"] == {"-": 2, "alpha": 2, "beta": 1}
    figure_file(tmp_path, "alpha", "", "", "beta", "beta")
    assert raise_counts(path, tmp_path) == [
        "lopa/figure1: series alpha has 1 measured points, and had 2"
    ]
    assert known(path)["lopa/figure1"]["beta"] == 1
