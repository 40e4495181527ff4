"""ministory and minigsm_free: gold answers right, wording free; ministory's letter is kept.

Results are worked out again from the question's text alone; an answer is read by its equations.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import minigsm
from dllm_bench.benchmarks.embedded.generated import GeneratedTask
from scripts.embedded import tokenizer as embedded

COUNT = 300
OPS = {verb: op for op, verbs in minigsm.VERBS.items() for verb in verbs}
TASKS = [minigsm.STORY, minigsm.FREE]
both = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def results_of(question: str) -> list[int]:
    """Return what there is after each sentence of a question but the last."""
    results: list[int] = []
    for sentence in question.split(". ")[:-1]:
        (number,) = map(int, re.findall(r"\d+", sentence))
        ops = [OPS[word] for word in sentence.rstrip(".").split() if word in OPS]
        results.append(minigsm.apply_op(ops[0], results[-1], number) if ops else number)
    return results


@both
def test_answers_are_worked_right(task: GeneratedTask) -> None:
    for problem in task.problems("test", COUNT):
        answer, results = problem.fields["answer"], results_of(problem.fields["question"])
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", answer)
        assert [int(left) for left, *_ in equations] == results[:-1]
        assert [int(result) for *_, result in equations] == results[1:]
        for left, op, right, result in equations:
            assert minigsm.apply_op(op, int(left), int(right)) == int(result)
        assert answer.endswith(f"\n#### {results[-1]}")
        stated = [int(n) for n in re.findall(r"(?:has|owns|are|is) (\d+)\b(?! [-+*])", answer)]
        assert set(stated) <= set(results)


def test_the_letter_is_chosen_once_and_kept() -> None:
    problems = minigsm.STORY.problems("test", COUNT)
    letters = [set(re.findall(r"\b[abcrxy]\b", p.fields["answer"])) for p in problems]
    assert all(len(used) == 1 for used in letters)
    assert set().union(*letters) == set(minigsm.PARTS.letters)


@both
def test_one_problem_has_many_right_answers(
    task: GeneratedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one length in ministory, of many lengths in minigsm_free."""
    tokenizer: Any = embedded.build_tokenizer()
    steps = minigsm.draw_steps(random.Random(0), 3)
    monkeypatch.setattr(minigsm, "draw_steps", lambda rng, count: steps)
    draw = minigsm.draw_story if task is minigsm.STORY else minigsm.draw_free
    answers = {draw(random.Random(seed)).continuation for seed in range(200)}
    lengths = {len(tokenizer(answer).input_ids) for answer in answers}
    assert len({answer.split("#### ")[1] for answer in answers}) == 1
    if task is minigsm.STORY:
        assert (len(answers), len(lengths)) == (200, 1)
    else:
        assert len(answers) > 190 and len(lengths) > 20
