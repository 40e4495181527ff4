"""No program that only pretends is judged right, and none harms more than itself.

The task is a function `f` with `f(x) == 2 * x + 1`. Every program of `pretending.yaml` tries to be
judged right without solving it, or to break its judge; one without an `f` gets one that returns
None. It is judged in all ways, see `JUDGES`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import pytest

from dllm_bench.benchmarks import sandbox
from dllm_bench.benchmarks.sandbox import Limits, ProgramOutcome
from dllm_bench.benchmarks.tasks import code_scorers, livecodebench
from dllm_bench.paths import read_yaml
from tests.tiers import covering

WRONG = "\ndef f(x):\n    return None\n"
GROUPS = read_yaml(Path(__file__).with_name("pretending.yaml"))
PARTS, TASK = GROUPS.pop("parts"), GROUPS.pop("task")
GROUPS["builtins"] = {
    name: f"import builtins\nbuiltins.{name} = {value}"
    for name, value in GROUPS["builtins"].items()
}
GROUPS["equal"] = {
    name: f"class Same({name}):\n$EQUAL\n\ndef f(x):\n    return Same({given})\n"
    for name, given in GROUPS["equal"].items()
}


def programs(group: str, start: str = "", end: str = "") -> dict[str, str]:
    every = {name: Template(text).substitute(PARTS) for name, text in GROUPS[group].items()}
    return {name: f"{start}{text}{end}" for name, text in every.items()}


def during_call(source: str) -> str:
    """Return a program that runs the statements when it is called."""
    call = "def f(x):\n    exec(SOURCE, globals())\n    import os\n    os._exit(0)\n"
    return f"{call}SOURCE = {source!r}"


CHANNEL = PARTS["CHANNEL"] + "\n"
PROGRAMS: Mapping[str, str] = {
    f"{group}: {name}": source if "def f(" in source else source + WRONG
    for group in ("builtins", "patches", "searches", "channel", "equal", "returns", "forged")
    for name, source in programs(group, CHANNEL if group == "forged" else "").items()
}
SLOW: Mapping[str, str] = programs("slow")
BREAKING: Mapping[str, str] = {
    **{name: CHANNEL + during_call(source) for name, source in programs("breakers").items()},
    **programs("nameless", CHANNEL, WRONG),
}
"""Programs that send what a judge might break over, which must be wrong, not without a grade."""
LIMITS = Limits(cpu_s=1, wall_s=6.0, memory_mb=512)
REFERENCE = TASK["reference"]
STAGES = {"base": [[3], [4]], "plus": [[0.5], [-1]]}
DRILL_S = 8.0


def by_inputs(program: str, **changes: Any) -> ProgramOutcome:
    asked = {"reference": REFERENCE, "entry_point": "f", "min_time_s": 1.0, "time_factor": 4.0}
    return sandbox.examine(program, sandbox.compare_calls(STAGES, {**asked, **changes}), LIMITS)


def by_statements(program: str) -> ProgramOutcome:
    """Judge a program as HumanEval and MBPP are judged."""
    return sandbox.examine(
        program, code_scorers.Tests(TASK["check"], REFERENCE, ("f",)).examiner, LIMITS
    )


def by_pieces(program: str) -> ProgramOutcome:
    """Judge a program as item 367 of MBPP is judged."""
    pieces = code_scorers.Tests(TASK["pieces"], REFERENCE).pieces
    examiner = sandbox.Examiner("check", {"pieces": pieces})
    return sandbox.examine(program, examiner, LIMITS)


def by_output(program: str) -> ProgramOutcome:
    """Judge a program as LiveCodeBench judges those that read standard input."""
    outcome = sandbox.execute(f"{program}\nprint(f(int(input())))\n", LIMITS, "4\n")
    right = outcome.verdict == "ended" and livecodebench.same_output(outcome.stdout, "9\n")
    return replace(outcome, verdict="passed") if right else outcome


CALLS = {"inputs": by_inputs, "statements": by_statements, "pieces": by_pieces}
JUDGES = {**CALLS, "output": by_output}


@pytest.mark.parametrize("judge", JUDGES)
def test_the_reference_is_judged_right(judge: str) -> None:
    assert JUDGES[judge](REFERENCE).verdict == "passed"
    block = f"{REFERENCE}\nif __name__ == '__main__':\n    raise SystemExit\n"
    assert (JUDGES[judge](block).verdict == "passed") == (judge in CALLS)


@pytest.mark.parametrize(("name", "judge"), covering(9, product(PROGRAMS, JUDGES), often=5))
def test_no_pretending_program_is_judged_right(name: str, judge: str) -> None:
    began = time.monotonic()
    outcome = JUDGES[judge](f"{REFERENCE}\n{PROGRAMS[name]}")
    assert outcome.verdict not in ("passed", "judge_error")
    assert "base" not in {words[0] for words in outcome.reports if words[1:2] == ("passed",)}
    assert time.monotonic() - began < DRILL_S


@pytest.mark.parametrize(("name", "judge"), covering(7, product(BREAKING, CALLS), often=5))
def test_what_cannot_be_read_is_wrong_and_not_without_a_grade(name: str, judge: str) -> None:
    began = time.monotonic()
    outcome = CALLS[judge](f"{REFERENCE}\n{BREAKING[name]}")
    assert outcome.verdict not in ("passed", "ended", "judge_error")
    assert time.monotonic() - began < DRILL_S


def test_a_comparison_without_end_is_wrong() -> None:
    """The kernel ends the judging process inside of one call of C; that is no fault of its own."""
    colliding = "def f(x):\n    return [i * (2**61 - 1) for i in range(200_000)]"
    outcome = by_inputs(colliding, rule="same_set", reference="def f(x):\n    return [x]")
    assert outcome.verdict == "failed"
    assert outcome.detail == "its results took too much to read or compare (SIGXCPU)"
    check = REFERENCE.replace("x + 1", "x + 1 if x else 1")
    tests = code_scorers.Tests("assert set(f(3)) == {7}", check, ("f",))
    assert sandbox.examine(colliding, tests.examiner, LIMITS).verdict == "failed"


@pytest.mark.parametrize("body", ["return 1 / 0", "while True: pass", "time.sleep(9)"])
def test_a_judge_that_breaks_by_itself_gives_no_grade(body: str, monkeypatch) -> None:
    """Before anything is read of the program: its reference does not run to its end."""
    monkeypatch.setattr(sandbox, "BACKSTOP_S", 3 - LIMITS.wall_s)
    reference = f"import time\ndef f(x):\n    {body}"
    assert by_inputs(REFERENCE, reference=reference).verdict == "judge_error"


@pytest.mark.parametrize("judge", ["inputs", "statements"])
@pytest.mark.parametrize("name", covering(5, SLOW))
def test_time_is_bounded_asleep_or_not(name: str, judge: str) -> None:
    outcome = JUDGES[judge](f"{REFERENCE}\n{SLOW[name]}\n")
    assert outcome.verdict == "timeout" and outcome.seconds < DRILL_S
