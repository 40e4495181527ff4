"""LiveCodeBench code generation: OpenCompass's prompt, programs run on every test of the file.

Programs that read standard input run once per test and what they print is compared here, line by
line; methods of `Solution` run in one child on all tests. A test may take six seconds. Files with
public tests only give no LiveCodeBench score, and the ids say so.
"""

from __future__ import annotations

import json
import marshal
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from dllm_bench.benchmarks import code_answers
from dllm_bench.benchmarks.sandbox import execution as sandbox
from dllm_bench.benchmarks.tasks.code_scorers import each, verdicts

Doc = dict[str, Any]
TEST_S = 6  # LiveCodeBench's own limit
LIMITS = sandbox.Limits(
    cpu_s=TEST_S, wall_s=30.0, memory_mb=4096, file_mb=64, output_kb=8192, kept_kb=8192,
    packages=True,
)  # fmt: skip
GIVEN = "You will use the following starter code to write the solution to the problem and enclose "
READ = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows."
)
IMPORTS = """\
import bisect, collections, copy, datetime, functools, heapq, io, itertools, math, operator
import random, re, statistics, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
sys.setrecursionlimit(50000)
"""
"""What a solution may use without importing it, as on the sites the problems come from."""


def prompt(doc: Doc) -> str:
    """Question, format and the opening of the answer."""
    code = doc["starter_code"]
    told = f"{GIVEN}your code within delimiters." if code else READ
    return (
        f"### Question:\n{doc['question']}\n\n### Format: {told}\n"
        f"```python\n{code or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )


def first_fenced(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """Version 1: the first fenced block."""
    return each(resps, docs, lambda text, doc: code_answers.fenced(text, last=False))


def last_fenced(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """Version 2: the last fenced block."""
    return each(resps, docs, lambda text, doc: code_answers.fenced(text, last=True))


def score(doc: Doc, results: list[str]) -> dict[str, float]:
    """All tests must pass."""
    return verdicts(_verdict(results[0], doc["function"], doc["tests"]))


@lru_cache(maxsize=4096)
def _verdict(code: str, function: str, tests: str) -> str:
    cases: list[tuple[str, str]] = json.loads(tests)
    program = IMPORTS + code
    if not code.strip():
        return "failed"
    if function:
        return _method(program, function, cases)
    found = (_printed(program, given, wanted) for given, wanted in cases)
    return next((verdict for verdict in found if verdict != "passed"), "passed")


def _printed(program: str, given: str, wanted: str) -> str:
    """The verdict of one run on standard input; `exit()` is a usual end there."""
    outcome = sandbox.execute(program, limits=LIMITS, stdin=given)
    ended = outcome.verdict == "passed" or outcome.detail.startswith("SystemExit")
    if not ended:
        return outcome.verdict
    return "passed" if same_output(outcome.stdout, wanted) else "failed"


def same_output(printed: str, wanted: str) -> bool:
    """The same lines but for outer white space; numbers of a line count by their value."""
    found, right = (text.strip().split("\n") for text in (printed, wanted))
    return len(found) == len(right) and all(map(_same_line, found, right))


def _same_line(one: str, other: str) -> bool:
    if one.strip() == other.strip():
        return True
    values = _decimals(one), _decimals(other)
    return None not in values and values[0] == values[1]


def _decimals(line: str) -> list[Decimal] | None:
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None


def _method(program: str, function: str, cases: list[tuple[str, str]]) -> str:
    """The verdict of all calls; an argument is a line of JSON."""
    stages = [
        ([json.loads(line) for line in given.split("\n")], json.loads(wanted))
        for given, wanted in cases
    ]
    payload = {
        "solution": program.encode(errors="replace"),
        "reference": None,
        "entry_point": f"Solution.{function}",
        "stages": marshal.dumps({"tests": stages}),
        "rule": "same_value",
        "atol": 0.0,
        "min_time_s": float(TEST_S),
        "time_factor": 0.0,
    }
    limits = sandbox.Limits(
        cpu_s=TEST_S * (len(cases) + 1), wall_s=180.0, memory_mb=4096, packages=True
    )
    outcome = sandbox.execute(sandbox.harness("check_function"), payload, limits)
    verdict = {words[0]: words[1] for words in outcome.reports if len(words) > 1}
    return verdict.get("tests") or verdict.get("load") or outcome.verdict
