"""Right answers of miniparallel, whose families are those of ParallelBench that need no judge.

ParallelBench (Kang et al., 2025, arXiv 2510.04767) measures which tasks lose accuracy when tokens
are decoded in parallel. Here are ten changes of a waiting line, Latin squares and Sudokus of size
4. Every family has a list of all right answers, any of which counts. If there is only one, each
token follows from the prompt. If there are many, a token depends on the other tokens: positions
decoded in the same forward can each be likely but wrong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from operator import itemgetter
from typing import Any

SIDE = 4
"""Rows and columns of a square."""
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


Answers = Callable[[ParallelCase], list[Words]]
"""All right answers of a case."""


def _line(case: ParallelCase, place: int, joins: bool, leaves: bool) -> Words:
    """Return the line after the name joins at a place, the one who stands there leaves, or both."""
    return (*case.words[:place], *[case.name] * joins, *case.words[place + leaves :])


def _at_place(joins: bool = False, leaves: bool = False) -> Answers:
    """Return the change at the case's place."""
    return lambda case: [_line(case, case.place, joins, leaves)]


def _anywhere(joins: bool = False, leaves: bool = False) -> Answers:
    """Return the change at each place of the line; who only joins may also stand last."""
    return lambda case: [
        _line(case, place, joins, leaves) for place in range(len(case.words) + (not leaves))
    ]


@cache
def latin_squares() -> list[tuple[int, ...]]:
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
def sudokus() -> list[Words]:
    """Return the Latin squares of 1 to 4 whose boxes of two by two hold each number once."""
    corners = [row * SIDE + column for row in (0, 2) for column in (0, 2)]
    boxes = [[i, i + 1, i + SIDE, i + SIDE + 1] for i in corners]
    return [
        tuple(str(n + 1) for n in square)
        for square in latin_squares()
        if all(len({square[i] for i in box}) == SIDE for box in boxes)
    ]


def _solutions(case: ParallelCase) -> list[Words]:
    """Return the Sudokus that hold what is given."""
    squares = sudokus()
    for i, given in enumerate(case.words):
        squares = [square for square in squares if given in (EMPTY, square[i])]
    return squares


FAMILIES: Mapping[str, Answers] = {
    "copy": lambda case: [case.words],
    "reverse": lambda case: [case.words[::-1]],
    "sort": lambda case: [tuple(sorted(case.words))],
    "shuffle": lambda case: [*permutations(case.words)][1:],
    "replace_index": _at_place(joins=True, leaves=True),
    "replace_random": _anywhere(joins=True, leaves=True),
    "insert_index": _at_place(joins=True),
    "insert_random": _anywhere(joins=True),
    "remove_index": _at_place(leaves=True),
    "remove_random": _anywhere(leaves=True),
    "latin_square": lambda case: [itemgetter(*square)(case.words) for square in latin_squares()],
    "sudoku": _solutions,
}
"""The names are ParallelBench's; of `latin_square_n4` and `sudoku_n4_12` the first part."""


def score(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """Grade as right if the text is one of the right answers, its full stop left out or not."""
    case = ParallelCase(tuple(doc["words"].split()), doc["place"], doc["name"])
    words = tuple(results[0].strip().removesuffix(".").split())
    return {"valid": float(words in FAMILIES[doc["family"]](case))}
