"""`make NAME` regenerates the table and the figure of that name, whichever there are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dllm_bench.tables.load import names_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Makefile with tables paper/one, paper/both and figures paper/two, paper/both."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for kind, name in (("table", "one"), ("table", "both"), ("figure", "two"), ("figure", "both")):
        made = folder / "conf" / kind / "paper" / f"{name}.yaml"
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()
    return folder


def commands(folder: Path, *targets: str) -> list[str]:
    """Return what make would run of dllm-bench; it warns of nothing."""
    made = subprocess.run(["make", "-n", *targets], cwd=folder, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    ran = (line.partition("/dllm-bench ")[2] for line in made.stdout.splitlines())
    return [command for command in ran if command]


@pytest.mark.parametrize(
    ("name", "kinds"), [("one", ["table"]), ("two", ["figure"]), ("both", ["table", "figure"])]
)
def test_a_target_makes_the_table_and_the_figure_of_its_name(tree, name, kinds) -> None:
    assert commands(tree, f"paper-{name}") == [f"{kind} paper/{name} --run" for kind in kinds]


def test_every_table_and_figure_has_a_target() -> None:
    wanted = [(kind, name) for kind in ("table", "figure") for name in names_of(kind)]
    found = commands(ROOT, *(name.replace("/", "-") for _, name in wanted))
    assert sorted(found) == sorted(f"{kind} {name} --run" for kind, name in wanted)


def test_a_launcher_sends_and_waits() -> None:
    (sent,) = commands(ROOT, "table4", "LAUNCHER=slurm", "SLURM=partition=gpu timeout_min=60")
    assert "--submit --wait --slurm partition=gpu --slurm timeout_min=60" in sent
    assert "table lopa/table4 --run" in " ".join(commands(ROOT, "table4"))
