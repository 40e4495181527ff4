"""minigsm and minicode: deterministic, split by content, gold answers right.

Canonical programs are our own and run here; nothing a model wrote is executed.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import minicode, minigsm

COUNT = 1000


@pytest.fixture(scope="module")
def gsm_test() -> list[minigsm.Problem]:
    return list(minigsm.generate("test", COUNT))


@pytest.fixture(scope="module")
def code_test() -> list[minicode.Problem]:
    return list(minicode.generate("test", COUNT))


def test_minigsm_is_deterministic_and_extends(gsm_test: list[minigsm.Problem]) -> None:
    assert list(minigsm.generate("test", 50)) == gsm_test[:50]
    assert list(minigsm.generate("test", 50, seed=1)) != gsm_test[:50]


def test_minicode_is_deterministic_and_extends(code_test: list[minicode.Problem]) -> None:
    assert list(minicode.generate("test", 50)) == code_test[:50]


def test_ids_are_stable_and_distinct(
    gsm_test: list[minigsm.Problem], code_test: list[minicode.Problem]
) -> None:
    assert [p.task_id for p in gsm_test] == [f"minigsm/test/{i}" for i in range(COUNT)]
    assert [p.task_id for p in code_test] == [f"minicode/test/{i}" for i in range(COUNT)]
    assert len({p.question for p in gsm_test}) == COUNT
    assert len({p.prompt for p in code_test}) == COUNT


def test_minigsm_splits_share_no_problem(gsm_test: list[minigsm.Problem]) -> None:
    train = list(minigsm.generate("train", 2 * COUNT))
    assert {p.question for p in train}.isdisjoint(p.question for p in gsm_test)
    assert {p.steps for p in train}.isdisjoint(p.steps for p in gsm_test)


def test_minicode_splits_share_no_prompt(code_test: list[minicode.Problem]) -> None:
    train = {p.prompt for p in minicode.generate("train", 2 * COUNT)}
    assert train.isdisjoint(p.prompt for p in code_test)


def test_every_number_of_steps_occurs(gsm_test: list[minigsm.Problem]) -> None:
    counts = [sum(len(p.steps) == n for p in gsm_test) for n in range(1, minigsm.MAX_STEPS + 1)]
    assert min(counts) > COUNT / 10


def test_minigsm_arithmetic_is_right(gsm_test: list[minigsm.Problem]) -> None:
    for problem in gsm_test:
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", problem.answer)
        assert len(equations) == len(problem.steps)
        for left, op, right, result in equations:
            assert minigsm.apply_op(op, int(left), int(right)) == int(result)
        for before, after in itertools.pairwise(problem.steps):
            assert before.after == after.before
        assert problem.answer.endswith(f"\n#### {problem.result}")
        assert all(0 <= step.after <= minigsm.MAX_VALUE for step in problem.steps)


def test_canonical_solutions_pass_their_tests(code_test: list[minicode.Problem]) -> None:
    for problem in code_test:
        scope: dict[str, Any] = {}
        exec(problem.prompt + problem.canonical_solution + problem.test, scope)
        scope["check"](scope[problem.entry_point])
        inputs = problem.base_input + problem.plus_input
        results = {repr(scope[problem.entry_point](*args)) for args in inputs}
        assert len(results) >= minicode.MIN_DISTINCT_RESULTS


def test_minicode_has_the_evalplus_fields(code_test: list[minicode.Problem]) -> None:
    problem = code_test[0]
    assert problem.prompt.endswith('"""\n')
    assert problem.prompt.startswith("def ")
    assert problem.canonical_solution.startswith("    ")
    assert (len(problem.base_input), len(problem.plus_input)) == (4, 12)
    assert (problem.contract, problem.atol) == ("", 0.0)


@pytest.mark.parametrize("generate", [minigsm.generate, minicode.generate])
def test_unknown_split_is_a_sentence(generate: Any) -> None:
    with pytest.raises(ValueError, match="splits 'train' and 'test'"):
        next(generate("dev", 1))
