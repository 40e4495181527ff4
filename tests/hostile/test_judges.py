"""No program that only pretends is judged right, and none harms more than itself.

Every program of `pretending.py` is judged in the two ways in which calls are judged: by inputs and
a reference (EvalPlus, minicode, LiveCodeBench) and by statements (HumanEval, MBPP).
"""

from __future__ import annotations

import marshal
import time
from typing import Any

import pytest

from dllm_bench.benchmarks.sandbox import execution as sandbox
from dllm_bench.benchmarks.sandbox.limits import Limits, ProgramOutcome
from dllm_bench.benchmarks.tasks import code_scorers
from tests.hostile.pretending import PROGRAMS, SLOW
from tests.tiers import covering

LIMITS = Limits(cpu_s=2, wall_s=6.0, memory_mb=512)
REFERENCE = "def half(x):\n    return x / 2\n\ndef f(x):\n    return 2 * x + 1\n"
CHECK = """
from math import isclose
def check(candidate):
    assert candidate(3) == 7
    assert half(candidate(3)) == 3.5
    assert isclose(candidate(0.25), 1.5)
    assert abs(candidate(0.5) - 2) < 1e-6
    assert all(candidate(x) == 2 * x + 1 for x in range(4))
check(f)
"""
STAGES = {"base": [[3], [4]], "plus": [[0.5], [-1]]}
DRILL_S = 8.0


def by_inputs(program: str, **changes: Any) -> ProgramOutcome:
    """Judge a program as EvalPlus sets are judged."""
    payload = {
        "reference": REFERENCE, "entry_point": "f", "stages": marshal.dumps(STAGES),
        "rule": "equal", "atol": 0.0, "min_time_s": 1.0, "time_factor": 4.0, **changes,
    }  # fmt: skip
    examiner = sandbox.Examiner("check_function", payload, "__solution__", silent=True)
    return sandbox.examine(program, examiner, LIMITS)


def by_statements(program: str) -> ProgramOutcome:
    """Judge a program as HumanEval and MBPP are judged."""
    tests = code_scorers.Tests(CHECK, REFERENCE, ("f",))
    return sandbox.examine(program, tests.examiner, LIMITS)


JUDGES = {"inputs": by_inputs, "statements": by_statements}


@pytest.mark.parametrize("judge", JUDGES)
def test_the_reference_is_judged_right(judge: str) -> None:
    assert JUDGES[judge](REFERENCE).verdict == "passed"


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("name", covering(4, PROGRAMS))
def test_no_pretending_program_is_judged_right(name: str, judge: str) -> None:
    began = time.monotonic()
    outcome = JUDGES[judge](f"{REFERENCE}\n{PROGRAMS[name]}")
    assert outcome.verdict not in ("passed", "judge_error")
    assert "base" not in {words[0] for words in outcome.reports if words[1:2] == ("passed",)}
    assert time.monotonic() - began < DRILL_S


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("name", covering(5, SLOW))
def test_time_is_bounded_asleep_or_not(name: str, judge: str) -> None:
    outcome = JUDGES[judge](f"{REFERENCE}\n{SLOW[name]}\n")
    assert outcome.verdict == "timeout"
    assert outcome.seconds < DRILL_S
