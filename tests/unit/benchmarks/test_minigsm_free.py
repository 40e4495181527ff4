"""minigsm_free: deterministic, split by content, gold answers right, each step worded anew.

Results are worked out again from the question's text alone; an answer is read by its equations.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import minigsm, minigsm_free
from dllm_bench.benchmarks.embedded.generated import GeneratedProblem, split_of
from scripts.embedded import tokenizer as embedded
from tests.benchmark_helpers import foreign, gold, lm_eval_benchmark, mean
from tests.unit.benchmarks.test_ministory import results_of

COUNT = 1000
MAX_NEW_TOKENS = 96


@pytest.fixture(scope="module")
def problems() -> list[GeneratedProblem]:
    return list(minigsm_free.TASK.problems("test", COUNT))


def test_problems_are_the_same_for_a_seed(problems: list[GeneratedProblem]) -> None:
    assert list(minigsm_free.TASK.problems("test", 50)) == problems[:50]
    assert list(minigsm_free.TASK.problems("test", 50, seed=1)) != problems[:50]


def test_splits_share_no_problem(problems: list[GeneratedProblem]) -> None:
    train = list(minigsm_free.TASK.problems("train", COUNT))
    assert {p.content for p in train}.isdisjoint(p.content for p in problems)
    assert all(split_of(p.content) == "train" for p in train)


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


def test_texts_are_words_of_the_vocabulary(problems: list[GeneratedProblem]) -> None:
    tokenizer: Any = embedded.build_tokenizer()
    first_word = len(embedded.SPECIALS) + len(embedded.BYTES)
    for problem in problems:
        prompt, answer = (tokenizer(t).input_ids for t in (problem.prompt, problem.continuation))
        assert prompt + answer == tokenizer(problem.prompt + problem.continuation).input_ids
        assert min(prompt + answer) >= first_word
        assert len(prompt) <= 64
        assert len(answer) < MAX_NEW_TOKENS


def test_gold_is_right_and_foreign_answers_are_not() -> None:
    benchmark = lm_eval_benchmark("minigsm_free", limit=200)
    texts = gold(benchmark)
    assert mean(benchmark.score(texts)) == 1
    assert mean(benchmark.score(foreign(texts))) < 0.1
