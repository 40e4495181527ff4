"""minicode_free: gold programs right, each written in many ways.

What a docstring asks for is worked out from its text alone, and what a gold program does from its
lines, without running it.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import minicode
from dllm_bench.benchmarks.embedded.generated import GeneratedProblem
from scripts.embedded import tokenizer as embedded

COUNT = 300
SUM = re.compile(r"(\d+) ([-+*]) (\d+)")


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
