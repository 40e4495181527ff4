"""minigsm_free: gold answers right, each step worded anew.

Results are worked out again from the question's text alone; an answer is read by its equations.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import minigsm, minigsm_free
from dllm_bench.benchmarks.embedded.generated import GeneratedProblem
from scripts.embedded import tokenizer as embedded
from tests.unit.benchmarks.test_ministory import results_of

COUNT = 300


@pytest.fixture(scope="module")
def problems() -> list[GeneratedProblem]:
    return list(minigsm_free.TASK.problems("test", COUNT))


def test_answers_are_worked_right(problems: list[GeneratedProblem]) -> None:
    for problem in problems:
        answer, results = problem.fields["answer"], results_of(problem.fields["question"])
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", answer)
        assert [int(left) for left, *_ in equations] == results[:-1]
        assert [int(result) for *_, result in equations] == results[1:]
        for left, op, right, result in equations:
            assert minigsm.apply_op(op, int(left), int(right)) == int(result)
        assert answer.endswith(f"\n#### {results[-1]}")
        stated = [int(n) for n in re.findall(r"(?:has|owns|are|is) (\d+)\b(?! [-+*])", answer)]
        assert set(stated) <= set(results)


def test_one_problem_has_many_right_answers_of_many_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer: Any = embedded.build_tokenizer()
    steps = minigsm.draw_steps(random.Random(0), 3)
    monkeypatch.setattr(minigsm_free, "draw_steps", lambda rng, count: steps)
    answers = {minigsm_free.draw(random.Random(seed)).continuation for seed in range(200)}
    assert len(answers) > 190
    assert len({answer.split("#### ")[1] for answer in answers}) == 1
    assert len({len(tokenizer(answer).input_ids) for answer in answers}) > 20
