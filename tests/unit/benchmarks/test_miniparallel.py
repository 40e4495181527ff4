"""miniparallel: any right answer counts and no other, and only some families leave a choice.

Right answers are worked out again from what a problem shows, without the families' own functions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import split_of
from dllm_bench.benchmarks.tasks import sources
from dllm_bench.benchmarks.tasks.miniparallel import FAMILIES, ParallelCase, score
from scripts.embedded import tokenizer as embedded
from scripts.embedded.tasks import miniparallel

MAX_NEW_TOKENS = 32
SHOWN = 40
ONE_ANSWER = {"copy", "reverse", "sort", "replace_index", "insert_index", "remove_index"}


def is_right(item: dict[str, Any], text: str) -> bool:
    return score(item, [text]) == {"valid": 1.0}


def _items(family: str) -> list[dict[str, Any]]:
    return sources.GENERATED["miniparallel"].items(family)[:SHOWN]


def _square_obeys(given: list[str], answer: list[str], boxes: bool) -> bool:
    """Return whether every row, column and, if asked, box holds each number once, and givens
    stand."""
    lines = [answer[4 * i : 4 * i + 4] for i in range(4)] + [answer[i::4] for i in range(4)]
    if not boxes:
        return all(sorted(line) == sorted(given) for line in lines)
    lines += [[answer[i + j] for j in (0, 1, 4, 5)] for i in (0, 2, 8, 10)]
    stand = all(g in ("x", a) for g, a in zip(given, answer, strict=True))
    return stand and all(sorted(line) == list("1234") for line in lines)


def _changed_somewhere(change: str, given: list[str], name: str, answer: list[str]) -> bool:
    """Return whether one place of the line was changed: undone there, the line is the given one."""
    if change == "remove":
        return any([*answer[:i], n, *answer[i:]] == given for i, n in enumerate(given))
    at = answer.index(name)
    undone = [given[at]] if change == "replace" else []
    return answer[:at] + undone + answer[at + 1 :] == given


def _obeys(item: dict[str, Any], answer: list[str]) -> bool:
    """Return whether an answer keeps the rule, read from the item."""
    given, place, family = item["words"].split(), item["place"], item["family"]
    change, _, where = family.partition("_")
    if where == "square" or change == "sudoku":
        return _square_obeys(given, answer, boxes=change == "sudoku")
    if where == "random":
        return _changed_somewhere(change, given, item["name"], answer)
    if where == "index":
        moved = {"replace": (1, 1), "insert": (0, 1), "remove": (1, 0)}[change]
        rest = given[:place] + given[place + moved[0] :]
        return answer == rest[:place] + [item["name"]] * moved[1] + rest[place:]
    whole = {"copy": given, "reverse": given[::-1], "sort": sorted(given)}
    return answer == whole[change] if change in whole else sorted(answer) == sorted(given)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_right_answer_keeps_the_rule(family: str) -> None:
    for item in _items(family):
        case = ParallelCase(tuple(item["words"].split()), item["place"], item["name"])
        answers = FAMILIES[family](case)
        assert len(set(answers)) == len(answers)
        assert all(_obeys(item, list(answer)) for answer in answers)
        assert (len(answers) == 1) == (family in ONE_ANSWER) or family == "sudoku"
        assert is_right(item, f" {item['answer']}\n")
        assert not is_right(item, f"{item['answer']} {item['answer']}")
        assert not is_right(item, "")


def test_numbers_of_answers() -> None:
    case = ParallelCase(("Ann", "Ben", "Cap", "Dan"), 2, "Zoe")
    counts = {name: len(FAMILIES[name](case)) for name in FAMILIES if name != "sudoku"}
    assert counts == dict.fromkeys(ONE_ANSWER, 1) | {
        "shuffle": 23, "replace_random": 4, "insert_random": 5, "remove_random": 4,
        "latin_square": 576,
    }  # fmt: skip
    assert len(FAMILIES["sudoku"](ParallelCase(("x",) * 16))) == 288


def test_a_shuffled_line_is_another_line() -> None:
    item = _items("shuffle")[0]
    assert not is_right(item, item["words"])
    assert not is_right(item, " ".join([item["words"].split()[0]] * len(item["words"].split())))


def test_training_draws_all_families_and_no_test_problem() -> None:
    train = list(miniparallel.TASK.problems("train", 600))
    assert Counter(p.fields["family"] for p in train).keys() == FAMILIES.keys()
    assert all(split_of(p.content) == "train" for p in train)
    prompts = {p.prompt for p in train}
    assert prompts.isdisjoint(item["prompt"] for family in FAMILIES for item in _items(family))


def test_answers_are_words_of_the_vocabulary_and_fit() -> None:
    tokenizer: Any = embedded.build_tokenizer()
    first_word = len(embedded.SPECIALS) + len(embedded.BYTES)
    for problem in miniparallel.TASK.problems("test", 300):
        prompt, answer = (tokenizer(t).input_ids for t in (problem.prompt, problem.continuation))
        assert prompt + answer == tokenizer(problem.prompt + problem.continuation).input_ids
        assert min(answer) >= first_word
        assert len(answer) < MAX_NEW_TOKENS
