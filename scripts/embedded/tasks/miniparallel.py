"""miniparallel: lists and squares whose tokens depend on each other, after ParallelBench.

Of ParallelBench's 17 task families the 12 that can be generated and graded without a judge are
here. Its text writing (summaries, paraphrases, sentences from given words) needs a judge and is
left out. Items are drawn from the published description, in wording and names of this project: no
item of ParallelBench is included. The gold answer is drawn uniformly from all right answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask, text_problem
from dllm_bench.benchmarks.tasks.text_scorers import EMPTY, FAMILIES, SIDE, ParallelCase, sudokus
from scripts.embedded.tasks import Draw, from_draw, mixture
from scripts.embedded.tasks.minigsm import MAX_VALUE, NAMES

LINE = (4, 6)
"""Smallest and largest number of names in a line."""
GIVEN = 12
"""Numbers of a Sudoku that are given."""
RULES: Mapping[str, str] = {
    "copy": "Keep the list.",
    "reverse": "Reverse the list.",
    "sort": "Sort the list.",
    "shuffle": "Shuffle the list.",
    "replace_index": "Change item {item} to {name}.",
    "replace_random": "Change any item to {name}.",
    "insert_index": "Add {name} as item {item}.",
    "insert_random": "Add {name} as any item.",
    "remove_index": "Remove item {item}.",
    "remove_random": "Remove any item.",
    "latin_square": "Make a Latin square.",
    "sudoku": "Solve the Sudoku.",
}
"""Family -> its rule, which may name `{item}`, the place counted from 1, and `{name}`."""


def _draw_case(rng: random.Random, family: str) -> ParallelCase:
    if family == "latin_square":
        return ParallelCase(tuple(map(str, rng.sample(range(MAX_VALUE + 1), SIDE))))
    if family == "sudoku":
        square = rng.choice(sudokus())
        kept = rng.sample(range(SIDE * SIDE), GIVEN)
        return ParallelCase(tuple(n if i in kept else EMPTY for i, n in enumerate(square)))
    *words, name = rng.sample(list(NAMES), rng.randint(*LINE) + 1)
    return ParallelCase(tuple(words), rng.randrange(len(words)), name)


def draw_from(family: str) -> Draw:
    """Return a draw of problems of one family."""

    def draw(rng: random.Random) -> GeneratedProblem:
        case = _draw_case(rng, family)
        rule = RULES[family].format(item=case.place + 1, name=case.name)
        given, answer = " ".join(case.words), rng.choice(FAMILIES[family](case))
        prompt = f"Rule: {rule}\nQuestion: Apply the rule to {given}.\nAnswer:"
        fields = {"family": family, "words": given, "place": case.place, "name": case.name}
        return text_problem(f"{rule}|{given}", prompt, f"{' '.join(answer)}.", fields)

    return draw


OF_FAMILY = {
    family: GeneratedTask(f"miniparallel/{family}", from_draw(draw_from(family)))
    for family in RULES
}
"""Family -> its problems, of which the test items are drawn."""
TASK = GeneratedTask("miniparallel", from_draw(mixture(*map(draw_from, RULES))))
"""Problems of all families, for training."""
