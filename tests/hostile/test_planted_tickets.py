"""Tickets of SLURM jobs that came with somebody else's results folder start nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from dllm_bench.cli.main import main
from dllm_bench.launch import slurm
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


def test_status_looks_up_this_users_jobs_alone(
    tmp_path: Path, asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    for folder in (results, results / ".launch", results / "runs"):
        folder.mkdir()
        (folder / slurm.TICKETS).write_text(json.dumps(asdict(TICKET)) + "\n", encoding="utf-8")
    assert "/etc/passwd" not in status(results, capsys) and not asked.exists()
    slurm.record_tickets(Store(results / "runs"), [TICKET])
    assert "/etc/passwd" in status(results, capsys) and asked.exists()
