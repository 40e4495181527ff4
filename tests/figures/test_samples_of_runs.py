"""Figures read the samples of sealed runs, in a folder or an archive, or say what is missing."""

from __future__ import annotations

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.draw import lines, why_kept, write
from dllm_bench.figures.points import BuiltFigure, build_figure, missing_replays
from dllm_bench.figures.spec import SeriesCall
from dllm_bench.runs import token_replay
from dllm_bench.store.archive import RECORD, REPLAYS, SAMPLES
from dllm_bench.store.store import ERROR, SPEC, Store
from dllm_bench.tables.plan import PlannedCell
from scripts.update_reference import pack
from tests.figures.builders import ALPHA, planned, small
from tests.figures.builders import built as sealed
from tests.tables.builders import compose


def strip(root: Path) -> None:
    """Leave the record and the specification of each sealed run."""
    for record in root.rglob(RECORD):
        for path in record.parent.iterdir():
            if path.name not in (RECORD, SPEC):
                path.unlink()


def cells(root: Path) -> list[PlannedCell]:
    return planned(small(), ALPHA, Store(root), compose)


def drawn(root: Path) -> BuiltFigure:
    """Return the small figure, of the runs that are stored."""
    return build_figure(small(), ALPHA, cells(root), Store(root))


def empty_steps(built: BuiltFigure) -> list[str]:
    """Why the two sealed runs give no steps, of which they have three series."""
    empty = built.without_number
    return list(empty.reason[(empty.quantity == "steps") & (empty.state == "sealed")])


def test_a_point_without_samples_says_so_and_what_to_do(tmp_path) -> None:
    before = sealed(tmp_path / "runs")
    strip(tmp_path)
    found = drawn(tmp_path / "runs")
    reasons = empty_steps(found)
    assert len(reasons) == 3
    said = r"stored without 8 of its 8 samples; .*`dllm-bench runs rm \w+`"
    assert all(re.search(said, reason) for reason in reasons)
    assert not any(str(tmp_path) in reason for reason in found.points.reason)
    assert any(reasons[0] in line for line in lines(found))
    kept = before.drawn(measured=True)
    kept = kept[kept.quantity == "tpf"].reset_index(drop=True)
    again = found.drawn(measured=True).reset_index(drop=True)
    assert again.equals(kept), "what the records give is drawn as before"


def test_a_figure_is_drawn_from_an_archive_alone(tmp_path) -> None:
    before = sealed(tmp_path / "runs")
    runs = {record.identity_hash for record in Store(tmp_path / "runs").records()}
    pack(tmp_path, tmp_path / "runs.tar.xz", with_samples=runs)
    shutil.rmtree(tmp_path / "runs")
    assert drawn(tmp_path / "runs").drawn(measured=True).equals(before.drawn(measured=True))


def test_a_damaged_samples_file_is_named_below_the_runs_folder(tmp_path) -> None:
    sealed(tmp_path)
    for path in tmp_path.rglob(SAMPLES):
        path.write_text("no sample\n")
    reasons = empty_steps(drawn(tmp_path))
    assert len(reasons) == 3
    assert all(r.startswith("miniquiz/") and "is damaged" in r for r in reasons)


def test_written_points_are_kept_if_they_would_be_lost(tmp_path) -> None:
    root, folder = tmp_path / "runs", tmp_path / "figures"
    before = sealed(root)
    assert why_kept(before, folder) == ""
    [path] = [path for path in write(before, folder) if path.suffix == ".csv"]
    assert why_kept(before, folder) == ""
    strip(tmp_path)
    without = drawn(root)
    said = why_kept(without, folder)
    assert said.startswith(f"{path} was not written again, since it has points of 2 runs")
    assert "stored without" in said
    path.unlink()
    write(without, folder)
    assert why_kept(without, folder) == "", "a figure that never had them is written"


def test_written_points_are_kept_if_the_run_failed_when_made_again(tmp_path) -> None:
    root, folder = tmp_path / "runs", tmp_path / "figures"
    write(sealed(root), folder)
    record = next(root.rglob(RECORD))
    record.unlink()
    assert why_kept(drawn(root), folder) == "", "a run to be made is drawn as missing"
    (record.parent / ERROR).write_text("no memory left\n")
    assert "points of 1 runs that would be lost (failed)" in why_kept(drawn(root), folder)


def test_without_samples_no_token_replay_is_recorded(tmp_path) -> None:
    sealed(tmp_path)
    call = SeriesCall("waiting_steps", {}, {}, replay_samples=2)
    figure = replace(small(), calls={"steps": call})
    for path in tmp_path.rglob(token_replay.FILE):
        path.unlink()
    assert len(list(missing_replays(figure, cells(tmp_path), Store(tmp_path)))) == 2
    strip(tmp_path)
    assert list(missing_replays(figure, cells(tmp_path), Store(tmp_path))) == []


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 100])
def test_a_file_that_holds_no_replays_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / REPLAYS).write_bytes(content)
    with pytest.raises(DllmBenchError, match="holds no token replays"):
        token_replay.read_replays(tmp_path)


NAME = "learn2pd/figure4"  # two runs, and the replay of their tokens


def rows(results: Path) -> list[dict[str, str]]:
    with (results / "figures" / "embedded" / f"{NAME}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == "measured"]


def test_a_figure_says_what_is_missing_then_runs_it(tmp_path: Path, capsys) -> None:
    ask = ["figure", NAME, "--limit", "1", "--results", str(tmp_path)]
    assert main(ask) == 0
    said = capsys.readouterr().out
    assert "2 runs to make" in said
    assert f"dllm-bench figure {NAME} --profile embedded --limit 1 --run" in said
    assert said.count("one of them (missing: not run yet): dllm-bench run ") == 2
    assert [(row["y"], row["state"]) for row in rows(tmp_path)] == [("", "missing")] * 2

    assert main([*ask, "--run", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "0 without number" in said
    assert len(list((tmp_path / "runs").rglob(token_replay.FILE))) == 2
    drawn = rows(tmp_path)
    assert {row["state"] for row in drawn} == {"sealed"}
    for panel in ("gsm8k", "humaneval"):
        mine = [row for row in drawn if row["panel"] == panel]
        tokens = sum(float(row["y"]) for row in mine)
        assert {float(row["n"]) for row in mine} == {tokens}, "every decoded token is counted once"

    assert main(["status", "--results", str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"figure embedded/{NAME}: ") and line.endswith("measured")
