"""minigsm: multi-step arithmetic word problems in GSM8K form, made from a seed.

A problem is a start number and 1..5 steps (add, subtract, multiply) whose values stay in 0..99;
the answer restates each step and ends in ``#### N``. Phrasing (names, sentence forms, one of three
answer styles, swapped operands) is drawn apart from the arithmetic, so one question has several
right answers. Train and test never share a problem: a hash of (start, verb, operand, verb, ...)
decides the split. Prompt building for a harness and scoring live elsewhere.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

MAX_STEPS = 5
MAX_VALUE = 99
TEST_ONE_IN = 8
"""One problem in this many belongs to the test split (by hash of its content)."""

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


@dataclass(frozen=True)
class Step:
    """One operation: value after = before `op` operand; `verb` names it in the text."""

    op: str
    verb: str
    operand: int
    before: int
    after: int


@dataclass(frozen=True)
class Problem:
    """One item: `question` and gold `answer` (starts without a space, ends in ``#### N``)."""

    task_id: str
    question: str
    answer: str
    steps: tuple[Step, ...]

    @property
    def result(self) -> int:
        return self.steps[-1].after


def apply_op(op: str, left: int, right: int) -> int:
    """The value of `left op right` for the three operations used."""
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def generate(
    split: str, limit: int, seed: int = 0, weights: tuple[float, ...] = (1, 1, 1, 1, 1)
) -> Iterator[Problem]:
    """Yield `limit` distinct problems of a split ("train" or "test"), the same for a seed.

    `weights` are the relative frequencies of 1..5 steps.
    """
    if split not in ("train", "test"):
        raise ValueError(f"minigsm has the splits 'train' and 'test', not {split!r}")
    rng = random.Random(f"minigsm/{split}/{seed}")
    seen: set[str] = set()
    while len(seen) < limit:
        n_steps = rng.choices(range(1, MAX_STEPS + 1), weights)[0]
        steps = draw_steps(rng, n_steps)
        question, answer = phrase(rng, steps)
        if split_of(steps) == split and question not in seen:
            task_id = f"minigsm/{split}/{len(seen)}"
            seen.add(question)
            yield Problem(task_id, question, answer, steps)


def draw_steps(rng: random.Random, n_steps: int) -> tuple[Step, ...]:
    """A chain of steps with distinct verbs whose values stay within 0..MAX_VALUE."""
    value = rng.randint(2, 60)
    steps: list[Step] = []
    free = {op: list(verbs) for op, verbs in VERBS.items()}
    while len(steps) < n_steps:
        op = rng.choices("+-*", (4, 4, 2))[0]
        operand = rng.randint(2, 5) if op == "*" else rng.randint(1, 20)
        after = apply_op(op, value, operand)
        if free[op] and 0 <= after <= MAX_VALUE:
            verb = free[op].pop(rng.randrange(len(free[op])))
            steps.append(Step(op, verb, operand, value, after))
            value = after
    return tuple(steps)


def split_of(steps: tuple[Step, ...]) -> str:
    """The split a chain belongs to: by content, so that no seed can mix the splits."""
    content = "|".join([str(steps[0].before), *(f"{s.verb}:{s.operand}" for s in steps)])
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_ONE_IN == 0 else "train"


def phrase(rng: random.Random, steps: tuple[Step, ...]) -> tuple[str, str]:
    """Draw a wording: (question, answer)."""
    name = rng.choice(list(NAMES))
    words = {"name": name, "who": NAMES[name], "items": rng.choice(ITEMS)}
    sentences = [rng.choice(OPENINGS).format(n=steps[0].before, **words)]
    sentences += [_step_sentence(rng, step, words) for step in steps]
    sentences.append(rng.choice(QUESTIONS).format(**words))
    style = rng.choice(ANSWER_STYLES)
    parts = [
        style.format(verb=s.verb, n=s.operand, equation=_equation(rng, s), who=words["who"])
        for s in steps
    ]
    return " ".join(sentences), "".join(parts)[1:] + f"\n#### {steps[-1].after}"


def _step_sentence(rng: random.Random, step: Step, words: dict[str, str]) -> str:
    who = rng.choice((words["who"].capitalize(), "Then " + words["who"]))
    form = rng.choice(STEP_FORMS[step.op])
    return form.format(**(words | {"who": who, "verb": step.verb, "n": step.operand}))


def _equation(rng: random.Random, step: Step) -> str:
    left, right = step.before, step.operand
    if step.op != "-" and rng.random() < SWAP_RATE:
        left, right = right, left
    return f"{left} {step.op} {right} = {step.after}"


def prompt_of(question: str) -> str:
    """The plain prompt; the gold continuation is a space and the answer."""
    return f"Question: {question}\nAnswer:"
