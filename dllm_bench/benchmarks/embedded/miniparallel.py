"""miniparallel: lists and squares whose tokens depend on each other, after ParallelBench.

ParallelBench (Kang et al., 2025, arXiv 2510.04767) measures which tasks lose accuracy when tokens
are decoded in parallel. Of its 17 task families the 12 that can be generated and graded without a
judge are here: ten changes of a waiting line, Latin squares and Sudokus of size 4. Its text writing
(summaries, paraphrases, sentences from given words) needs a judge and is left out. Items are drawn
from the published description, in wording and names of this project: no item of ParallelBench is
included.

Every family states a rule and has a list of all right answers, any of which counts. If there is
only one, each token follows from the prompt. If there are many, the gold answer is drawn uniformly,
and a token depends on the other tokens: positions decoded in the same forward can each be likely
but wrong together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from operator import itemgetter
from typing import Any

from dllm_bench.benchmarks.embedded.generated import (
    TEST,
    Draw,
    GeneratedProblem,
    GeneratedTask,
    from_draw,
    mixture,
    text_problem,
)
from dllm_bench.benchmarks.embedded.minigsm import MAX_VALUE, NAMES

LINE = (4, 6)
"""Smallest and largest number of names in a line."""
SIDE = 4
"""Rows and columns of a square."""
GIVEN = 12
"""Numbers of a Sudoku that are given."""
EMPTY = "x"

Words = tuple[str, ...]


@dataclass(frozen=True)
class ParallelCase:
    """What a rule is applied to."""

    words: Words
    """The names of the line, the numbers of a square, or a Sudoku row by row."""
    place: int = 0
    """Where the rule changes the line, from 0."""
    name: str = ""
    """Who joins the line."""


@dataclass(frozen=True)
class Family:
    """A rule with its cases and right answers."""

    rule: str
    """May name `{item}`, the place counted from 1, and `{name}`."""
    answers: Callable[[ParallelCase], list[Words]]
    """All right answers."""
    draw_case: Callable[[random.Random], ParallelCase]


def _draw_line(rng: random.Random) -> ParallelCase:
    *words, name = rng.sample(list(NAMES), rng.randint(*LINE) + 1)
    return ParallelCase(tuple(words), rng.randrange(len(words)), name)


def _draw_sudoku(rng: random.Random) -> ParallelCase:
    square = rng.choice(_sudokus())
    kept = rng.sample(range(SIDE * SIDE), GIVEN)
    return ParallelCase(tuple(n if i in kept else EMPTY for i, n in enumerate(square)))


def _replaced(case: ParallelCase, place: int) -> Words:
    return (*case.words[:place], case.name, *case.words[place + 1 :])


def _inserted(case: ParallelCase, place: int) -> Words:
    return (*case.words[:place], case.name, *case.words[place:])


def _removed(case: ParallelCase, place: int) -> Words:
    return (*case.words[:place], *case.words[place + 1 :])


def _at_place(change: Callable[[ParallelCase, int], Words]) -> Callable[..., list[Words]]:
    """Return the change at the case's place."""
    return lambda case: [change(case, case.place)]


def _anywhere(
    change: Callable[[ParallelCase, int], Words], more: int = 0
) -> Callable[..., list[Words]]:
    """Return the change at each place of the line, and at `more` places after it."""
    return lambda case: [change(case, i) for i in range(len(case.words) + more)]


@cache
def _squares() -> list[tuple[int, ...]]:
    """Return all Latin squares of 0 to 3, row by row."""
    squares: list[tuple[int, ...]] = [()]
    for _ in range(SIDE):
        squares = [
            square + row
            for square in squares
            for row in permutations(range(SIDE))
            if all(number not in square[column::SIDE] for column, number in enumerate(row))
        ]
    return squares


