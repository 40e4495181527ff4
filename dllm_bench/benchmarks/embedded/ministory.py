"""ministory: word problems of minigsm with long answers, in which most uncertainty is harmless.

A problem has 4 to 8 steps. The answer restates the question, calls what is counted by a letter, and
works through the steps; each result is repeated by a sentence of its own, the last one also at the
end. Letter, connectives, subjects and the form of every sentence are drawn at random, so that most
tokens a model is unsure of change nothing about the result; the letter is chosen once and kept. The
forms of a sentence have equal lengths: wording that shifts all later tokens takes models of the
embedded size far longer to learn. The content that decides the split is the
arithmetic, as in minigsm.
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

STEPS = (4, 8)
LETTERS = ("a", "b", "c", "r", "x", "y")
PLANS = (
    "How many {items} does {name} have now?",
    "How many {items} does {he} have now?",
    "How many {items} are in the end?",
    "What is the sum of the {items}?",
)
STARTS = ("Start with", "So there", "{name} has", "{name} owns", "{He} has", "{He} owns")
SUBJECTS = ("Then {he}", "Then {name}", "So {he}", "So {name}", "{He} now", "{name} now")
OBJECTS: Mapping[str, Sequence[str]] = {
    "+": ("more", "{items}"), "-": ("now", "{items}"), "*": ("times",),
}  # fmt: skip
LINKS = (", so", ", and", " and now", " so now", ": now")
EQUALS = ("=", "is", "becomes")
EQUATION_ENDS = ("now", "{items}")
REPEATS = (
    "So {letter} is {after} now.",
    "So {name} has {after} {items}.",
    "{He} now has {after} {items}.",
    "{name} now owns {after} {items}.",
    "The sum is {after} now.",
)
ENDS = (
    "So the answer is {after} {items}.",
    "So now {name} has {after} {items}.",
    "So {name} now owns {after} {items}.",
    "So there are now {after} {items}.",
)
"""Forms of the answer's sentences and their parts; those of one list have equal lengths."""


def draw(rng: random.Random) -> GeneratedProblem:
    """Return one problem."""
    steps = draw_steps(rng, rng.randint(*STEPS))
    name, items = rng.choice(list(NAMES)), rng.choice(ITEMS)
    question = ask(rng, steps, name, items)
    answer = _answer(rng, steps, name, items)
    fields = {"question": question, "answer": answer}
    return GeneratedProblem(content_of(steps), prompt_of(question), f" {answer}", fields)


TASK = GeneratedTask("ministory", from_draw(draw))


def _answer(rng: random.Random, steps: Sequence[ArithmeticStep], name: str, items: str) -> str:
    he = NAMES[name]
    words = {"name": name, "he": he, "He": he.capitalize(), "items": items}
    words["letter"] = rng.choice(LETTERS)
    start = f"{rng.choice(STARTS)} {{letter}} {rng.choice(EQUALS)} {steps[0].before} {{items}}."
    sentences = [rng.choice(PLANS).format(**words), start.format(**words)]
    sentences += [_step(rng, step).format(**words, **vars(step)) for step in steps]
    end = f"{rng.choice(ENDS)}\n#### {{after}}"
    return " ".join([*sentences, end.format(**words, after=steps[-1].after)])


def _step(rng: random.Random, step: ArithmeticStep) -> str:
    """Return the forms of the two sentences of a step."""
    done = f"{rng.choice(SUBJECTS)} {{verb}} {{operand}} {rng.choice(OBJECTS[step.op])}"
    equation = f"{{letter}} {rng.choice(EQUALS)} {{before}} {{op}} {{operand}} = {{after}}"
    first = f"{done}{rng.choice(LINKS)} {equation} {rng.choice(EQUATION_ENDS)}."
    return f"{first} {rng.choice(REPEATS)}"
