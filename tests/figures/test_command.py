"""`dllm-bench figure`, end to end on an embedded model."""

from __future__ import annotations

import csv
from pathlib import Path

from dllm_bench.cli.main import main
from dllm_bench.runs import token_replay

NAME = "learn2pd/figure4"  # two runs, and the replay of their tokens


def rows(results: Path) -> list[dict[str, str]]:
    path = results / "figures" / "embedded" / f"{NAME}.csv"
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == "measured"]


def test_a_figure_says_what_is_missing_then_runs_it(tmp_path: Path, capsys) -> None:
    ask = ["figure", NAME, "--limit", "2", "--results", str(tmp_path)]
    assert main(ask) == 0
    said = capsys.readouterr().out
    assert "2 runs to fill" in said
    assert f"dllm-bench figure {NAME} --profile embedded --limit 2 --run" in said
    assert said.count("open (missing: not run yet): dllm-bench run ") == 2
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

    before = (tmp_path / "figures" / "embedded" / f"{NAME}.svg").read_bytes()
    assert main([*ask, "--run"]) == 0
    after = (tmp_path / "figures" / "embedded" / f"{NAME}.svg").read_bytes()
    assert before == after

    capsys.readouterr()
    assert main(["status", "--results", str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"figure embedded/{NAME}: ")
    assert line.endswith("measured")
