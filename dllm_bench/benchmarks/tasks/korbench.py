"""KOR-Bench (Apache-2.0): zero-shot prompts and matchers of the published harness.

The answer is the text in [[ ]]. How it is compared depends on the category, on the rule and, for
some operations, on the item. Arithmetic is computed from a syntax tree and never run as code.
Mathematical expressions are compared by math-verify where the original calls sympy. The mixed sets
and sub-questions of KOR-Bench are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dllm_bench.benchmarks.tasks import TEXTS, Doc, math_answers

Matcher = Callable[[str, str], bool]
"""(answer, gold answer) -> whether they match."""
RULE_TITLES = {"counterfactual": "Story"}
LATEX_ITEMS = {
    18, 73, 74, 77, 94, 115, 116, 117, 121, 122, 123, 125, 131, 132, 134, 135, 136, 141, 143,
    *range(145, 148), 149, *range(151, 157), 160, 161, 162, 164, 165, 166, 170, 206, 209,
    *range(211, 216), 217, 218,
}  # fmt: skip
"""Operation items whose answer is a mathematical expression."""
INEQUALITY_ITEMS = {178, 179}
"""Operation items whose answer is a set of bounds."""
BRACKETS = (r"\[\[\s*(.*?)\s*\]\]", r"\$\\boxed\{(.*?)\}\$", r"\[\s*(.*?)\s*\]")


def prompt(doc: Doc) -> str:
    """Return the zero-shot prompt of an item's category."""
    category = doc["category"]
    opening, *instructions = TEXTS["korbench"][category]
    title = RULE_TITLES.get(category, category.capitalize())
    listed = "\n".join(instructions)
    return (
        f"{opening}\n\n### Instructions:\n\n{listed}\n\n### {title} Rule:\n\n{doc['rule']}\n\n"
        f"### Question:\n{doc['question']}\n\n### Answer:\n"
    )


def score(doc: Doc, results: list[str]) -> dict[str, float]:
    """Grade as right if the item's matcher accepts the answer."""
    return {"accuracy": float(matcher(doc)(results[0], doc["answer"]))}


def matcher(doc: Doc) -> Matcher:
    """Return the matcher for an item's category, rule and index."""
    rule, index = doc["rule_id"], int(doc["index"])
    if doc["category"] == "operation":
        return _operation(rule, index, doc["answer"])
    if doc["category"] == "puzzle":
        rule_matcher = PUZZLES.get(rule, same_word_characters)
        return lambda text, gold: rule_matcher(inner(text), inner(gold))
    if doc["category"] == "logic":
        return any_order if rule == "5" else partial(same_tight, dropped='"\n .')
    return same_tight


def _operation(rule: str, index: int, answer: str) -> Matcher:
    """Return the matcher of an operation item."""
    if index in INEQUALITY_ITEMS:
        return same_inequalities
    if rule == "18":
        return same_characters
    if rule in {"23", "24", "25"}:
        return same_numbers
    if index in LATEX_ITEMS:
        return same_mathematics
    return alternatives if "or" in answer else same_tight


def bracketed(text: str) -> str | None:
    """Return the first text in [[ ]], else in \\boxed, else in [ ]; None if there is none."""
    matches = (re.search(pattern, text, re.DOTALL) for pattern in BRACKETS)
    return next((match[1].strip() for match in matches if match), None)


def inner(text: str) -> str | None:
    """Return the first text in [[ ]]; None if there is none."""
    match = re.search(r"\[\[(.*?)\]\]", text, re.DOTALL)
    return match[1] if match else None


def tight(text: str, dropped: str = '"\n []') -> str | None:
    """Return the bracketed text without the characters `dropped`."""
    content = bracketed(text)
    return None if content is None else content.translate(str.maketrans("", "", dropped))


def same_tight(text: str, gold: str, dropped: str = '"\n []') -> bool:
    """Return whether they are equal apart from the characters `dropped`."""
    answer = tight(text, dropped)
    return answer is not None and answer == tight(gold, dropped)


def any_order(text: str, gold: str) -> bool:
    """Return whether the parts between semicolons are the same; only the inner ones may be
    reordered, as published.

    The first and the last part include the outer brackets.
    """
    answer, expected = (tight(one, '"\n .') for one in (text, gold))
    parts = (sorted(f"[[{one}]]".split(";")) for one in (answer, expected))
    return answer is not None and next(parts) == next(parts)


