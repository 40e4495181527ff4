"""LiveCodeBench code generation: OpenCompass's prompt; programs run on every test of the file.

A program that reads standard input runs once per test, and its output, without what it writes to
standard error, is compared line by line. A method of `Solution`, or a function of a program without
that class, runs on all tests in one child. A test may take six seconds. A file with public tests
only does not give a LiveCodeBench score; the ids of its items contain "public".
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from dllm_bench.benchmarks import sandbox
from dllm_bench.benchmarks.code_answers import livecodebench_code
from dllm_bench.benchmarks.sandbox import Limits
from dllm_bench.benchmarks.tasks import TEXTS, Doc, per_answer
from dllm_bench.benchmarks.tasks.code_scorers import verdict_metrics

TEST_S = 6
"""CPU seconds of a test, LiveCodeBench's own limit."""
LIMITS = Limits(
    cpu_s=TEST_S, wall_s=30.0, memory_mb=4096, file_mb=64, output_kb=8192, kept_kb=8192,
    packages=True,
)  # fmt: skip
WORDING = TEXTS["livecodebench"]
NAMES_OF = (*WORDING["modules"], "builtins", "typing")
PREAMBLE = "".join(f"from {module} import *\n" for module in NAMES_OF) + (
    f"import {', '.join(WORDING['modules'])}\nsys.setrecursionlimit(50000)\n"
)
"""What stands before a program, with the names and the limit of LiveCodeBench's own grader."""


def prompt(doc: Doc) -> str:
    """Return OpenCompass's prompt: question, format and the heading of the answer."""
    code = doc["starter_code"]
    task = WORDING["with_starter_code" if code else "with_stdin"]
    return (
        f"### Question:\n{doc['question']}\n\n### Format: {task}\n"
        f"```python\n{code or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )


first_fenced = per_answer(lambda text, doc: livecodebench_code(text, last=False))
"""The first fenced block (OpenCompass's version 1)."""
last_fenced = per_answer(lambda text, doc: livecodebench_code(text, last=True))
"""The last fenced block (OpenCompass's version 2)."""


def score(doc: Doc, results: list[str]) -> dict[str, float]:
    """Grade as right if all tests pass."""
    return verdict_metrics(_verdict(results[0], doc["function"], doc["tests"]))


@lru_cache(maxsize=4096)
def _verdict(code: str, function: str, tests: str) -> str:
    cases: list[tuple[str, str]] = json.loads(tests)
    program = PREAMBLE + code
    if not code.strip():
        return "failed"
    if function:
        function = f"Solution.{function}" if "class Solution" in code else function
        return _method_verdict(program, function, cases)
    verdicts = (_stdin_verdict(program, given, wanted) for given, wanted in cases)
    return next((verdict for verdict in verdicts if verdict != "passed"), "passed")


def _stdin_verdict(program: str, given: str, wanted: str) -> str:
    """Return the verdict of one run on standard input, which may end with `exit()`."""
    outcome = sandbox.execute(program, LIMITS, given)
    ended = outcome.verdict == "ended" or outcome.detail.startswith("SystemExit")
    if not ended:
        return outcome.verdict
    return "passed" if same_output(outcome.stdout, wanted) else "failed"


def same_output(printed: str, wanted: str) -> bool:
    """Return whether the lines are equal apart from outer white space and the form of numbers."""
    ours, theirs = (text.strip().split("\n") for text in (printed, wanted))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(one: str, other: str) -> bool:
    try:
        return one.strip() == other.strip() or _decimals(one) == _decimals(other)
    except InvalidOperation:  # a word that is no number, or a signalling NaN, which equals nothing
        return False


def _decimals(line: str) -> list[Decimal]:
    return [Decimal(word) for word in line.split()]


def _method_verdict(program: str, function: str, cases: list[tuple[str, str]]) -> str:
    """Return the verdict of all calls of a function or `Class.method`; an argument is a line of
    JSON."""
    stages = [
        ([json.loads(line) for line in given.split("\n")], json.loads(wanted))
        for given, wanted in cases
    ]
    asked = {
        "reference": None,
        "entry_point": function,
        "rule": "same_value",
        "min_time_s": float(TEST_S),
        "time_factor": 0.0,
    }
    examiner = sandbox.compare_calls({"tests": stages}, asked)
    limits = Limits(cpu_s=TEST_S * (len(cases) + 1), wall_s=180.0, memory_mb=4096, packages=True)
    return sandbox.examine(program, examiner, limits).verdict
