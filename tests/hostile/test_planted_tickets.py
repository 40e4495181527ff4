"""Tickets of SLURM jobs that came with somebody else's results folder start nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from dllm_bench.cli.main import main
from dllm_bench.launch import slurm
from dllm_bench.store import cache
from dllm_bench.store.store import Store

TICKET = slurm.JobTicket("a" * 64, "minigsm/tiny/x", "17_0", "/etc/passwd")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that exists once squeue was started."""
    path, program = tmp_path / "asked", tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n: > {path}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return path


def status(results: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `status` prints."""
    assert main(["status", "--results", str(results)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(asdict(TICKET)),
        json.dumps({**asdict(TICKET), "signature": "0" * 64}),
        json.dumps({**asdict(TICKET), "signature": 5}),
        json.dumps({**asdict(TICKET), "signature": "ä"}),
        "[]",
        "{" * 5000,
    ],
)
def test_status_looks_up_no_job_of_a_strangers_ticket(
    line: str, tmp_path: Path, asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    (results / ".launch").mkdir(parents=True)
    (results / ".launch" / slurm.TICKETS).write_text(line + "\n", encoding="utf-8")
    printed = status(results, capsys)
    assert "1 lines of" in printed and "not written by this user" in printed
    assert "/etc/passwd" not in printed and not asked.exists()


def test_a_changed_ticket_or_one_of_another_user_is_not_looked_up(
    tmp_path: Path,
    asked: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results"
    store = Store(results / "runs")
    slurm.record_tickets(store, [TICKET])
    assert "/etc/passwd" in status(results, capsys) and asked.exists()
    asked.unlink()
    path = results / ".launch" / slurm.TICKETS
    content = path.read_text(encoding="utf-8")
    path.write_text(content.replace("17_0", "18_0"), encoding="utf-8")
    assert "not written by this user" in status(results, capsys)
    path.write_text(content, encoding="utf-8")
    monkeypatch.setattr(cache, "_key", lambda: b"another user's")
    assert "not written by this user" in status(results, capsys)
    assert not asked.exists()
