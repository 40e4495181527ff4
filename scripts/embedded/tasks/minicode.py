"""minicode and minicode_free: a docstring to turn into a small function, with HumanEval+'s fields.

minicode has three families of programs: a chain of arithmetic on the arguments, one comparison with
two returns, and a list that is filtered, mapped and reduced. Every docstring has two wordings, and
the variable name and the order of operands of a solution are drawn, so a prompt has several right
answers and only tests can grade them. The content that decides the split leaves out the wording and
the names of function and variables. Programs written by a model are not run here.

minicode_free has chains whose numbers must be computed, with many right solutions. A docstring
names three steps on the arguments. Most operands are a sum, a difference or a product of two
numbers. The body works it out in a string of its own (`14 - 1 = 13.`), names it (`y = 14 - 1`),
does both or neither. The form of each step, the name of the variable, the order of operands and the
last line are drawn, with unequal frequencies as in minigsm_free, so that most of what a model is
unsure of is wording, and a guessed number is a wrong program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask
from scripts.embedded.tasks import from_draw
from scripts.embedded.tasks.minigsm import MAX_VALUE, WORDING, apply_op

WORDS = SimpleNamespace(**WORDING["minicode"])
PARAMS = ("a", "b", "c")
TEMPORARIES = ("x", "y", "r")
SWAP_RATE = 0.15
"""How often the operands of an addition or a multiplication change places."""
BASE_INPUTS, PLUS_INPUTS = 4, 12
"""Argument lists of the two test sets."""
MIN_DISTINCT_RESULTS = 3
"""A problem with fewer different results over its inputs is dropped as too easy to guess."""

CHAIN_OPS = ("+", "-", "*", "max", "min", "%")
StepOperand = TypeVar("StepOperand")  # operand of a step


@dataclass(frozen=True)
class MinicodeProgram:
    """A drawn program, without the name of its function."""

    family: str
    """`chain`, `branch` or `list`."""
    params: tuple[str, ...]
    """Names of the arguments."""
    doc: str
    """Text of the docstring."""
    body: str
    """The code below the docstring; ends in a newline."""
    content: str
    """What the program does, without wording and names; decides the split."""


def problems_of(
    programs: Iterator[MinicodeProgram], rng: random.Random
) -> Iterator[GeneratedProblem]:
    """Yield a problem of each program, with the fields of EvalPlus's HumanEval+ except `task_id`;
    those whose results hardly differ are left out.
    """
    for program in programs:
        entry_point = rng.choice(WORDS.entry_points)
        prompt = prompt_of(program, entry_point)
        inputs = draw_inputs(rng, program)
        results = _results(prompt + program.body, entry_point, inputs)
        if len({repr(r) for r in results}) < MIN_DISTINCT_RESULTS:
            continue
        base_inputs = inputs[:BASE_INPUTS]
        fields = {
            "prompt": prompt,
            "entry_point": entry_point,
            "canonical_solution": program.body,
            "base_input": base_inputs,
            "plus_input": inputs[BASE_INPUTS:],
            "test": _check_function(base_inputs, results),
            "contract": "",
            "atol": 0.0,
        }
        yield GeneratedProblem(program.content, prompt, program.body, fields)


def _draw(rng: random.Random) -> MinicodeProgram:
    """Return a program of one of the three families, in the proportions 5 : 2 : 3."""
    return rng.choices((_draw_chain, _draw_branch, _draw_list), (5, 2, 3))[0](rng)


PROGRAMS = from_draw(_draw)
"""(random stream, split) -> endless programs."""
TASK = GeneratedTask("minicode", lambda rng, split: problems_of(PROGRAMS(rng, split), rng))


def prompt_of(program: MinicodeProgram, entry_point: str) -> str:
    """Return the def line and the docstring; ends after the docstring's newline, as in
    HumanEval."""
    head = f"def {entry_point}({', '.join(program.params)}):\n"
    return head + f'    """{program.doc}\n    """\n'


def _operand(rng: random.Random, op: str, params: tuple[str, ...]) -> str:
    if op == "%":
        return str(rng.randint(2, 9))
    if op == "*":
        return rng.choice((*params[1:], str(rng.randint(2, 9))))
    return rng.choice((*params[1:], str(rng.randint(1, 20))))


def expression(rng: random.Random, op: str, left: str, right: str) -> str:
    """Return one operation; operands of a sum or a product may change places."""
    if op in ("+", "*") and rng.random() < SWAP_RATE:
        left, right = right, left
    return f"{op}({left}, {right})" if op in ("max", "min") else f"{left} {op} {right}"


def _chain(
    rng: random.Random, count: int, operand: Callable[[random.Random, str], StepOperand]
) -> list[tuple[str, StepOperand]]:
    """Draw steps of a chain, (operation, operand); no operation follows itself."""
    steps: list[tuple[str, StepOperand]] = []
    for _ in range(count):
        op = rng.choice([o for o in CHAIN_OPS if not steps or o != steps[-1][0]])
        steps.append((op, operand(rng, op)))
    return steps


def _chain_doc(form: int, start: str, steps: Sequence[tuple[str, str]]) -> str:
    """Return the docstring of a chain: sentences (form 0), or one sentence."""
    words = [WORDS.chain[op][form].format(operand) for op, operand in steps]
    if form == 0:
        return " ".join([f"Start with {start}.", *words])
    return ", ".join([f"Return {start}", *words]) + "."


def _draw_chain(rng: random.Random) -> MinicodeProgram:
    params = PARAMS[: rng.randint(1, 3)]
    steps = _chain(rng, rng.randint(2, 4), lambda rng, op: _operand(rng, op, params))
    name, current, lines = rng.choice(TEMPORARIES), params[0], []
    for i, (op, operand) in enumerate(steps):
        target = "return" if i == len(steps) - 1 else f"{name} ="
        lines.append(f"    {target} {expression(rng, op, current, operand)}\n")
        current = name
    doc = _chain_doc(int(rng.random() >= 0.5), params[0], steps)
    content = f"chain|{len(params)}|" + "|".join(f"{o}{v}" for o, v in steps)
    return MinicodeProgram("chain", params, doc, "".join(lines), content)


def _draw_branch(rng: random.Random) -> MinicodeProgram:
    params = PARAMS[: rng.randint(1, 3)]
    compare, left = rng.choice(list(WORDS.compare)), rng.choice(params)
    right = rng.choice([*(p for p in params if p != left), str(rng.randint(1, 20))])
    arms = []
    for _ in range(2):
        op, first = rng.choice("+-*"), rng.choice(params)
        arms.append((op, first, _operand(rng, op, params)))
    words = [f"{first} {WORDS.chain[op][1].format(v)}" for op, first, v in arms]
    code = [expression(rng, op, first, v) for op, first, v in arms]
    test = f"{left} is {WORDS.compare[compare]} {right}"
    if rng.random() < 0.5:
        doc = f"If {test} return {words[0]}, otherwise return {words[1]}."
    else:
        doc = f"Return {words[0]} when {test}, else {words[1]}."
    body = f"    if {left} {compare} {right}:\n        return {code[0]}\n    return {code[1]}\n"
    return MinicodeProgram("branch", params, doc, body, f"branch|{len(params)}|{test}|{arms}")


def _draw_list(rng: random.Random) -> MinicodeProgram:
    keep = (rng.choice("><"), rng.randint(1, 20)) if rng.random() < 0.5 else None
    change = (rng.choice("+-*"), rng.randint(2, 20)) if rng.random() < 0.7 or not keep else None
    reduce = rng.choice(list(WORDS.reduce) if not keep else ["sum", "len"])
    after = (rng.choice("+-*"), rng.randint(2, 20)) if rng.random() < 0.6 else None
    item, name, source, lines = "x", rng.choice(("ys", "zs")), "xs", []
    if keep:
        lines.append(
            f"    {name} = [{item} for {item} in {source} if {item} {keep[0]} {keep[1]}]\n"
        )
        source = name
    if change:
        value = f"{item} {change[0]} {change[1]}"
        lines.append(f"    {name} = [{value} for {item} in {source}]\n")
        source = name
    tail = f" {after[0]} {after[1]}" if after else ""
    lines.append(f"    return {reduce}({source}){tail}\n")
    doc = _list_doc(rng, keep, change, reduce, after)
    return MinicodeProgram(
        "list", ("xs",), doc, "".join(lines), f"list|{keep}|{change}|{reduce}|{after}"
    )


def _list_doc(
    rng: random.Random,
    keep: tuple[str, int] | None,
    change: tuple[str, int] | None,
    reduce: str,
    after: tuple[str, int] | None,
) -> str:
    form = rng.randrange(2)
    tail = f" {WORDS.chain[after[0]][1].format(after[1])}" if after else ""
    if form == 0:
        parts = [f"Keep items {WORDS.compare[keep[0]]} {keep[1]}."] if keep else []
        parts += (
            [f"Change each item to item {WORDS.chain[change[0]][1].format(change[1])}."]
            if change
            else []
        )
        return " ".join([*parts, f"Return the {WORDS.reduce[reduce]}{tail}."])
    doc = f"Return the {WORDS.reduce[reduce]}{tail} of"
    doc += f" item {WORDS.chain[change[0]][1].format(change[1])} for" if change else ""
    return doc + " items" + (f" {WORDS.compare[keep[0]]} {keep[1]}" if keep else "") + " in xs."


def draw_inputs(rng: random.Random, program: MinicodeProgram) -> list[list[Any]]:
    """Draw BASE_INPUTS + PLUS_INPUTS argument lists; some have equal arguments, no list is
    empty."""
    draw: Callable[[], Any]
    if program.family == "list":
        draw = lambda: [[rng.randint(-10, 40) for _ in range(rng.randint(1, 7))]]  # noqa: E731
    else:
        draw = lambda: _scalars(rng, len(program.params))  # noqa: E731
    return [draw() for _ in range(BASE_INPUTS + PLUS_INPUTS)]


def _scalars(rng: random.Random, count: int) -> list[int]:
    high = rng.choice((10, 30, 100))
    values = [rng.randint(-high // 3, high) for _ in range(count)]
    return [values[0]] * count if rng.random() < 0.2 else values


def _results(source: str, entry_point: str, inputs: list[list[Any]]) -> list[Any]:
    """Return the results of one of *our own* canonical programs, never of a program a model
    wrote."""
    scope: dict[str, Any] = {}
    exec(compile(source, "<minicode canonical>", "exec"), scope)
    return [scope[entry_point](*args) for args in inputs]


def _check_function(inputs: list[list[Any]], results: list[Any]) -> str:
    """Return source of the function `check` that HumanEval items hold."""
    lines = [
        f"    assert candidate({', '.join(map(repr, args))}) == {result!r}\n"
        for args, result in zip(inputs, results, strict=False)
    ]
    return "\n\ndef check(candidate):\n" + "".join(lines)


# --- minicode_free --------------------------------------------------------------------------------

FREE_STEPS = 3
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


def _draw_free(rng: random.Random) -> MinicodeProgram:
    params = PARAMS[: rng.randint(1, 3)]
    while True:
        steps = _chain(rng, FREE_STEPS, lambda rng, op: _free_operand(rng, op, params))
        if any(operand.asked != operand.value for _, operand in steps):  # something to work out
            break
    asked = [(op, operand.asked) for op, operand in steps]
    content = f"free|{len(params)}|" + "|".join(f"{op}{operand}" for op, operand in asked)
    doc = _chain_doc(rng.randrange(2), params[0], asked)
    return MinicodeProgram("chain", params, doc, free_body(rng, steps), content)


FREE_PROGRAMS = from_draw(_draw_free)
FREE = GeneratedTask(
    "minicode_free", lambda rng, split: problems_of(FREE_PROGRAMS(rng, split), rng)
)


def _free_operand(rng: random.Random, op: str, params: tuple[str, ...]) -> Operand:
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


def free_body(rng: random.Random, steps: list[tuple[str, Operand]]) -> str:
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
            word=WORDS.chain[op][1].format(operand.value),
        )
        lines.append(f"    {line}")
        current = name
    return "".join(lines) + (f"    return {name}\n" if stored else "")
