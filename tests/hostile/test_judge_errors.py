"""A sample whose grading fails: no score for it, a limit for a run, and another try."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest

from dllm_bench.benchmarks import sandbox
from dllm_bench.benchmarks.sandbox import ProgramOutcome
from tests.benchmark_helpers import evalplus_benchmark, gold

SETTINGS = "benchmark.max_new_tokens=32 benchmark.allow_code_execution=true"
RUN = f"run model=tiny-llada benchmark=minicode limit=2 {SETTINGS}"
BROKEN = ProgramOutcome("judge_error", "", 0.0, "the process that judges ended with status -9")


def break_judge(patch: pytest.MonkeyPatch, where: Callable[[int, str], bool]) -> None:
    """Let the judge break where a condition of the number of the call and of the program holds."""
    whole, calls = sandbox.examine, itertools.count()

    def examine(program: str, *args: Any) -> ProgramOutcome:
        return BROKEN if where(next(calls), program) else whole(program, *args)

    patch.setattr(sandbox, "examine", examine)


def test_a_broken_judge_gives_no_score_to_its_own_sample_alone(monkeypatch) -> None:
    benchmark = evalplus_benchmark("minicode", limit=4)
    texts = gold(benchmark)
    victim = next(iter(texts))
    texts[victim] = "    return 'victim'\n"
    break_judge(monkeypatch, lambda call, program: "victim" in program)
    scores = benchmark.score(texts)
    assert scores.pop(victim).verdict == "judge_error"
    assert {score.verdict for score in scores.values()} == {"correct"}


def test_a_run_seals_within_the_limit_and_grades_again(monkeypatch, tmp_path, command) -> None:
    break_judge(monkeypatch, lambda call, program: call % 2 == 0)
    error = command(RUN, code=2)
    assert "At most 0 samples may fail to be graded and grading failed for 1 of 2" in error
    with monkeypatch.context() as patch:
        break_judge(patch, lambda call, program: True)
        error = command(f"{RUN} max_judge_errors=null", code=2)
    assert "At least one sample must be graded and grading failed for 2" in error
    assert not list(tmp_path.glob("runs/**/record.json"))
    (texts,) = tmp_path.glob("runs/**/samples.jsonl")
    assert len(texts.read_text().splitlines()) == 2
    shown = command(f"{RUN} --max-judge-errors 1")
    assert "judge_error 1" in shown and "n = 1, 1 not graded)" in shown
    monkeypatch.undo()
    assert "judge_error 1" in command(RUN)
    assert "n = 1)" in command(f"{RUN} --retry-errors limit=1"), "of the items that were asked for"
    assert "judge_error" not in command(f"{RUN} --retry-errors")
    assert "not graded" not in command(RUN)


def test_grading_again_replaces_no_grade_by_none(monkeypatch, tmp_path, command) -> None:
    command(RUN)
    (record,) = tmp_path.glob("runs/**/record.json")
    before = record.read_bytes()
    break_judge(monkeypatch, lambda call, program: call == 0)
    name = record.parent.name.rpartition("-")[2]
    said = command(f"rescore {name} allow_code_execution=true", code=2)
    assert "grading failed for 1 of 2" in said and record.read_bytes() == before


@pytest.mark.parametrize("ends", ["exit 125", "exec sleep 60"])
def test_a_container_tool_that_does_not_work_is_an_error(
    ends, monkeypatch, tmp_path, command
) -> None:
    """The tool is there and its service is not, or hangs; what it says stands in the error."""
    tool = tmp_path / "docker"
    tool.write_text(f"#!/bin/sh\necho Cannot connect to the Docker daemon. >&2\n{ends}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sandbox, "KILL_S", 0.1)
    monkeypatch.setattr(sandbox, "BACKSTOP_S", -8.0)  # the wall time is 10 s
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, "docker")
    sandbox.container_tool.cache_clear()
    assert "Cannot connect to the Docker daemon" in command(RUN, code=2)
    assert not list(tmp_path.glob("runs/**/record.json"))
    assert list(tmp_path.glob("runs/**/samples.jsonl"))
    sandbox.container_tool.cache_clear()
