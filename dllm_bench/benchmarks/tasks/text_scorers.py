"""Graders of the text tasks: stored answer -> metrics.

Each function grades as one published harness does; lenient ways (OpenCompass) have task files of
their own. Nothing is run here: code is graded in `code_scorers`, KOR-Bench in `korbench`.
"""

from __future__ import annotations

import ast
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import permutations
from operator import itemgetter

from dllm_bench.benchmarks.tasks import NOTHING, Doc, math_answers, per_answer

Metrics = dict[str, float]
LETTERS = "ABCD"
UNANSWERABLE = "unanswerable"
IMPOSSIBLE = "impossible to answer"
ARTICLES = re.compile(r"\b(a|an|the)\b")
LETTER = re.compile(r"(?i)ANSWER\s*:\s*([A-D])")
NAMES_ANSWER = re.compile(r"(?i)final answer|answer is")
LONGEST = 200
"""Characters of an expression that is worked out."""
NUMBER = re.compile(r"-?\s?\$?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
LEADING = re.compile(r"[\s*_(\[\"'`]*([A-D])(?=[\s*_)\]\"'`]*(?:$|[.:,)\]\n]))")
MARKS = re.compile(r"[*_`$()\[\]{}]|\\boxed|\\text")
ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")


def math_minerva(doc: Doc, results: list[str]) -> Metrics:
    """Grade Minerva's closing sentence against the boxed answer; math-verify on the whole text."""
    gold = math_answers.boxed(doc["solution"]) or ""
    answer = math_answers.normalised(math_answers.final_answer(results[0]))
    exact = math_answers.equivalent(math_answers.normalised(gold), answer)
    verified = math_answers.verified(results[0], doc["solution"])
    return {"exact_match": float(exact), "math_verify": float(verified)}


def math_boxed(doc: Doc, results: list[str]) -> Metrics:
    """Grade the boxed answer, else the sentence that names the answer, by OpenCompass's
    equality."""
    return _boxed(math_answers.boxed(doc["solution"]) or "", results[0])


def gsm8k_boxed(doc: Doc, results: list[str]) -> Metrics:
    """Grade OpenCompass's zero-shot GSM8K as MATH, against the number after ####."""
    return _boxed(doc["answer"].split("#### ")[-1].replace(",", ""), results[0])


def _boxed(gold: str, text: str) -> Metrics:
    answer = re.sub(
        r"^\{(.*)\}$", r"\1", math_answers.boxed(text) or ""
    )  # there may be a second pair of braces
    verified = math_answers.verified(text, f"${gold}$")
    right = math_answers.same(gold, answer or closing_answer(text))
    return {"accuracy": float(right), "math_verify": float(verified)}


def closing_answer(text: str) -> str:
    """Return the answer in the first sentence that announces one, else in the first sentence.

    Of a sentence with formulas the last formula counts, else what follows "answer is".
    """
    sentences = text.split(".")
    sentence = next((one for one in sentences if NAMES_ANSWER.search(one)), sentences[0])
    answer = re.split(r"(?i)answer is", sentence)[-1]
    formulas = re.findall(r"\$(.*?)\$", answer)
    return str(formulas[-1] if formulas else answer).strip(" :")


def mmlu_letter(doc: Doc, results: list[str]) -> Metrics:
    """Grade the letter after the first `ANSWER:` (OpenCompass after simple-evals)."""
    letter = LETTER.search(results[0])
    right = letter is not None and letter[1].upper() == LETTERS[doc["answer"]]
    return {"accuracy": float(right)}


def written_number(text: str) -> str:
    """Return the shortest form of the answer's number; NOTHING if there is none."""
    _, marked, after = text.partition("####")
    numbers = NUMBER.findall(after) if marked else NUMBER.findall(text)[-1:]
    if not numbers:
        return NOTHING
    value = Decimal(numbers[0].replace(",", "").replace("$", "").replace(" ", ""))
    return f"{value.normalize():f}"


def leading_letter(text: str) -> str:
    """Return the option's letter that the text begins with; NOTHING without one."""
    letter = LEADING.match(text)
    return letter[1] if letter else NOTHING


gsm8k_value = per_answer(lambda text, doc: written_number(text))
"""Grade GSM8K by value: the number after the first ####, else the last one, without units and
commas. `$63.00`, `63` and `63.` are one answer, which the two filters of lm-eval keep apart.
"""
mmlu_leading = per_answer(lambda text, doc: leading_letter(text))
"""Grade MMLU by the letter an answer begins with, whatever follows (`D. text`, `**D**`, `(D)`)."""
without_marks = per_answer(lambda text, doc: MARKS.sub("", text))
"""Drop what markdown puts around a letter (`ANSWER: **A**`)."""


def sudoku_dream(doc: Doc, results: list[str]) -> Metrics:
    """Grade Dream's Sudokus: rows, columns and quarters of the grid before an empty line hold 1 to
    4, givens kept.

    Spaces are left out, and what is longer than the puzzle is cut.
    """
    puzzle, text = doc["input"], results[0].split("\n\n")[0].replace(" ", "")
    grid = text[: len(puzzle)].strip().split("\n")
    if [len(row) for row in grid] != [4] * 4:
        return {"valid": 0.0}
    given = zip("".join(puzzle.split()), "".join(grid), strict=True)
    columns = ["".join(column) for column in zip(*grid, strict=True)]
    quarters = [grid[r][c : c + 2] + grid[r + 1][c : c + 2] for r in (0, 2) for c in (0, 2)]
    filled = all(sorted(part) == list("1234") for part in (*grid, *columns, *quarters))
    return {"valid": float(filled and all(old in ("0", new) for old, new in given))}


def countdown_dream(doc: Doc, results: list[str]) -> Metrics:
    """Grade Dream's Countdown: the first line's equations hold, use each number once, and end in
    the goal.

    Each result is a number that later equations use. Expressions are worked out here, not run.
    """
    *numbers, goal = doc["input"].split(",")
    left, line = Counter(numbers), results[0].split("\n")[0]
    for equation in line.split(","):
        sides = equation.split("=")
        if len(sides) != 2 or not holds(*sides):
            return {"valid": 0.0}
        left.subtract(re.findall(r"(\d+)(?=[+-/*=])", equation))
        left.update([sides[1]])
    left.subtract([goal])
    return {"valid": float(line.split("=")[-1] == goal and not any(left.values()))}


def holds(expression: str, result: str) -> bool:
    """Return whether an expression of whole numbers and + - * / has the value that is written."""
    if not re.match(r"\d+[+\-*/]\d+", expression) or len(expression) > LONGEST:
        return False
    try:
        tree = ast.parse(expression, mode="eval").body
        return math_answers.arithmetic(tree, whole=True) == float(result)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return False


def bare_words(text: str) -> str:
    """Return the text in lower case without punctuation, articles and spare spaces.

    As in SQuAD and simple-evals.
    """
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", text).split())


def squad_v2(doc: Doc, results: list[str]) -> Metrics:
    """Grade by SQuAD 2.0's exact match and F1; the word `unanswerable` means that there is no
    answer.

    An empty text is wrong. SQuAD's own script takes an empty prediction for "no answer", by which a
    model that writes nothing would score.
    """
    if not results[0].strip():
        return {"exact": 0.0, "f1": 0.0}
    answer = bare_words(results[0])
    answer = "" if answer == UNANSWERABLE else answer
    golds = [words for words in map(bare_words, doc["answers"]) if words] or [""]
    exact = max(answer == gold for gold in golds)
    return {"exact": float(exact), "f1": max(_overlap(answer, gold) for gold in golds)}


def _overlap(one: str, other: str) -> float:
    """Return F1 of the words of two texts; an empty text equals only an empty text."""
    words, wanted = one.split(), other.split()
    if not words or not wanted:
        return float(words == wanted)
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted))


