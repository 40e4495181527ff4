"""Word problems and minicode: gold answers right, wording free; ministory's letter is kept.

Results are worked out again from the question's text alone; an answer is read by its equations.
What a program of minicode_free does is read from its lines, without running it.
Canonical programs are our own and run here; nothing a model wrote is executed.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask
from scripts.embedded import tokenizer as embedded
from scripts.embedded.tasks import minicode, minigsm

COUNT = 300
SUM = re.compile(r"(\d+) ([-+*]) (\d+)")
OPS = {verb: op for op, verbs in minigsm.VERBS.items() for verb in verbs}
TASKS = [minigsm.STORY, minigsm.FREE]
both = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
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


# --- minicode_free --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problems() -> list[GeneratedProblem]:
    return list(minicode.FREE.problems("test", COUNT))


def worked_out(text: str) -> str:
    """Return the text with every sum, difference and product of two numbers in place of its
    value."""
    values = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    return SUM.sub(lambda m: str(values[m[2]](int(m[1]), int(m[3]))), text)


def asked(problem: GeneratedProblem) -> list[tuple[str, str]]:
    """Operations and operands of the docstring, worked out."""
    text = worked_out(problem.prompt.split('"""')[1])
    found, form = [], 0 if text.startswith("Start") else 1
    for op, forms in minicode.WORDS.chain.items():
        pattern = forms[form].replace("{0}", r"(\w+)").replace(".", "")
        found += [(m.start(), op, m[1]) for m in re.finditer(pattern, text)]
    return [(op, operand) for _, op, operand in sorted(found)]


def done(problem: GeneratedProblem) -> list[tuple[str, str]]:
    """Operations and operands of the gold program, names that stand for numbers filled in."""
    numbers: dict[str, str] = {}
    current, steps = "a", []
    for line in worked_out(problem.continuation).splitlines():
        found = re.fullmatch(r"    (?:return|(\w) =) (.*)", line)
        if found is None:
            assert line.startswith('    """')
            continue
        target, value = found.groups()
        if value.isdigit():
            numbers[target] = value
            continue
        call = re.fullmatch(r"(max|min)\((\w+), (\w+)\)|(\w+) ([-+*%]) (\w+)", value)
        if call is None:
            assert value == current
            continue
        left, op, right = call[2] or call[4], call[1] or call[5], call[3] or call[6]
        if right == current and left != current and op in "+*":
            left, right = right, left
        assert left == current
        steps.append((op, numbers.get(right, right)))
        current = target
    return steps


def test_gold_programs_do_what_is_asked(problems: list[GeneratedProblem]) -> None:
    for problem in problems:
        steps = asked(problem)
        assert len(steps) == minicode.FREE_STEPS
        assert done(problem) == steps, problem.prompt + problem.continuation
        stated = re.findall(r"(\d+ [-+*] \d+) = (\d+)", problem.continuation)
        assert all(worked_out(sum_) == value for sum_, value in stated)


def test_one_problem_has_many_right_programs_of_many_lengths() -> None:
    tokenizer: Any = embedded.build_tokenizer()
    steps = [
        ("+", minicode.Operand("4 * 6", "24")),
        ("*", minicode.Operand("9 - 2", "7")),
        ("min", minicode.Operand("30 + 12", "42")),
    ]
    bodies = {minicode.free_body(random.Random(seed), steps) for seed in range(200)}
    assert len(bodies) > 150
    assert len({len(tokenizer(body).input_ids) for body in bodies}) > 20
