"""Figures of sealed runs whose samples are missing, as in an archive of records."""

from __future__ import annotations

import csv
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest

from dllm_bench.cli import figure as command
from dllm_bench.cli.main import main
from dllm_bench.figures import run_series
from dllm_bench.figures.points import (
    BuiltFigure,
    FigurePoint,
    build_figure,
    missing_replays,
    runs_without_samples,
)
from dllm_bench.figures.spec import SeriesCall
from dllm_bench.figures.write import lines, why_kept, write
from dllm_bench.runs import token_replay
from dllm_bench.store.store import ERROR, RECORD, SAMPLES, SPEC, Store
from dllm_bench.tables import plan as planning
from dllm_bench.tables.plan import PlannedCell
from tests.figures import test_points
from tests.figures.builders import planned
from tests.figures.test_points import ALPHA, small
from tests.tables.builders import compose

COMMAND = "dllm-bench figure small/figure --profile embedded --run"
NAME = "learn2pd/figure4"  # two runs, and the replay of their tokens


def strip(root: Path) -> None:
    """Leave the record and the specification of each sealed run."""
    for record in root.rglob(RECORD):
        for path in record.parent.iterdir():
            if path.name not in (RECORD, SPEC):
                path.unlink()


def pack(root: Path) -> None:
    """Move the records into an archive beside the runs folder."""
    with tarfile.open(root.with_name(f"{root.name}.tar.xz"), "w:xz") as packed:
        for record in root.rglob(RECORD):
            packed.add(record, str(record.relative_to(root.parent)))
    shutil.rmtree(root)


