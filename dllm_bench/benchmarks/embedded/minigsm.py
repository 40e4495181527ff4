"""minigsm: arithmetic word problems of several steps, in the form of GSM8K.

A problem is a start number and 1 to 5 steps (add, subtract, multiply) whose values stay within
0..99. The answer repeats each step and ends in ``#### N``. The wording (names, sentence forms, one
of three answer styles, swapped operands) is drawn separately from the arithmetic, so one question
has several right answers. The content that decides the split is (start, verb, operand, verb, ...).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dllm_bench.benchmarks.embedded.generated import GeneratedProblem, GeneratedTask, from_draw

MAX_STEPS = 5
MAX_VALUE = 99
"""Numbers up to this one are single tokens of the embedded models."""

NAMES = {
    "Tom": "he", "Mia": "she", "Sam": "he", "Ann": "she", "Leo": "he", "Eva": "she",
    "Ben": "he", "Zoe": "she", "Max": "he", "Amy": "she", "Dan": "he", "Ivy": "she",
}  # fmt: skip
ITEMS = (
    "apples", "books", "coins", "cards", "pens", "shells",
    "stamps", "stones", "eggs", "cups", "marbles", "tickets",
)  # fmt: skip
VERBS = {
    "+": ("buys", "finds", "gets", "wins", "picks", "makes", "collects", "earns", "borrows"),
    "-": ("sells", "loses", "gives", "drops", "breaks", "uses", "hides", "throws", "lends"),
    "*": ("trades", "swaps", "exchanges"),
}
OPENINGS = (
    "{name} has {n} {items}.",
    "{name} starts with {n} {items}.",
    "{name} owns {n} {items}.",
)
STEP_FORMS = {
    "+": ("{who} {verb} {n} more.", "{who} {verb} {n} {items}."),
    "-": ("{who} {verb} {n}.", "{who} {verb} {n} of them."),
    "*": ("{who} {verb} them for {n} times as many.",),
}
QUESTIONS = (
    "How many {items} does {name} have now?",
    "How many {items} are there now?",
    "How many {items} does {who} have in the end?",
)
ANSWER_STYLES = (
    " {verb} {n}: {equation}.",
    " {who} {verb}, so {equation}.",
    " {equation} as {who} {verb}.",
)
SWAP_RATE = 0.2
"""How often the operands of an addition or a multiplication change places in the answer."""


@dataclass(frozen=True)
class ArithmeticStep:
    """One operation of a word problem."""

    op: str
    """One of `+`, `-` and `*`."""
    verb: str
    """The verb that names the operation in the text."""
    operand: int
    before: int
    """The value before the step."""
    after: int
    """The value after it: `before op operand`."""


def apply_op(op: str, left: int, right: int) -> int:
    """Return the value of `left op right` for the operations `+`, `-` and `*`."""
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def with_step_weights(weights: Sequence[float]) -> GeneratedTask:
    """Return minigsm with these relative frequencies of problems of 1 to 5 steps."""
    return GeneratedTask("minigsm", from_draw(lambda rng: draw(rng, weights)))


TASK = with_step_weights((1,) * MAX_STEPS)


def draw(rng: random.Random, weights: Sequence[float]) -> GeneratedProblem:
    """Return one problem; its number of steps is drawn with `weights`."""
    steps = draw_steps(rng, rng.choices(range(1, MAX_STEPS + 1), weights)[0])
    question, answer = phrase(rng, steps)
    fields = {"question": question, "answer": answer}
    return GeneratedProblem(content_of(steps), prompt_of(question), f" {answer}", fields)


def content_of(steps: Sequence[ArithmeticStep]) -> str:
    """Return the arithmetic without its wording: start, then verb and operand of each step."""
    return "|".join([str(steps[0].before), *(f"{s.verb}:{s.operand}" for s in steps)])


def draw_steps(rng: random.Random, n_steps: int) -> tuple[ArithmeticStep, ...]:
    """Return a chain of steps with distinct verbs whose values stay within 0..MAX_VALUE."""
    value = rng.randint(2, 60)
    steps: list[ArithmeticStep] = []
    unused = {op: list(verbs) for op, verbs in VERBS.items()}
    while len(steps) < n_steps:
        op = rng.choices("+-*", (4, 4, 2))[0]
        operand = rng.randint(2, 5) if op == "*" else rng.randint(1, 20)
        after = apply_op(op, value, operand)
        if unused[op] and 0 <= after <= MAX_VALUE:
            verb = unused[op].pop(rng.randrange(len(unused[op])))
            steps.append(ArithmeticStep(op, verb, operand, value, after))
            value = after
    return tuple(steps)


def phrase(rng: random.Random, steps: tuple[ArithmeticStep, ...]) -> tuple[str, str]:
    """Draw a wording of the steps: (question, answer)."""
    name = rng.choice(list(NAMES))
    question = ask(rng, steps, name, rng.choice(ITEMS))
    style = rng.choice(ANSWER_STYLES)
    parts = [
        style.format(verb=s.verb, n=s.operand, equation=_equation(rng, s), who=NAMES[name])
        for s in steps
    ]
    return question, "".join(parts)[1:] + f"\n#### {steps[-1].after}"


def ask(rng: random.Random, steps: Sequence[ArithmeticStep], name: str, items: str) -> str:
    """Return the question in a drawn wording."""
    words = {"name": name, "who": NAMES[name], "items": items}
    sentences = [rng.choice(OPENINGS).format(n=steps[0].before, **words)]
    sentences += [_step_sentence(rng, step, words) for step in steps]
    sentences.append(rng.choice(QUESTIONS).format(**words))
    return " ".join(sentences)


def _step_sentence(rng: random.Random, step: ArithmeticStep, words: dict[str, str]) -> str:
    who = rng.choice((words["who"].capitalize(), "Then " + words["who"]))
    form = rng.choice(STEP_FORMS[step.op])
    return form.format(**(words | {"who": who, "verb": step.verb, "n": step.operand}))


def _equation(rng: random.Random, step: ArithmeticStep) -> str:
    left, right = step.before, step.operand
    if step.op != "-" and rng.random() < SWAP_RATE:
        left, right = right, left
    return f"{left} {step.op} {right} = {step.after}"


def prompt_of(question: str) -> str:
    """Return the plain prompt, the same as the task file builds it."""
    return f"Question: {question}\nAnswer:"
