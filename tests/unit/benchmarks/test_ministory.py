"""ministory: gold answers right, wording free but kept.

Results are worked out again from the question's text alone; an answer is read sentence by sentence.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import minigsm, ministory
from dllm_bench.benchmarks.embedded.generated import GeneratedProblem
from scripts.embedded import tokenizer as embedded

COUNT = 300
OPS = {verb: op for op, verbs in minigsm.VERBS.items() for verb in verbs}


@pytest.fixture(scope="module")
def problems() -> list[GeneratedProblem]:
    return list(ministory.TASK.problems("test", COUNT))


def results_of(question: str) -> list[int]:
    """What there is after each sentence of a question but the last."""
    results: list[int] = []
    for sentence in question.split(". ")[:-1]:
        (number,) = map(int, re.findall(r"\d+", sentence))
        ops = [OPS[word] for word in sentence.rstrip(".").split() if word in OPS]
        results.append(minigsm.apply_op(ops[0], results[-1], number) if ops else number)
    return results


def test_answers_are_worked_right(problems: list[GeneratedProblem]) -> None:
    for problem in problems:
        answer, results = problem.fields["answer"], results_of(problem.fields["question"])
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", answer)
        assert [int(left) for left, *_ in equations] == results[:-1]
        assert [int(result) for *_, result in equations] == results[1:]
        for left, op, right, result in equations:
            assert minigsm.apply_op(op, int(left), int(right)) == int(result)
        assert answer.endswith(f"\n#### {results[-1]}")


def test_the_letter_is_chosen_once_and_kept(problems: list[GeneratedProblem]) -> None:
    letters = [set(re.findall(r"\b[abcrxy]\b", p.fields["answer"])) for p in problems]
    assert all(len(used) == 1 for used in letters)
    assert set().union(*letters) == set(ministory.LETTERS)


def test_one_problem_has_many_right_answers_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = embedded.build_tokenizer()
    steps = minigsm.draw_steps(random.Random(0), 3)
    monkeypatch.setattr(ministory, "draw_steps", lambda rng, count: steps)
    answers = [ministory.draw(random.Random(seed)).continuation for seed in range(200)]
    assert len(set(answers)) == len(answers)
    assert len({answer.split("#### ")[1] for answer in answers}) == 1
    assert len({len(tokenizer(answer).input_ids) for answer in answers}) == 1
