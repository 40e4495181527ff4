"""minirule: a rule is stated in the prompt and applied to a case, made from a seed.

Rules are a new operation on two numbers, a word for a word, or changes of a list. Form "free" wants
the result, as KOR-Bench does; form "choice" offers four options and wants a letter, as MMLU does:
of a list its first or last word is asked. The answer works the case, each step behind what it
applies, and ends in ``#### X``. Options stand before their letters, words before what is said of
them: models of this size read on from what they find. Both forms of a case are in one split.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from dllm_bench.benchmarks.embedded import generated as mini
from dllm_bench.benchmarks.embedded.minigsm import ITEMS, MAX_VALUE, apply_op
from dllm_bench.benchmarks.embedded.miniread import COLORS

LETTERS = "ABCD"
MAX_OPERAND = 20
LIST_SIZE = (4, 5)
Words = list[str]


Asked = tuple[str, tuple[str, ...], str]
"""(question, sentences of work, what follows ####)"""


@dataclass(frozen=True)
class Case:
    """A rule, what it is applied to, the lines of work, the result, and words to mislead with."""

    rule: str
    asked: str
    work: tuple[str, ...]
    result: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A change of a list of words: its sentence and what it does."""

    sentence: str
    apply: Callable[[Words], Words]


def free(rng: random.Random) -> mini.Problem:
    """One problem of form "free"."""
    return _draw(rng, _free)


def choice(rng: random.Random) -> mini.Problem:
    """One problem of form "choice"."""
    return _draw(rng, _choice)


def _draw(rng: random.Random, ask: Callable[[random.Random, Case], Asked]) -> mini.Problem:
    case = rng.choice((_operation, _words, _changes))(rng)
    question, work, final = ask(rng, case)
    prompt = f"Rule: {case.rule}\nQuestion: {question}\nAnswer:"
    answer = " ".join(work) + f"\n#### {final}"
    return mini.Problem(f"{case.rule}|{case.asked}", prompt, answer, {"final": final})


def _free(rng: random.Random, case: Case) -> Asked:
    return case.asked, case.work, " ".join(case.result)


def _choice(rng: random.Random, case: Case) -> Asked:
    """The question with four options; the work ends in the right one."""
    end = rng.choice((0, -1))
    right, more = case.result[end], {0: " Which is first?", -1: " Which is last?"}[end]
    wrong = rng.sample(sorted({*case.others, *case.result} - {right}), len(LETTERS) - 1)
    options = dict(zip(rng.sample([right, *wrong], len(LETTERS)), LETTERS, strict=True))
    offered = ", ".join(f"{option} {letter}" for option, letter in options.items())
    question = f"{case.asked}{more * (len(case.result) > 1)} {offered}."
    return question, (*case.work, f"{right} {options[right]}."), options[right]


def _operation(rng: random.Random) -> Case:
    """``a @ b means ( a * 2 ) + b``: two operations on both numbers and a constant."""
    while True:
        (first, second), constant = rng.sample("ab", 2), rng.randint(2, 9)
        inner_op, outer_op = rng.choice("+-*"), rng.choice("+-*")
        inner, outer = rng.choice(((str(constant), second), (second, str(constant))))
        rule = f"a @ b means ( {first} {inner_op} {inner} ) {outer_op} {outer}."
        values = {n: rng.randint(1, MAX_OPERAND) for n in "ab"} | {str(constant): constant}
        between = apply_op(inner_op, values[first], values[inner])
        result = apply_op(outer_op, between, values[outer])
        if 0 <= between <= MAX_VALUE and 0 <= result <= MAX_VALUE:
            break
    work = (
        f"{values[first]} {inner_op} {values[inner]} = {between}.",
        f"{between} {outer_op} {values[outer]} = {result}.",
    )
    near = [v for v in (between, *values.values(), *range(result - 5, result + 6)) if v >= 0]
    others = tuple(str(v) for v in near if v <= MAX_VALUE)
    return Case(rule, f"What is {values['a']} @ {values['b']}?", work, (str(result),), others)


def _words(rng: random.Random) -> Case:
    """A word stands for each of four colours."""
    meaning = dict(zip(rng.sample(COLORS, 4), rng.sample(ITEMS, 4), strict=True))
    case = [rng.choice(list(meaning)) for _ in range(rng.randint(*LIST_SIZE))]
    rule = ", ".join(f"{color} becomes {item}" for color, item in meaning.items()) + "."
    work = tuple(f"{color} {meaning[color]}." for color in case)
    result = tuple(meaning[color] for color in case)
    return Case(rule, _apply_to(case), work, result, tuple(meaning.values()))


def _changes(rng: random.Random) -> Case:
    """Two changes of a list, one after the other."""
    case = rng.sample(COLORS, rng.randint(*LIST_SIZE))
    first = rng.choice(_known_changes(rng, case))
    between = first.apply(case)
    known = [c for c in _known_changes(rng, between) if c.sentence != first.sentence]
    second = rng.choice(known)
    after = second.apply(between)
    work = tuple(
        f"{change.sentence.removesuffix('.')}: {' '.join(words)}."
        for change, words in ((first, between), (second, after))
    )
    rule = f"{first.sentence} {second.sentence}"
    return Case(rule, _apply_to(case), work, tuple(after), COLORS)


def _known_changes(rng: random.Random, words: Words) -> list[Change]:
    """The changes there are; those of a word name one that is in the list."""
    named, other = rng.choice(words), rng.choice([c for c in COLORS if c not in words])
    return [
        Change("Reverse the list.", lambda w: w[::-1]),
        Change("Drop the first.", lambda w: w[1:]),
        Change("Drop the last.", lambda w: w[:-1]),
        Change("Move the first to the end.", lambda w: [*w[1:], w[0]]),
        Change("Swap the first and the last.", lambda w: [w[-1], *w[1:-1], w[0]]),
        Change(f"Remove {named}.", lambda w: [c for c in w if c != named]),
        Change(f"Turn {named} into {other}.", lambda w: [other if c == named else c for c in w]),
    ]


def _apply_to(words: Words) -> str:
    return f"Apply the rule to {' '.join(words)}."
