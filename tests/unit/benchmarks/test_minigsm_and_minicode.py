"""minigsm and minicode: gold answers right.

Canonical programs are our own and run here; nothing a model wrote is executed.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import minicode, minigsm
from dllm_bench.benchmarks.embedded.generated import GeneratedProblem

COUNT = 300
VERB = "|".join(verb for verbs in minigsm.VERBS.values() for verb in verbs)


@pytest.fixture(scope="module")
def gsm_test() -> list[GeneratedProblem]:
    return list(minigsm.TASK.problems("test", COUNT))


@pytest.fixture(scope="module")
def code_test() -> list[GeneratedProblem]:
    return list(minicode.TASK.problems("test", COUNT))


def test_minigsm_arithmetic_is_right(gsm_test: list[GeneratedProblem]) -> None:
    for problem in gsm_test:
        answer = problem.fields["answer"]
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", answer)
        start, *steps = problem.content.split("|")
        assert [verb for verb, _ in (step.split(":") for step in steps)] == re.findall(VERB, answer)
        assert len(equations) == len(steps)
        before = start
        for (left, op, right, result), step in zip(equations, steps, strict=True):
            operands = (before, step.split(":")[1])
            assert (left, right) in {operands, operands if op == "-" else operands[::-1]}
            assert minigsm.apply_op(op, int(left), int(right)) == int(result)
            assert 0 <= int(result) <= minigsm.MAX_VALUE
            before = result
        assert answer.endswith(f"\n#### {before}")


def test_canonical_solutions_pass_their_tests(code_test: list[GeneratedProblem]) -> None:
    for problem in code_test:
        scope: dict[str, Any] = {}
        item = problem.fields
        assert problem.continuation == item["canonical_solution"]
        exec(problem.prompt + item["canonical_solution"] + item["test"], scope)
        scope["check"](scope[item["entry_point"]])
        inputs = item["base_input"] + item["plus_input"]
        results = {repr(scope[item["entry_point"]](*args)) for args in inputs}
        assert len(results) >= minicode.MIN_DISTINCT_RESULTS
