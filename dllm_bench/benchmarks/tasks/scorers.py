"""Filters and graders the code tasks name: answer -> program, program -> pass or not.

Programs run in `benchmarks.sandbox` only; consent is asked for by whoever calls (our benchmark, or
lm-eval's own `confirm_run_unsafe_code`). Two readings of an answer, as two filters: `completion`
takes the text as it is, `extracted` takes a fenced block and drops a tail that does not parse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from dllm_bench.benchmarks import programs, sandbox

Doc = dict[str, Any]
LIMITS = sandbox.Limits(cpu_s=5, wall_s=30.0, memory_mb=4096, packages=True)
"""5 CPU seconds a program; HumanEval's own harness allows 3 s of wall time."""


def completed(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval: prompt + answer."""
    return _each(resps, docs, lambda text, doc: doc["prompt"] + text)


def completed_extracted(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """HumanEval: prompt + code of the answer, without a tail that does not parse."""

    def program(text: str, doc: Doc) -> str:
        return programs.trimmed(programs.assemble(doc["prompt"], text), doc["prompt"].count("\n"))

    return _each(resps, docs, program)


def extracted(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
    """MBPP: code of the answer, without a tail that does not parse."""
    return _each(resps, docs, lambda text, doc: programs.trimmed(programs.code_of(text)))


def _each(
    resps: list[list[str]], docs: list[Doc], program: Callable[[str, Doc], str]
) -> list[list[str]]:
    return [[program(text, doc) for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def humaneval(doc: Doc, results: list[str]) -> dict[str, float]:
    """The item's own `check` must return."""
    return _grade(f"{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n")


def mbpp(doc: Doc, results: list[str]) -> dict[str, float]:
    """All assertions must hold, after the item's set-up code."""
    tests = "\n".join(doc["test_list"])
    return _grade(f"{doc['test_setup_code']}\n{results[0]}\n{tests}\n")


def _grade(program: str) -> dict[str, float]:
    verdict = run(program)
    return {"pass@1": float(verdict == "passed"), "timeout": float(verdict == "timeout")}


@lru_cache(maxsize=4096)
def run(program: str) -> str:
    """The sandbox's verdict; the two filters often give the same program."""
    return sandbox.execute(program, limits=LIMITS).verdict
