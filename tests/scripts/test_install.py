"""`scripts.install`: uv is given what pip is told, and pip installs where uv does not."""

from __future__ import annotations

import subprocess

import pytest

from scripts import install

LISTED = """:env:.find-links='/mirror'
:env:.default-timeout='180'
global.constraint='/etc/pins.txt'
global.find-links='/elsewhere'
global.index-url='https://general.example/simple'
install.index-url='https://own.example/simple'
install.extra-index-url='file:///one file:///two'
"""


OPTIONS = [
    "--index-url=https://own.example/simple",
    "--extra-index-url=file:///one",
    "--extra-index-url=file:///two",
    "--find-links=/mirror",
    "--constraint=/etc/pins.txt",
]


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
