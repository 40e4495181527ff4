"""minicode_free: chains of minicode whose numbers must be computed, with many right solutions.

A docstring names three steps on the arguments. Most operands are a sum, a difference or a product
of two numbers. The body works it out in a string of its own (`14 - 1 = 13.`), names it (`y = 14 -
1`), does both or neither. The form of each step, the name of the variable, the order of operands
and the last line are drawn, with unequal frequencies as in minigsm_free, so that most of what a
model is unsure of is wording, and a guessed number is a wrong program. The content that decides the
split is the chain, as in minicode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dllm_bench.benchmarks.embedded.generated import GeneratedTask, split_of
from dllm_bench.benchmarks.embedded.minicode import (
    CHAIN_OPS,
    CHAIN_WORDS,
    PARAMS,
    TEMPORARIES,
    MinicodeProgram,
    expression,
    problems_of,
)
from dllm_bench.benchmarks.embedded.minigsm import MAX_VALUE, apply_op

STEPS = 3
ARGUMENT_RATE = 0.2
"""How often a step's operand is an argument of the function."""
LARGEST = {"+": 60, "-": 60, "*": 9, "max": 60, "min": 99, "%": 9}
"""Operation of a step -> the largest operand."""
SMALL_RIGHT = {"+": (1, 20), "-": (1, 20), "*": (2, 5)}
"""Operation between the numbers of an operand -> range of its second number, as in minigsm."""
PLAIN = "{target} {use}\n"
FORMS: Mapping[str, int] = {
    '""" {sum} = {value}."""\n    {target} {use}\n': 30,
    "{other} = {sum}\n    {target} {use_other}\n": 26,
    '""" {sum} = {value}, {word}."""\n    {target} {use}\n': 12,
    '""" {sum} = {value}."""\n    {other} = {value}\n    {target} {use_other}\n': 12,
    '""" {sum}."""\n    {other} = {sum}\n    {target} {use_other}\n': 10,
    PLAIN: 10,
}
"""Form of a step -> how often it is drawn; steps on an argument have the form PLAIN."""
RETURN_RATE = 0.35
"""How often the last step is stored before it is returned."""


@dataclass(frozen=True)
class Operand:
    """What a step takes beside the value so far."""

    asked: str
    """As the docstring has it: a name, or two numbers and their operation."""
    value: str
    """Worked out."""


def draw_programs(split: str, rng: random.Random) -> Iterator[MinicodeProgram]:
    """Yield endless programs of one split."""
    while True:
        program = _draw(rng)
        if split_of(program.content) == split:
            yield program


TASK = GeneratedTask(
    "minicode_free", lambda rng, split: problems_of(draw_programs(split, rng), rng)
)


def _draw(rng: random.Random) -> MinicodeProgram:
    params = PARAMS[: rng.randint(1, 3)]
    steps = _steps(rng, params)
    while all(operand.asked == operand.value for _, operand in steps):  # nothing to work out
        steps = _steps(rng, params)
    content = f"free|{len(params)}|" + "|".join(f"{op}{operand.asked}" for op, operand in steps)
    return MinicodeProgram("chain", params, _doc(rng, params, steps), body(rng, steps), content)


def _steps(rng: random.Random, params: tuple[str, ...]) -> list[tuple[str, Operand]]:
    steps: list[tuple[str, Operand]] = []
    for _ in range(STEPS):
        op = rng.choice([o for o in CHAIN_OPS if not steps or o != steps[-1][0]])
        steps.append((op, _operand(rng, op, params)))
    return steps


def _operand(rng: random.Random, op: str, params: tuple[str, ...]) -> Operand:
    """Return an argument, or two numbers that give at least 2 and at most the largest operand."""
    if len(params) > 1 and op != "%" and rng.random() < ARGUMENT_RATE:
        name = rng.choice(params[1:])
        return Operand(name, name)
    while True:
        inner = rng.choice("+-*")
        left, right = rng.randint(1, MAX_VALUE), rng.randint(*SMALL_RIGHT[inner])
        value = apply_op(inner, left, right)
        if 2 <= value <= LARGEST[op]:
            return Operand(f"{left} {inner} {right}", str(value))


def _doc(rng: random.Random, params: tuple[str, ...], steps: list[tuple[str, Operand]]) -> str:
    """Return the docstring: sentences, or one sentence."""
    form = rng.randrange(2)
    words = [CHAIN_WORDS[op][form].format(operand.asked) for op, operand in steps]
    if form == 0:
        return " ".join([f"Start with {params[0]}.", *words])
    return ", ".join([f"Return {params[0]}", *words]) + "."


def body(rng: random.Random, steps: list[tuple[str, Operand]]) -> str:
    """Return one of the right programs for these steps, without its first line."""
    name, other = rng.sample(TEMPORARIES, 2)
    current, lines = PARAMS[0], []
    stored = rng.random() < RETURN_RATE
    for i, (op, operand) in enumerate(steps):
        last = i == len(steps) - 1 and not stored
        form = PLAIN
        if operand.asked != operand.value:
            form = rng.choices(list(FORMS), list(FORMS.values()))[0]
        line = form.format(
            target="return" if last else f"{name} =",
            use=expression(rng, op, current, operand.value),
            use_other=expression(rng, op, current, other),
            other=other,
            sum=operand.asked,
            value=operand.value,
            word=CHAIN_WORDS[op][1].format(operand.value),
        )
        lines.append(f"    {line}")
        current = name
    return "".join(lines) + (f"    return {name}\n" if stored else "")
