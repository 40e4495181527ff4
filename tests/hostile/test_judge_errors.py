"""A sample whose grading fails: no score for it, a limit for a run, and another try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dllm_bench.benchmarks.sandbox import execution as sandbox
from dllm_bench.benchmarks.sandbox.limits import ProgramOutcome
from dllm_bench.cli.main import main
from dllm_bench.cli.run import with_flags_as_settings
from tests.benchmark_helpers import evalplus_benchmark, gold

RUN = ["run", "model=tiny-llada", "benchmark=minicode", "limit=2", "benchmark.max_new_tokens=32",
       "benchmark.allow_code_execution=true"]  # fmt: skip
BROKEN = ProgramOutcome("judge_error", "", 0.0, "the process that judges ended with status -9")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Judges that break for every program."""
    monkeypatch.setattr(sandbox, "examine", lambda *args: BROKEN)
    return monkeypatch


def test_a_broken_judge_gives_no_score_to_its_own_sample_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benchmark = evalplus_benchmark("minicode", limit=4)
    texts, whole = gold(benchmark), sandbox.examine
    victim = next(iter(texts))
    texts[victim] = "    return 'victim'\n"

    def examine(program: str, *args: Any) -> ProgramOutcome:
        return BROKEN if "victim" in program else whole(program, *args)

    monkeypatch.setattr(sandbox, "examine", examine)
    scores = benchmark.score(texts)
    assert scores.pop(victim).verdict == "judge_error"
    assert {score.verdict for score in scores.values()} == {"correct"}


def test_a_run_seals_within_the_limit_and_grades_again(
    broken: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*RUN, f"paths.results={tmp_path}"]
    assert main([*command, "--max-judge-errors", "1"]) == 2
    assert "At most 1 samples may fail to be graded and 2 of 2 did" in capsys.readouterr().err
    assert main(command) == 0
    assert "judge_error 2" in capsys.readouterr().out
    broken.undo()
    assert main(command) == 0
    assert "judge_error 2" in capsys.readouterr().out
    assert main([*command, "--retry-errors"]) == 0
    assert "judge_error" not in capsys.readouterr().out
    assert main(command) == 0
    assert "judge_error" not in capsys.readouterr().out


def test_flags_are_settings() -> None:
    flags = ["seed=1", "--retry-errors", "--max-judge-errors", "3"]
    assert with_flags_as_settings(flags) == ["seed=1", "retry_errors=true", "max_judge_errors=3"]