@cache
def _sudokus() -> list[Words]:
    """Return the Latin squares of 1 to 4 whose boxes of two by two hold each number once."""
    corners = [row * SIDE + column for row in (0, 2) for column in (0, 2)]
    boxes = [[i, i + 1, i + SIDE, i + SIDE + 1] for i in corners]
    return [
        tuple(str(n + 1) for n in square)
        for square in _squares()
        if all(len({square[i] for i in box}) == SIDE for box in boxes)
    ]


def _solutions(case: ParallelCase) -> list[Words]:
    """Return the Sudokus that hold what is given."""
    squares = _sudokus()
    for i, given in enumerate(case.words):
        squares = [square for square in squares if given in (EMPTY, square[i])]
    return squares


FAMILIES: Mapping[str, Family] = {
    "copy": Family("Keep the list.", lambda c: [c.words], _draw_line),
    "reverse": Family("Reverse the list.", lambda c: [c.words[::-1]], _draw_line),
    "sort": Family("Sort the list.", lambda c: [tuple(sorted(c.words))], _draw_line),
    "shuffle": Family("Shuffle the list.", lambda c: [*permutations(c.words)][1:], _draw_line),
    "replace_index": Family("Change item {item} to {name}.", _at_place(_replaced), _draw_line),
    "replace_random": Family("Change any item to {name}.", _anywhere(_replaced), _draw_line),
    "insert_index": Family("Add {name} as item {item}.", _at_place(_inserted), _draw_line),
    "insert_random": Family("Add {name} as any item.", _anywhere(_inserted, 1), _draw_line),
    "remove_index": Family("Remove item {item}.", _at_place(_removed), _draw_line),
    "remove_random": Family("Remove any item.", _anywhere(_removed), _draw_line),
    "latin_square": Family(
        "Make a Latin square.",
        lambda c: [itemgetter(*square)(c.words) for square in _squares()],
        lambda rng: ParallelCase(tuple(map(str, rng.sample(range(MAX_VALUE + 1), SIDE)))),
    ),
    "sudoku": Family("Solve the Sudoku.", _solutions, _draw_sudoku),
}
"""The names are ParallelBench's; of `latin_square_n4` and `sudoku_n4_12` the first part."""


def draw_from(family: str) -> Draw:
    """Return a draw of problems of one family."""

    def draw(rng: random.Random) -> GeneratedProblem:
        case = FAMILIES[family].draw_case(rng)
        rule = FAMILIES[family].rule.format(item=case.place + 1, name=case.name)
        given, answer = " ".join(case.words), rng.choice(FAMILIES[family].answers(case))
        prompt = f"Rule: {rule}\nQuestion: Apply the rule to {given}.\nAnswer:"
        fields = {"family": family, "words": given, "place": case.place, "name": case.name}
        return text_problem(f"{rule}|{given}", prompt, f"{' '.join(answer)}.", fields)

    return draw


def is_right(item: Mapping[str, Any], text: str) -> bool:
    """Return whether a text is one of the right answers of an item, its full stop left out or
    not."""
    case = ParallelCase(tuple(item["words"].split()), item["place"], item["name"])
    return tuple(text.strip().removesuffix(".").split()) in FAMILIES[item["family"]].answers(case)


@dataclass(frozen=True)
class FamilyItems(GeneratedTask):
    """Test items of each family under the family's name; training draws from all of them."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The families."""
        return tuple(FAMILIES)

    def items(self, split: str) -> list[dict[str, Any]]:
        """Return the test items of the family `split`."""
        return self.of_family(split).items(TEST)

    def items_hash(self, split: str) -> str | None:
        """Return the sha256 of the file with the items of the family `split`."""
        return self.of_family(split).items_hash(TEST)

    def of_family(self, family: str) -> GeneratedTask:
        """Return the task that has the problems of one family."""
        return GeneratedTask(f"{self.name}/{family}", from_draw(draw_from(family)))


TASK = FamilyItems("miniparallel", from_draw(mixture(*map(draw_from, FAMILIES))))
