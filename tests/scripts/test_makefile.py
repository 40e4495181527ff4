"""`make NAME` regenerates the table and the figure of that name, whichever there are."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dllm_bench.tables.load import names_of

ROOT = Path(__file__).resolve().parents[2]


def commands(*targets: str) -> list[str]:
    """Return what make would run of dllm-bench; it warns of nothing."""
    made = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    ran = (line.partition("/dllm-bench ")[2] for line in made.stdout.splitlines())
    return [command for command in ran if command]


def test_every_table_and_figure_has_a_target() -> None:
    wanted = [(kind, name) for kind in ("table", "figure") for name in names_of(kind)]
    found = commands(*(name.replace("/", "-") for _, name in wanted))
    assert sorted(found) == sorted(f"{kind} {name} --run" for kind, name in wanted)
    both = [f"{kind} decoders/library --run" for kind in ("table", "figure")]
    assert commands("decoders-library") == both


def test_a_launcher_sends_and_waits() -> None:
    (sent,) = commands("table4", "LAUNCHER=slurm", "SLURM=partition=gpu timeout_min=60")
    assert "--submit --wait --slurm partition=gpu --slurm timeout_min=60" in sent
    assert "table lopa/table4 --run" in " ".join(commands("table4"))
