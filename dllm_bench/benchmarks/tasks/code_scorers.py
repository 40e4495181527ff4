"""Filters and graders of the HumanEval and MBPP tasks: answer -> program, program -> metrics.

A filter is one way to read an answer: `completion` takes the text as it is, `extracted` takes a
fenced block and drops an end that does not parse, `lopa` and `opencompass` are the published ones.
Programs run in the sandbox only. The caller makes sure of consent: our benchmark, or lm-eval with
`confirm_run_unsafe_code`. The item's own solution runs first and decides how much time a program
gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dllm_bench.benchmarks import code_answers
from dllm_bench.benchmarks.sandbox import execution as sandbox
from dllm_bench.benchmarks.sandbox.limits import Limits

Doc = dict[str, Any]
"""An item as lm-eval passes it."""
LIMITS = Limits(cpu_s=5, wall_s=30.0, memory_mb=4096, packages=True)
"""A program gets 5 CPU seconds; HumanEval's own harness allows 3 s of wall time."""
TIME_FACTOR = 4
"""A program gets at least this many times the reference's CPU time, as in EvalPlus 0.3.1."""
CRASHES = ("crashed", "memory", "refused")


def humaneval_completion(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval: prompt + answer."""
    return map_answers(resps, docs, lambda text, doc: doc["prompt"] + text)


def humaneval_extracted(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval: prompt + code of the answer, without an end that does not parse."""

    def program(text: str, doc: Doc) -> str:
        whole = code_answers.assemble_program(doc["prompt"], text)
        return code_answers.trim_unparsable_end(whole, keep=doc["prompt"].count("\n"))

    return map_answers(resps, docs, program)


def humaneval_lopa(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval as LoPA reads it: prompt + fenced code, sanitised."""

    def program(text: str, doc: Doc) -> str:
        whole = code_answers.lopa_program(doc["prompt"], text)
        return code_answers.lopa_sanitize(whole, doc["entry_point"])

    return map_answers(resps, docs, program)


def humaneval_opencompass(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval as OpenCompass reads it: prompt + first fenced block."""

    def program(text: str, doc: Doc) -> str:
        return str(doc["prompt"]) + code_answers.opencompass_code(text)

    return map_answers(resps, docs, program)


def mbpp_extracted(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """MBPP: code of the answer, without an end that does not parse."""

    def program(text: str, doc: Doc) -> str:
        return code_answers.trim_unparsable_end(code_answers.extract_code(text))

    return map_answers(resps, docs, program)


def map_answers(
    resps: list[list[str]], docs: list[Doc], program: Callable[[str, Doc], str]
) -> list[list[str]]:
    """Apply `program` to every answer; `resps` and `docs` are what lm-eval passes to a filter."""
    return [[program(text, doc) for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def grade_humaneval(doc: Doc, results: list[str]) -> dict[str, float]:
    """Right if the item's own `check` returns."""
    test = f"\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return _grade(results[0] + test, doc["prompt"] + doc["canonical_solution"] + test)


def grade_mbpp(doc: Doc, results: list[str]) -> dict[str, float]:
    """Right if all assertions hold; the item's set-up code may use what the answer defines."""
    tests = "\n".join(doc["test_list"])
    program, reference = (
        f"{code}\n{doc['test_setup_code']}\n{tests}\n" for code in (results[0], doc["code"])
    )
    return _grade(program, reference)


def _grade(program: str, reference: str) -> dict[str, float]:
    """Metrics of a program whose time limit depends on its reference solution."""
    return verdict_metrics(verdict_of(program, allowed_cpu_s(reference)))


def verdict_metrics(verdict: str) -> dict[str, float]:
    """The metrics of a code task for a verdict of the sandbox."""
    return {
        "pass@1": float(verdict == "passed"),
        "timeout": float(verdict == "timeout"),
        "crashed": float(verdict in CRASHES),
    }


@lru_cache(maxsize=4096)
def allowed_cpu_s(reference: str) -> int:
    """CPU seconds for a program: those of LIMITS, or more where the reference itself is slow."""
    outcome = sandbox.execute(reference, limits=replace(LIMITS, cpu_s=6 * LIMITS.cpu_s))
    return max(LIMITS.cpu_s, math.ceil(TIME_FACTOR * outcome.cpu_s))


@lru_cache(maxsize=4096)
def verdict_of(program: str, cpu_s: int = LIMITS.cpu_s) -> str:
    """The sandbox's verdict, cached because filters often give the same program."""
    limits = replace(LIMITS, cpu_s=cpu_s, wall_s=max(LIMITS.wall_s, 2.0 * cpu_s))
    return sandbox.execute(program, limits=limits).verdict
