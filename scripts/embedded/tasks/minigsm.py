"""minigsm, minigsm_free and ministory: arithmetic word problems of several steps, as in GSM8K.

A problem is a start number and steps (add, subtract, multiply) whose values stay within 0..99. The
answer works through the steps and ends in ``#### N``. Its wording is drawn separately from the
arithmetic, so one question has several right answers. The content that decides the split is the
arithmetic: (start, verb, operand, verb, ...).

- minigsm: 1 to 5 steps; sentence forms, one of three answer styles, swapped operands.
- minigsm_free: 2 to 5 steps. Each step has one of eight forms of different lengths, some of which
  repeat its result; half of the answers end by repeating the last one. Small words within a form
  are drawn, too. Forms and words have unequal frequencies, so that a model that knows them is surer
  of some than of others: thresholds between 0.5 and 1 then decode different numbers of tokens at a
  time.
- ministory: 4 to 8 steps, with long answers in which most uncertainty is harmless. The answer
  restates the question, calls what is counted by a letter, and works through the steps; each result
  is repeated by a sentence of its own, the last one also at the end. Letter, connectives, subjects
  and the form of every sentence are drawn; the letter is chosen once and kept. The forms of a
  sentence have equal lengths: wording that shifts all later tokens takes models of the embedded
  size far longer to learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask
from dllm_bench.paths import read_yaml
from scripts.embedded.tasks import from_draw

MAX_STEPS = 5
MAX_VALUE = 99
"""Numbers up to this one are single tokens of the embedded models."""

WORDING: Mapping[str, Any] = read_yaml(Path(__file__).with_name("wording.yaml"))
"""Words and forms of these tasks, and of minicode."""
NAMES: Mapping[str, str] = WORDING["names"]
ITEMS: Sequence[str] = WORDING["items"]
VERBS: Mapping[str, Sequence[str]] = WORDING["verbs"]
PLAIN, FREELY, PARTS = (
    SimpleNamespace(**WORDING[task]) for task in ("minigsm", "minigsm_free", "ministory")
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


Write = Callable[[random.Random, Sequence[ArithmeticStep], str, str], str]
"""(random stream, steps, name, items) -> answer in a drawn wording."""


def apply_op(op: str, left: int, right: int) -> int:
    """Return the value of `left op right` for the operations `+`, `-` and `*`."""
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def with_step_weights(weights: Sequence[float]) -> GeneratedTask:
    """Return minigsm with these relative frequencies of problems of 1 to 5 steps."""
    return GeneratedTask("minigsm", from_draw(lambda rng: draw(rng, weights)))


TASK = with_step_weights((1,) * MAX_STEPS)


def draw(rng: random.Random, weights: Sequence[float]) -> GeneratedProblem:
    """Return one problem of minigsm; its number of steps is drawn with `weights`."""
    return _problem(rng, draw_steps(rng, rng.choices(range(1, MAX_STEPS + 1), weights)[0]), _answer)


def _problem(rng: random.Random, steps: Sequence[ArithmeticStep], write: Write) -> GeneratedProblem:
    """Return the problem of these steps in a drawn wording."""
    name, items = rng.choice(list(NAMES)), rng.choice(ITEMS)
    question, answer = ask(rng, steps, name, items), write(rng, steps, name, items)
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


def _answer(rng: random.Random, steps: Sequence[ArithmeticStep], name: str, items: str) -> str:
    style = rng.choice(PLAIN.answer_styles)
    parts = [
        style.format(verb=s.verb, n=s.operand, equation=_equation(rng, s), who=NAMES[name])
        for s in steps
    ]
    return "".join(parts)[1:] + f"\n#### {steps[-1].after}"


def ask(rng: random.Random, steps: Sequence[ArithmeticStep], name: str, items: str) -> str:
    """Return the question in a drawn wording."""
    words = {"name": name, "who": NAMES[name], "items": items}
    sentences = [rng.choice(PLAIN.openings).format(n=steps[0].before, **words)]
    sentences += [_step_sentence(rng, step, words) for step in steps]
    sentences.append(rng.choice(PLAIN.questions).format(**words))
    return " ".join(sentences)


def _step_sentence(rng: random.Random, step: ArithmeticStep, words: dict[str, str]) -> str:
    who = rng.choice((words["who"].capitalize(), "Then " + words["who"]))
    form = rng.choice(PLAIN.steps[step.op])
    return form.format(**(words | {"who": who, "verb": step.verb, "n": step.operand}))


def _equation(rng: random.Random, step: ArithmeticStep) -> str:
    left, right = step.before, step.operand
    if step.op != "-" and rng.random() < SWAP_RATE:
        left, right = right, left
    return f"{left} {step.op} {right} = {step.after}"


def prompt_of(question: str) -> str:
    """Return the plain prompt, the same as the task file builds it."""
    return f"Question: {question}\nAnswer:"


# --- minigsm_free ---------------------------------------------------------------------------------

FREE_STEPS = (2, 5)


def draw_free(rng: random.Random) -> GeneratedProblem:
    """Return one problem of minigsm_free."""
    return _problem(rng, draw_steps(rng, rng.randint(*FREE_STEPS)), _free_answer)


FREE = GeneratedTask("minigsm_free", from_draw(draw_free))


def _free_answer(rng: random.Random, steps: Sequence[ArithmeticStep], name: str, items: str) -> str:
    words = {"name": name, "he": NAMES[name], "He": NAMES[name].capitalize(), "items": items}
    sentences = [_filled(rng, FREELY.forms, words, step) for step in steps]
    end = _filled(rng, FREELY.ends, words, steps[-1])
    return f"{' '.join(sentences)}{end}\n#### {steps[-1].after}"


def _filled(
    rng: random.Random, forms: Mapping[str, int], words: Mapping[str, str], step: ArithmeticStep
) -> str:
    """Return a form drawn for a step, with drawn words."""
    small = {word: _drawn(rng, choices).format(**words) for word, choices in FREELY.words.items()}
    equation = f"{step.before} {step.op} {step.operand} = {step.after}"
    return _drawn(rng, forms).format(**words, **small, **vars(step), equation=equation)


def _drawn(rng: random.Random, weights: Mapping[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


# --- ministory ------------------------------------------------------------------------------------

STORY_STEPS = (4, 8)


def draw_story(rng: random.Random) -> GeneratedProblem:
    """Return one problem of ministory."""
    return _problem(rng, draw_steps(rng, rng.randint(*STORY_STEPS)), _story_answer)


STORY = GeneratedTask("ministory", from_draw(draw_story))


def _story_answer(
    rng: random.Random, steps: Sequence[ArithmeticStep], name: str, items: str
) -> str:
    he, pick = NAMES[name], rng.choice
    words = {"name": name, "he": he, "He": he.capitalize(), "items": items}
    words["letter"] = pick(PARTS.letters)
    start = f"{pick(PARTS.starts)} {{letter}} {pick(PARTS.equals)} {steps[0].before} {{items}}."
    sentences = [pick(PARTS.plans).format(**words), start.format(**words)]
    sentences += [_story_step(pick, step).format(**words, **vars(step)) for step in steps]
    end = f"{pick(PARTS.ends)}\n#### {{after}}"
    return " ".join([*sentences, end.format(**words, after=steps[-1].after)])


def _story_step(pick: Callable[[Sequence[str]], str], step: ArithmeticStep) -> str:
    """Return the forms of the two sentences of a step."""
    done = f"{pick(PARTS.subjects)} {{verb}} {{operand}} {pick(PARTS.objects[step.op])}"
    equation = f"{{letter}} {pick(PARTS.equals)} {{before}} {{op}} {{operand}} = {{after}}"
    first = f"{done}{pick(PARTS.links)} {equation} {pick(PARTS.equation_ends)}."
    return f"{first} {pick(PARTS.repeats)}"
