"""Filters and graders the code tasks name: answer -> program, program -> pass or not.

Programs run in `benchmarks.sandbox` only; consent is asked for by whoever calls (our benchmark, or
lm-eval's own `confirm_run_unsafe_code`). Readings of an answer are filters: `completion` takes the
text as it is, `extracted` takes a fenced block and drops a tail that does not parse, `lopa` and
`opencompass` are the published ones. The item's own solution runs first and sets the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dllm_bench.benchmarks import code_answers
from dllm_bench.benchmarks.sandbox import execution as sandbox

Doc = dict[str, Any]
LIMITS = sandbox.Limits(cpu_s=5, wall_s=30.0, memory_mb=4096, packages=True)
"""5 CPU seconds a program; HumanEval's own harness allows 3 s of wall time."""
TIME_FACTOR = 4  # of the reference's CPU time, EvalPlus 0.3.1's factor
CRASHES = ("crashed", "memory", "refused")


def completed(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval: prompt + answer."""
    return each(resps, docs, lambda text, doc: doc["prompt"] + text)


def completed_extracted(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval: prompt + code of the answer, without a tail that does not parse."""

    def program(text: str, doc: Doc) -> str:
        return code_answers.trimmed(
            code_answers.assemble(doc["prompt"], text), doc["prompt"].count("\n")
        )

    return each(resps, docs, program)


def lopa(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval as LoPA reads it: fenced code behind the prompt, sanitised."""

    def program(text: str, doc: Doc) -> str:
        return code_answers.lopa_sanitized(
            code_answers.lopa_code(doc["prompt"], text), doc["entry_point"]
        )

    return each(resps, docs, program)


def first_block(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval as OpenCompass reads it: prompt + first fenced block."""
    return each(resps, docs, lambda text, doc: doc["prompt"] + code_answers.first_block(text))


def extracted(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """MBPP: code of the answer, without a tail that does not parse."""
    return each(resps, docs, lambda text, doc: code_answers.trimmed(code_answers.code_of(text)))


def each(
    resps: list[list[str]], docs: list[Doc], program: Callable[[str, Doc], str]
) -> list[list[str]]:
    """What `program` makes of every answer."""
    return [[program(text, doc) for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def humaneval(doc: Doc, results: list[str]) -> dict[str, float]:
    """The item's own `check` must return."""
    test = f"\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return _grade(results[0] + test, doc["prompt"] + doc["canonical_solution"] + test)


def mbpp(doc: Doc, results: list[str]) -> dict[str, float]:
    """All assertions must hold; the item's set-up code may use what the answer defines."""
    tests = "\n".join(doc["test_list"])
    program, reference = (
        f"{code}\n{doc['test_setup_code']}\n{tests}\n" for code in (results[0], doc["code"])
    )
    return _grade(program, reference)


def _grade(program: str, reference: str) -> dict[str, float]:
    """A program may take what its reference solution sets."""
    return verdicts(run(program, allowed_s(reference)))


def verdicts(verdict: str) -> dict[str, float]:
    """The metrics of a code task."""
    return {
        "pass@1": float(verdict == "passed"),
        "timeout": float(verdict == "timeout"),
        "crashed": float(verdict in CRASHES),
    }


@lru_cache(maxsize=4096)
def allowed_s(reference: str) -> int:
    """CPU seconds for a program: the usual ones, or more where the reference itself is slow."""
    outcome = sandbox.execute(reference, limits=replace(LIMITS, cpu_s=6 * LIMITS.cpu_s))
    return max(LIMITS.cpu_s, math.ceil(TIME_FACTOR * outcome.cpu_s))


@lru_cache(maxsize=4096)
def run(program: str, cpu_s: int = LIMITS.cpu_s) -> str:
    """The sandbox's verdict; filters often give the same program."""
    limits = replace(LIMITS, cpu_s=cpu_s, wall_s=max(LIMITS.wall_s, 2.0 * cpu_s))
    return sandbox.execute(program, limits=limits).verdict