def squad_v2_lenient(doc: Doc, results: list[str]) -> Metrics:
    """Grade as OpenCompass: equal to any answer; for a question without one, plausible spans count
    too."""
    line = results[0].split("\n")[0].lower().split("answer is")[-1]
    accepted = doc["answers"] or [*doc["plausible"], IMPOSSIBLE]
    return {"score": float(first_clause(line) in {first_clause(a).lower() for a in accepted})}


def first_clause(text: str) -> str:
    """Return OpenCompass's normal form: up to the first full stop or comma; no punctuation or
    articles."""
    clause = re.sub(r"[^\w\s]", "", re.split(r"[\n.,]", text, maxsplit=1)[0])
    return re.sub(r"\s+", " ", re.sub(r"(?i)\b(a|an|the)\b", "", clause)).strip()


def drop_lenient(doc: Doc, results: list[str]) -> Metrics:
    """Grade as OpenCompass after simple-evals: an accepted answer contains the given one or is in
    it."""
    line = ANSWER_LINE.search(results[0])
    answer = bare_words(line[1] if line else results[0])
    golds = [bare_words(" and ".join(spans)) for spans in doc["answers"]]
    return {"accuracy": float(any(_contained(answer, gold) for gold in golds))}


def _contained(one: str, other: str) -> bool:
    """Return whether one text contains the other; an empty text is contained in no other."""
    if not one or not other:
        return one == other
    return one in other or other in one


# --- miniparallel: families of ParallelBench that need no judge -----------------------------------

# ParallelBench (Kang et al., 2025, arXiv 2510.04767) measures which tasks lose accuracy when tokens
# are decoded in parallel. Here are ten changes of a waiting line, Latin squares and Sudokus of size
# 4. Every family has a list of all right answers, any of which counts. If there is only one, each
# token follows from the prompt. If there are many, a token depends on the other tokens: positions
# decoded in the same forward can each be likely but wrong together.

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


def miniparallel(doc: Doc, results: list[str]) -> Metrics:
    """Grade as right if the text is one of the right answers, its full stop left out or not."""
    case = ParallelCase(tuple(doc["words"].split()), doc["place"], doc["name"])
    words = tuple(results[0].strip().removesuffix(".").split())
    return {"valid": float(words in FAMILIES[doc["family"]](case))}
