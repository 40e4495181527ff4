"""minigsm_free: word problems of minigsm, answered in words that are drawn anew for each step.

A problem has 2 to 5 steps. Each step has one of eight forms of different lengths, some of which
repeat its result; half of the answers end by repeating the last one. Small words within a form are
drawn, too. Forms and words have unequal frequencies, so that a model that knows them is surer of
some than of others: thresholds between 0.5 and 1 then decode different numbers of tokens at a time.
The content that decides the split is the arithmetic, as in minigsm.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from dllm_bench.benchmarks.embedded.generated import GeneratedProblem, GeneratedTask, from_draw
from dllm_bench.benchmarks.embedded.minigsm import (
    ITEMS,
    NAMES,
    ArithmeticStep,
    ask,
    content_of,
    draw_steps,
    prompt_of,
)

STEPS = (2, 5)
FORMS: Mapping[str, int] = {
    "{who} {verb} {operand}, {so} {equation}.": 24,
    "{verb} {operand}: {equation}.": 18,
    "{equation} as {he} {verb} {operand}.": 14,
    "{who} {verb} {operand} {items}, {so} {equation} {now}.": 12,
    "{who} now {has} {equation} {items}.": 10,
    "{who} {verb} {operand}. So {equation} {items} {now}.": 8,
    "{who} {verb} {operand}: {equation}. {name} {has} {after} {now}.": 8,
    "{equation}, {so} there are {after} {items} {now}.": 6,
}
"""Form of a step -> how often it is drawn."""
ENDS: Mapping[str, int] = {
    "": 50,
    " So the answer is {after}.": 25,
    " {name} {has} {after} {items} in the end.": 15,
    " So there are {after} {items} now.": 10,
}
"""What follows the steps -> how often it is drawn."""
WORDS: Mapping[str, Mapping[str, int]] = {
    "so": {"so": 85, "and": 15},
    "has": {"has": 75, "owns": 25},
    "now": {"now": 65, "in the end": 35},
    "who": {"{He}": 55, "Then {he}": 30, "{name}": 15},
}
"""Word within a form -> what stands for it, and how often."""


def draw(rng: random.Random) -> GeneratedProblem:
    """Return one problem."""
    steps = draw_steps(rng, rng.randint(*STEPS))
    name, items = rng.choice(list(NAMES)), rng.choice(ITEMS)
    question, answer = ask(rng, steps, name, items), _answer(rng, steps, name, items)
    fields = {"question": question, "answer": answer}
    return GeneratedProblem(content_of(steps), prompt_of(question), f" {answer}", fields)


TASK = GeneratedTask("minigsm_free", from_draw(draw))


def _answer(rng: random.Random, steps: Sequence[ArithmeticStep], name: str, items: str) -> str:
    words = {"name": name, "he": NAMES[name], "He": NAMES[name].capitalize(), "items": items}
    sentences = [_filled(rng, FORMS, words, step) for step in steps]
    end = _filled(rng, ENDS, words, steps[-1])
    return f"{' '.join(sentences)}{end}\n#### {steps[-1].after}"


def _filled(
    rng: random.Random, forms: Mapping[str, int], words: Mapping[str, str], step: ArithmeticStep
) -> str:
    """Return a form drawn for a step, with drawn words."""
    small = {word: _drawn(rng, choices).format(**words) for word, choices in WORDS.items()}
    equation = f"{step.before} {step.op} {step.operand} = {step.after}"
    return _drawn(rng, forms).format(**words, **small, **vars(step), equation=equation)


def _drawn(rng: random.Random, weights: Mapping[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
