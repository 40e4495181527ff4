"""minirule: the prompt states a rule and asks to apply it to a case.

A rule is a new operation on two numbers, a word that stands for another word, or changes of a list.
The form "free" asks for the result, as KOR-Bench does; the form "choice" offers four options and
asks for a letter, as MMLU does (for a list: its first or its last word). The form "range" asks for
the letter of the range that a number is in, out of four that are always the same: the letter
follows from the number. For "choice" it has to be looked up in the prompt, which masked models of
the embedded size did not learn. The answer works through the case, writing before each step what
the step applies to, and ends in ``#### X``. An option stands before its letter and a word before
what replaces it, because models of the embedded size continue from what they find in the prompt.
All forms of a case are in one split: the content that decides it is the rule and the case.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask, text_problem
from scripts.embedded.tasks import from_draw
from scripts.embedded.tasks.minigsm import ITEMS, MAX_VALUE, apply_op
from scripts.embedded.tasks.miniread import COLORS

LETTERS = "ABCD"
MAX_OPERAND = 20
"""Largest number a new operation is applied to."""
CONSTANTS, MORE_CONSTANTS = (2, 9), (2, 20)
"""Smallest and largest constant of an operation; more in the form "range", whose problems would
otherwise repeat.
"""
RANGES = ((0, 24), (25, 49), (50, 74), (75, 99))
"""First and last number of the ranges that the form "range" offers, one for each letter."""
LIST_SIZE = (4, 5)
"""Smallest and largest number of words in a list."""
Words = list[str]

Asked = tuple[str, tuple[str, ...], str]
"""(question, sentences of work, what follows ####)"""


@dataclass(frozen=True)
class RuleCase:
    """A rule, the case it is applied to, and the result."""

    rule: str
    question: str
    work: tuple[str, ...]
    """Sentences that work out the result."""
    result: tuple[str, ...]
    """The words of the result, in order."""
    distractors: tuple[str, ...]
    """Words that wrong options are drawn from; some may be right."""


@dataclass(frozen=True)
class ListChange:
    """A change of a list of words."""

    sentence: str
    """The sentence that states it in a rule."""
    apply: Callable[[Words], Words]
    """The list before -> the list after."""


def draw_free(rng: random.Random) -> GeneratedProblem:
    """Return one problem of the form "free"."""
    return _draw(rng, _free)


def draw_choice(rng: random.Random) -> GeneratedProblem:
    """Return one problem of the form "choice"."""
    return _draw(rng, _choice)


def draw_range(rng: random.Random) -> GeneratedProblem:
    """Return one problem of the form "range": a new operation, every range as likely as another."""
    low, high = rng.choice(RANGES)
    while True:
        case = _operation(rng, MORE_CONSTANTS)
        if low <= int(case.result[0]) <= high:
            return _problem(rng, case, _range)


FREE = GeneratedTask("minirule", from_draw(draw_free))
CHOICE = GeneratedTask("minirule_choice", from_draw(draw_choice))
RANGE = GeneratedTask("minirule_range", from_draw(draw_range))


def _draw(rng: random.Random, ask: Callable[[random.Random, RuleCase], Asked]) -> GeneratedProblem:
    return _problem(rng, rng.choice((_operation, _words, _changes))(rng), ask)


def _problem(
    rng: random.Random, case: RuleCase, ask: Callable[[random.Random, RuleCase], Asked]
) -> GeneratedProblem:
    question, work, final = ask(rng, case)
    prompt = f"Rule: {case.rule}\nQuestion: {question}\nAnswer:"
    answer = " ".join(work) + f"\n#### {final}"
    return text_problem(f"{case.rule}|{case.question}", prompt, answer, {"final": final})


def _free(rng: random.Random, case: RuleCase) -> Asked:
    return case.question, case.work, " ".join(case.result)


def _choice(rng: random.Random, case: RuleCase) -> Asked:
    """Return the question with four options; the work ends in the right one."""
    end = rng.choice((0, -1))
    right, which = case.result[end], {0: " Which is first?", -1: " Which is last?"}[end]
    wrong = rng.sample(sorted({*case.distractors, *case.result} - {right}), len(LETTERS) - 1)
    options = dict(zip(rng.sample([right, *wrong], len(LETTERS)), LETTERS, strict=True))
    offered = ", ".join(f"{option} {letter}" for option, letter in options.items())
    question = f"{case.question}{which * (len(case.result) > 1)} {offered}."
    return question, (*case.work, f"{right} {options[right]}."), options[right]


def _range(rng: random.Random, case: RuleCase) -> Asked:
    """Return the question with the four ranges; the work ends in the letter of the right one."""
    del rng  # nothing is drawn
    offered = ", ".join(
        f"{letter} {low} to {high}" for letter, (low, high) in zip(LETTERS, RANGES, strict=True)
    )
    (result,) = case.result
    places = (i for i, (low, high) in enumerate(RANGES) if low <= int(result) <= high)
    letter = LETTERS[next(places)]
    return f"{case.question} {offered}.", (*case.work, f"{result} {letter}."), letter


def _operation(rng: random.Random, constants: tuple[int, int] = CONSTANTS) -> RuleCase:
    """Return a new operation of two steps with a, b and a constant: ``a @ b means ( a * 2 ) +
    b``."""
    while True:
        (first, second), constant = rng.sample("ab", 2), rng.randint(*constants)
        inner_op, outer_op = rng.choice("+-*"), rng.choice("+-*")
        inner, outer = rng.choice(((str(constant), second), (second, str(constant))))
        rule = f"a @ b means ( {first} {inner_op} {inner} ) {outer_op} {outer}."
        values = {n: rng.randint(1, MAX_OPERAND) for n in "ab"} | {str(constant): constant}
        inner_value = apply_op(inner_op, values[first], values[inner])
        result = apply_op(outer_op, inner_value, values[outer])
        if 0 <= inner_value <= MAX_VALUE and 0 <= result <= MAX_VALUE:
            break
    work = (
        f"{values[first]} {inner_op} {values[inner]} = {inner_value}.",
        f"{inner_value} {outer_op} {values[outer]} = {result}.",
    )
    candidates = [
        v for v in (inner_value, *values.values(), *range(result - 5, result + 6)) if v >= 0
    ]
    distractors = tuple(str(v) for v in candidates if v <= MAX_VALUE)
    return RuleCase(
        rule, f"What is {values['a']} @ {values['b']}?", work, (str(result),), distractors
    )


def _words(rng: random.Random) -> RuleCase:
    """Return a rule in which each of four colours stands for an item."""
    meaning = dict(zip(rng.sample(COLORS, 4), rng.sample(ITEMS, 4), strict=True))
    case = [rng.choice(list(meaning)) for _ in range(rng.randint(*LIST_SIZE))]
    rule = ", ".join(f"{color} becomes {item}" for color, item in meaning.items()) + "."
    work = tuple(f"{color} {meaning[color]}." for color in case)
    result = tuple(meaning[color] for color in case)
    return RuleCase(rule, _apply_to(case), work, result, tuple(meaning.values()))


def _changes(rng: random.Random) -> RuleCase:
    """Return two different changes of a list of colours, one after the other."""
    case = rng.sample(COLORS, rng.randint(*LIST_SIZE))
    first = rng.choice(_possible_changes(rng, case))
    between = first.apply(case)
    others = [c for c in _possible_changes(rng, between) if c.sentence != first.sentence]
    second = rng.choice(others)
    after = second.apply(between)
    work = tuple(
        f"{change.sentence.removesuffix('.')}: {' '.join(words)}."
        for change, words in ((first, between), (second, after))
    )
    rule = f"{first.sentence} {second.sentence}"
    return RuleCase(rule, _apply_to(case), work, tuple(after), COLORS)


def _possible_changes(rng: random.Random, words: Words) -> list[ListChange]:
    """Return all changes; those that name a word to change name one that is in the list."""
    named, other = rng.choice(words), rng.choice([c for c in COLORS if c not in words])
    return [
        ListChange("Reverse the list.", lambda w: w[::-1]),
        ListChange("Drop the first.", lambda w: w[1:]),
        ListChange("Drop the last.", lambda w: w[:-1]),
        ListChange("Move the first to the end.", lambda w: [*w[1:], w[0]]),
        ListChange("Swap the first and the last.", lambda w: [w[-1], *w[1:-1], w[0]]),
        ListChange(f"Remove {named}.", lambda w: [c for c in w if c != named]),
        ListChange(
            f"Turn {named} into {other}.", lambda w: [other if c == named else c for c in w]
        ),
    ]


def _apply_to(words: Words) -> str:
    return f"Apply the rule to {' '.join(words)}."
