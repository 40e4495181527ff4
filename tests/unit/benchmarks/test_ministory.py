"""ministory: deterministic, split by content, gold answers right, wording free but kept.

Results are worked out again from the question's text alone; an answer is read sentence by sentence.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import minigsm, ministory
from dllm_bench.benchmarks.embedded.generated import GeneratedProblem, split_of
from scripts.embedded import tokenizer as embedded
from tests.benchmark_helpers import foreign, gold, lm_eval_benchmark, mean

COUNT = 1000
MAX_NEW_TOKENS = 224
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


def test_problems_are_the_same_for_a_seed(problems: list[GeneratedProblem]) -> None:
    assert list(ministory.TASK.problems("test", 50)) == problems[:50]
    assert list(ministory.TASK.problems("test", 50, seed=1)) != problems[:50]


def test_splits_share_no_problem(problems: list[GeneratedProblem]) -> None:
    train = list(ministory.TASK.problems("train", COUNT))
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


def test_texts_are_words_of_the_vocabulary(problems: list[GeneratedProblem]) -> None:
    tokenizer: Any = embedded.build_tokenizer()
    first_word = len(embedded.SPECIALS) + len(embedded.BYTES)
    sizes = []
    for problem in problems:
        prompt, answer = (tokenizer(t).input_ids for t in (problem.prompt, problem.continuation))
        assert prompt + answer == tokenizer(problem.prompt + problem.continuation).input_ids
        assert min(prompt + answer) >= first_word
        assert len(prompt) <= 80
        sizes.append(len(answer))
    assert max(sizes) < MAX_NEW_TOKENS
    assert set(sizes) == {113, 135, 157, 179, 201}


def test_gold_is_right_and_foreign_answers_are_not() -> None:
    benchmark = lm_eval_benchmark("ministory", limit=200)
    texts = gold(benchmark)
    assert mean(benchmark.score(texts)) == 1
    assert mean(benchmark.score(foreign(texts))) < 0.1