def cells(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[PlannedCell]:
    return planned(small(), ALPHA, Store(root), compose, monkeypatch)


def drawn(root: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltFigure:
    """The small figure, of the runs that are stored."""
    return build_figure(small(), ALPHA, cells(root, monkeypatch), Store(root))


def sealed(root: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltFigure:
    """The small figure with its runs made; two are sealed and give three series of `steps`."""
    return test_points.built(root, monkeypatch)


def empty_steps(built: BuiltFigure) -> list[FigurePoint]:
    return [p for p in built.without_number() if (p.quantity, p.state) == ("steps", "sealed")]


def test_a_point_without_samples_says_so_and_names_the_command(tmp_path, monkeypatch) -> None:
    before = sealed(tmp_path / "runs", monkeypatch)
    strip(tmp_path)
    found = drawn(tmp_path / "runs", monkeypatch)
    reason = f"the record is stored without its samples; to make them: {COMMAND}"
    assert [p.reason for p in empty_steps(found)] == [reason] * 3
    assert not any(str(tmp_path) in point.reason for point in found.points)
    assert f"2 runs: {reason}" in list(lines(found))
    kept = [p for p in before.drawn(measured=True) if p.quantity == "tpf"]
    assert found.drawn(measured=True) == kept, "what the records give is drawn as before"


def test_a_damaged_samples_file_is_named_below_the_runs_folder(tmp_path, monkeypatch) -> None:
    sealed(tmp_path, monkeypatch)
    for path in tmp_path.rglob(SAMPLES):
        path.write_text("no sample\n")
    found = drawn(tmp_path, monkeypatch)
    reasons = [p.reason for p in empty_steps(found)]
    assert len(reasons) == 3
    assert all(r.startswith("miniquiz/") and "is damaged" in r for r in reasons)
    assert list(runs_without_samples(small(), cells(tmp_path, monkeypatch), Store(tmp_path))) == []


def test_runs_without_samples_are_removed_once_to_be_made_again(tmp_path, monkeypatch) -> None:
    sealed(tmp_path, monkeypatch)
    complete = cells(tmp_path, monkeypatch)
    assert command.remove_without_samples([small()], Store(tmp_path), [complete]) == 0
    without, whole = (path.parent for path in tmp_path.rglob(RECORD))
    (without / SAMPLES).unlink()
    both = [small(), small()]
    assert command.remove_without_samples(both, Store(tmp_path), [complete] * 2) == 1
    assert (without.exists(), whole.exists()) == (False, True)
    states = {c.run.spec: c.run.state for c in cells(tmp_path, monkeypatch)}
    assert {c.run.spec for c in complete} == set(states), "the runs to make are the same"
    assert sorted(states.values()) == ["missing"] * 3 + ["partial", "sealed"]


def test_a_figure_of_records_alone_removes_nothing(tmp_path, monkeypatch) -> None:
    sealed(tmp_path, monkeypatch)
    strip(tmp_path)
    figure = replace(small(), calls={"steps": SeriesCall("reliability", {}, {})})
    assert list(runs_without_samples(figure, cells(tmp_path, monkeypatch), Store(tmp_path))) == []


@pytest.mark.parametrize("packed", [True, False])
def test_what_cannot_be_made_again_here_is_kept(packed: bool, tmp_path, monkeypatch) -> None:
    """A record in an archive, or of a device that this machine does not have."""
    root = tmp_path / "runs"
    sealed(root, monkeypatch)
    strip(tmp_path)
    where = "in another results directory (--results)"
    if packed:
        pack(root)
    else:
        monkeypatch.setattr(planning, "missing_device", lambda hardware: "a GPU (Z100)")
        where = "on a machine with a GPU (Z100)"
    found = drawn(root, monkeypatch)
    assert {p.reason.partition("; ")[2] for p in empty_steps(found)} == {
        f"to make them {where}: {COMMAND}"
    }
    stored = cells(root, monkeypatch)
    assert command.remove_without_samples([small()], Store(root), [stored]) == 0


def test_written_points_are_kept_if_they_would_be_lost(tmp_path, monkeypatch) -> None:
    root, folder = tmp_path / "runs", tmp_path / "figures"
    before = sealed(root, monkeypatch)
    assert why_kept(before, folder) == ""
    [path] = [path for path in write(before, folder) if path.suffix == ".csv"]
    assert why_kept(before, folder) == ""
    strip(tmp_path)
    without = drawn(root, monkeypatch)
    said = why_kept(without, folder)
    assert said.startswith(f"{path} was not written again, since it has points of 2 runs")
    assert COMMAND in said
    path.unlink()
    write(without, folder)
    assert why_kept(without, folder) == "", "a figure that never had them is written"


def test_written_points_are_kept_if_the_run_failed_when_made_again(tmp_path, monkeypatch) -> None:
    root, folder = tmp_path / "runs", tmp_path / "figures"
    write(sealed(root, monkeypatch), folder)
    record = next(root.rglob(RECORD))
    record.unlink()
    assert why_kept(drawn(root, monkeypatch), folder) == "", "a run to be made is drawn as missing"
    (record.parent / ERROR).write_text("no memory left\n")
    assert "points of 1 runs that would be lost (failed)" in why_kept(
        drawn(root, monkeypatch), folder
    )


def test_without_samples_no_token_replay_is_recorded(tmp_path, monkeypatch) -> None:
    sealed(tmp_path, monkeypatch)
    call = SeriesCall("waiting_steps", {}, {}, replay_samples=2)
    figure = replace(small(), calls={"steps": call})
    for path in tmp_path.rglob(token_replay.FILE):
        path.unlink()
    assert len(list(missing_replays(figure, cells(tmp_path, monkeypatch), Store(tmp_path)))) == 2
    strip(tmp_path)
    assert list(missing_replays(figure, cells(tmp_path, monkeypatch), Store(tmp_path))) == []


@pytest.mark.parametrize("name", run_series.RUN_SERIES)
def test_which_run_series_read_samples(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_series, "_profile", lambda model, files: None)
    head = {"source": str(tmp_path / "nowhere")}
    decoder = {"schedule": {"block": 2}, "select": {"first": {"head": head}}}
    spec = Namespace(model={"name": "m"}, decoder=decoder)
    record = Namespace(columns={"id": ["a"]}, sample_stats=[], spec=spec)
    run = run_series.StoredRun(record, tmp_path)
    settings = {"profile": {}, "positions": [], "groups": [], "every": 50, "at": [0.5]}
    if run_series.reads_samples(name):
        with pytest.raises(run_series.MissingSamplesError):
            list(run_series.run_series(name)(run, settings))
    else:
        assert list(run_series.run_series(name)(run, settings)) == []


def test_run_makes_sealed_runs_without_samples_again(tmp_path: Path, capsys) -> None:
    ask = ["figure", NAME, "--limit", "2", "--results", str(tmp_path)]
    assert main([*ask, "--run", "--jobs", "1"]) == 0
    written = sorted((tmp_path / "figures-limit-2").rglob("*.*"))
    before = [path.read_bytes() for path in written]
    hashes = {record.identity_hash for record in Store(tmp_path / "runs").records()}
    strip(tmp_path)

    capsys.readouterr()
    assert main(ask) == 1
    said = capsys.readouterr()
    make = f"to make them: dllm-bench figure {NAME} --profile embedded --limit 2 --run"
    assert f"2 runs: the record is stored without its samples; {make}" in said.out
    assert "written: " not in said.out
    assert "was not written again" in said.err
    assert [path.read_bytes() for path in written] == before

    for path in written:
        path.unlink()
    assert main(ask) == 0
    [table] = [path for path in written if path.suffix == ".csv"]
    reasons = [row["reason"] for row in measured(table)]
    assert len(reasons) == 2
    assert not any(str(tmp_path) in reason for reason in reasons)

    capsys.readouterr()
    assert main([*ask, "--run", "--jobs", "1"]) == 0
    assert "2 sealed runs without samples" in capsys.readouterr().err
    assert [path.read_bytes() for path in written] == before
    assert {record.identity_hash for record in Store(tmp_path / "runs").records()} == hashes


def measured(path: Path) -> Sequence[dict[str, str]]:
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == "measured"]