def same_mathematics(text: str, gold: str) -> bool:
    """Return whether both have as many alternatives, and each gold one equals a given one."""
    answer, expected = (_expressions(one) for one in (text, gold))
    if len(answer) != len(expected) or not answer:
        return False
    return all(any(math_answers.equivalent(w, f) for f in answer) for w in expected)


def _expressions(text: str) -> list[str]:
    tidy = re.sub(
        r"\\[()\[\]]|\\text\{.*?\}|\\(left|right|displaystyle)", "", bracketed(text) or ""
    )
    last = re.sub(r'["\n\[\]$]', "", tidy).replace("\\\\", "\\").rpartition("=")[2]
    return [part.strip() for part in last.split("or") if part.strip()]


def same(form: Callable[[Any], object]) -> Callable[[Any, Any], bool]:
    """Return the matcher of texts, or of None, that have the same form."""
    return lambda text, gold: form(text) == form(gold)


same_inequalities = same(lambda t: sorted(re.findall(r"([≥≤])\s*(-?\d+\.?\d*)", tight(t) or "")))
"""The same signs and bounds; the bounded expressions are not compared."""
same_characters = same(lambda t: sorted(re.sub(r"\W+", "", tight(t) or "")))
"""The same letters and digits, in any order (sets)."""
same_numbers = same(lambda t: [*map(int, re.findall(r"\d+", tight(t) or ""))])
"""The same whole numbers, in the same order (matrices)."""
alternatives = same(lambda t: sorted((tight(t) or "").replace("\\text{or}", "or").split("or")))
"""The same alternatives, in any order."""

# Matchers of puzzles; both texts are what is in [[ ]], None if there is nothing.


def letters(text: str | None) -> str:
    """Return the letters only, in lower case."""
    return re.sub(r"[^A-Za-z]", "", text or "").lower()


def equation(text: str | None, gold: str | None) -> bool:
    """Apply rule 9: the operators of the gold answer in order, and a left side with its value."""
    answer, expected = (signs(one).partition("=") for one in (text, gold))
    operators = [re.findall(r"[+\-*/]", side[0]) for side in (answer, expected)]
    value = re.search(r"-?\d+", expected[2])
    if operators[0] != operators[1] or value is None:
        return False
    return arithmetic(answer[0]) == int(value[0])


def twenty_four(text: str | None, gold: str | None) -> bool:
    """Apply rule 10: the given numbers make 24."""
    left, expected = signs(text).split("=")[0], signs((gold or "").split("\n")[0]).split("=")[0]
    same = sorted(re.sub(r"\W+", "", left)) == sorted(re.sub(r"\W+", "", expected))
    return same and arithmetic(left) == 24


def same_word_characters(text: str | None, gold: str | None) -> bool:
    """Apply the other rules: the same letters and digits in order, whatever is between them."""
    answer, expected = (re.sub(r"\W+", "", one or "") for one in (text, gold))
    return text is not None and answer == expected


PUZZLES: Mapping[str, Callable[[str | None, str | None], bool]] = {
    # the same letters
    "1": lambda text, gold: bool(letters(text)) and letters(text) == letters(gold),
    # one of the accepted words
    "2": lambda text, gold: letters(text) in (gold or "").split(","),
    # the same words in any order
    "3": lambda text, gold: (
        sorted(re.findall(r"\w+", (text or "").lower())) == sorted((gold or "").split(" "))
    ),
    # a part of the accepted answer
    "4": lambda text, gold: bool(letters(text)) and letters(text) in (gold or ""),
    # the same assignments in any order
    "5": same(lambda text: sorted(re.sub(r"\s+", "", text or "").split(","))),
    "9": equation,
    "10": twenty_four,
    # equal apart from commas, spaces and brackets
    "18": same(lambda text: re.sub(r"[,\s\[\]]+", "", text or "")),
}
"""Rule -> its matcher."""


def signs(text: str | None) -> str:
    """Return the text with * and - for the signs of times and minus."""
    return (text or "").replace("×", "*").replace("−", "-")


def arithmetic(text: str) -> float | None:
    """Return the value of an expression of + - * / and numbers; None for anything else."""
    try:
        return math_answers.arithmetic(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
