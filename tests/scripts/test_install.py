"""`scripts.install`: uv is given what pip is told, and pip installs where uv does not. The Makefile
has a target for each table and figure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dllm_bench.tables.load import names_of
from scripts import install

ROOT = Path(__file__).resolve().parents[2]

LISTED = """:env:.find-links='/mirror'
:env:.default-timeout='180'
global.constraint='/etc/pins.txt'
global.find-links='/elsewhere'
global.index-url='https://general.example/simple'
install.index-url='https://own.example/simple'
install.extra-index-url='file:///one file:///two'
"""
OPTIONS = """--index-url=https://own.example/simple --extra-index-url=file:///one
--extra-index-url=file:///two --find-links=/mirror --constraint=/etc/pins.txt""".split()


@pytest.mark.parametrize(
    ("listed", "options"),
    [
        (LISTED, OPTIONS),
        (LISTED + "global.only-binary=':all:'\n", None),  # which uv has no equal of: pip installs
        (":env:.no-index='1'\n", ["--no-index"]),
        (":env:.no-index='0'\n", []),
    ],
)
def test_uv_is_given_the_settings_of_pip_that_decide_what_is_installed(listed, options) -> None:
    assert install.uv_options(listed) == options


@pytest.mark.parametrize(
    ("failing", "installer", "status"),
    [("", "uv", 0), (" uv", "pip", 0), ("-m uv ", "pip", 0), ("install", "", 1)],
)
def test_pip_installs_what_uv_cannot(monkeypatch, failing, installer, status) -> None:
    """failing: a part of the commands that fail: none, fetching uv and uv, uv alone, all."""
    done = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        failed = bool(failing) and failing in line
        if not failed and line.endswith("-e .[code]"):
            assert "-c constraints.txt -i own" in line
            done.append(command[2])
        return subprocess.CompletedProcess(command, int(failed), stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install, "compile_imported", lambda: None)
    assert install.main(["-i", "own", ".[code]"]) == status
    assert done == ([installer] if installer else [])


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


def test_a_launcher_sends_and_waits() -> None:
    (sent,) = commands("table4", "LAUNCHER=slurm", "SLURM=partition=gpu timeout_min=60")
    assert "--submit --wait --slurm partition=gpu --slurm timeout_min=60" in sent
    assert "table lopa/table4 --run" in " ".join(commands("table4"))
