"""Generated tasks: split by content, words of the vocabulary, gold answers right and graded so.

That a seed always draws the same problems is held by `test_frozen_items`. Answers of minimath,
miniread and minirule are worked out again from the prompt's text alone, so that a generator that
asks one thing and answers another is found.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from dllm_bench.benchmarks import evalplus, prompts
from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask
from dllm_bench.benchmarks.lm_eval import task_file
from dllm_bench.core.errors import DllmBenchError
from scripts.embedded import tokenizer as embedded
from scripts.embedded.items import FROZEN_TASKS
from scripts.embedded.tasks import minigsm, minimath, miniread, minirule
from tests.benchmark_helpers import evalplus_benchmark, foreign, gold, lm_eval_benchmark, mean

COUNT = 400
TASKS: Mapping[str, GeneratedTask] = {
    name: task for name, task in FROZEN_TASKS.items() if "/" not in name
}
LONGEST = {  # (task, vocabulary of the first models) -> tokens of a prompt, of an answer
    **{(name, False): (96, 56) for name in TASKS if name.startswith(("minimath", "minir"))},
    ("minigsm", False): (64, 56),
    ("minicode", False): (64, 56),
    ("ministory", False): (80, 224),
    ("minigsm_free", False): (64, 96),
    ("minicode_free", True): (64, 96),
}


@pytest.fixture(scope="module")
def test_items() -> dict[str, list[GeneratedProblem]]:
    return {name: list(task.problems("test", COUNT)) for name, task in TASKS.items()}


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_problem(name: str, test_items: dict[str, list[GeneratedProblem]]) -> None:
    train = list(TASKS[name].problems("train", COUNT))
    assert {p.content for p in train}.isdisjoint(p.content for p in test_items[name])
    assert {p.prompt for p in train}.isdisjoint(p.prompt for p in test_items[name])
    assert len({p.prompt for p in train}) == COUNT
    assert list(TASKS[name].problems("train", 50, seed=1)) != train[:50]
    with pytest.raises(ValueError, match="splits 'train' and 'test'"):
        next(TASKS[name].problems("dev", 1))


def test_both_forms_of_a_case_are_in_one_split() -> None:
    for seed in range(50):
        draws = (minirule.draw_free, minirule.draw_choice)
        free, choice = (draw(random.Random(seed)) for draw in draws)
        assert free.content == choice.content
        assert free.prompt != choice.prompt


def _check_equations(text: str) -> list[int]:
    """Return the results of all equations of an answer, after a check that each is right."""
    found = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", text)
    for left, op, right, result in found:
        assert minigsm.apply_op(op, int(left), int(right)) == int(result)
        assert 0 <= int(result) <= minigsm.MAX_VALUE
    return [int(result) for *_, result in found]


def test_minimath_is_worked_right(test_items: dict[str, list[GeneratedProblem]]) -> None:
    sizes = set()
    for problem in test_items["minimath"]:
        asked = problem.prompt.split("\n")[1].rstrip(".?")
        expression = re.sub(r"^(Compute|Find|What is) ", "", asked)
        assert re.fullmatch(r"[-+*() 0-9]+", expression)
        results = _check_equations(problem.fields["answer"])
        assert len(results) == len(re.findall(r"[-+*]", expression))
        assert results[-1] == eval(expression)
        assert problem.fields["answer"].endswith(f"\\boxed{{ {results[-1]}}}.")
        sizes.add(len(results))
    assert sizes == set(range(minimath.MIN_OPS, minimath.MAX_OPS + 1))


def _passage(prompt: str) -> tuple[dict[str, str], dict[str, str], str]:
    """(who -> where, who -> what, question) of a prompt."""
    passage, question, _ = prompt.split("\n")
    places = re.findall(r"(\w+) lives ([^.]+)\.", passage)
    places += re.findall(r"The home of (\w+) is ([^.]+)\.", passage)
    things = re.findall(r"(\w+) (?:has|owns) (\d+ \w+)\.", passage)
    return dict(places), dict(things), question.removeprefix("Question: ")


def _found(question: str, places: dict[str, str], things: dict[str, str]) -> str:
    """Return the passage's answer to a span question."""
    for form, facts in ((r"Where does (\w+) live\?", places), (r"What does (\w+) have\?", things)):
        if asked := re.fullmatch(form, question):
            return facts.get(asked[1], miniread.UNANSWERABLE)
    raise AssertionError(f"Unknown form of question: {question}")


def test_miniread_spans_stand_in_the_passage(test_items: dict[str, list[GeneratedProblem]]) -> None:
    missing = 0
    for problem in test_items["miniread"]:
        places, things, question = _passage(problem.prompt)
        wanted = _found(question, places, things)
        work, answer = problem.fields["answer"].split(".\n#### ")
        assert answer == wanted
        assert problem.fields["answers"] == ([] if wanted == "unanswerable" else [answer])
        asked = work.removesuffix(f" {answer}")
        assert asked != work
        assert f" {asked}" in question.removesuffix("?")
        missing += wanted == "unanswerable"
    assert 0.1 < missing / COUNT < 0.3


def test_miniread_counts_are_right(test_items: dict[str, list[GeneratedProblem]]) -> None:
    kinds = set()
    for problem in test_items["miniread_count"]:
        _, things, question = _passage(problem.prompt)
        item = next(i for i in minigsm.ITEMS if f" {i}" in question)
        counts = {w: int(t.split()[0]) for w, t in things.items() if t.endswith(item)}
        named = [counts[w] for w in re.findall(r"[A-Z][a-z]+", question) if w in counts]
        if question.startswith("Who"):
            wanted = max((w for w in counts if w in question), key=counts.__getitem__)
        elif "people" in question:
            wanted = str(len(counts))
        else:
            wanted = str(sum(named) if "together" in question else named[0] - named[1])
        work, answer = problem.fields["answer"].split(".\n#### ")
        assert answer == wanted
        assert all(counts[who] == int(n) for who, n in re.findall(r"([A-Z][a-z]+) (\d+)", work))
        kinds.add(re.sub(r"[A-Z][a-z]+|\d+", "", question.replace(item, ""))[:12])
    assert len(kinds) == 4


def _list_after(rule: str, words: list[str]) -> list[str]:
    """Return the list after applying all sentences of a rule."""
    for sentence in re.findall(r"[^.]+\.", rule):
        sentence = sentence.strip()
        named = sentence.rstrip(".").split()
        if sentence == "Reverse the list.":
            words = list(reversed(words))
        elif sentence.startswith("Drop"):
            words = words[1:] if "first" in sentence else words[:-1]
        elif sentence.startswith("Move"):
            words = words[1:] + words[:1]
        elif sentence.startswith("Swap"):
            words = words[-1:] + words[1:-1] + words[:1]
        elif sentence.startswith("Remove"):
            words = [w for w in words if w != named[1]]
        else:
            words = [named[3] if w == named[1] else w for w in words]
    return words


def _result(rule: str, question: str) -> str:
    """Return the result of a rule for the case of a question."""
    if operation := re.fullmatch(r"a @ b means (.+)\.", rule):
        values = dict(zip("ab", re.findall(r"\d+", question), strict=True))
        return str(eval(re.sub(r"\b[ab]\b", lambda m: values[m[0]], operation[1])))
    case = question.split(".")[0].removeprefix("Apply the rule to ").split()
    if " becomes " in rule:
        meaning = dict(pair.split(" becomes ") for pair in rule.rstrip(".").split(", "))
        return " ".join(meaning[word] for word in case)
    return " ".join(_list_after(rule, case))


@pytest.mark.parametrize("name", ["minirule", "minirule_choice"])
def test_minirule_applies_its_rule(
    name: str, test_items: dict[str, list[GeneratedProblem]]
) -> None:
    for problem in test_items[name]:
        rule, question, _ = problem.prompt.split("\n")
        asked, *options = question.removeprefix("Question: ").replace("? ", "?|").split("|")
        result = _result(rule.removeprefix("Rule: "), asked)
        _check_equations(problem.fields["answer"])
        work, final = problem.fields["answer"].split("\n#### ")
        assert final == problem.fields["final"]
        if options:
            offered = {option[-1]: option[:-2] for option in options[0].rstrip(".").split(", ")}
            assert len(set(offered.values())) == len(offered) == 4
            result, shown = result.split()[{True: 0, False: -1}["first?" in asked]], offered[final]
            assert work.endswith(f" {result} {final}.")
            final = shown
        assert final == result


def test_a_range_holds_the_result(test_items: dict[str, list[GeneratedProblem]]) -> None:
    for problem in test_items["minirule_range"]:
        rule, question, _ = problem.prompt.split("\n")
        asked, offered = question.removeprefix("Question: ").replace("? ", "?|").split("|")
        result, final = _result(rule.removeprefix("Rule: "), asked), problem.fields["final"]
        ranges = dict(option.split(" ", 1) for option in offered.rstrip(".").split(", "))
        low, high = ranges[final].split(" to ")
        assert int(low) <= int(result) <= int(high)
        assert problem.fields["answer"].endswith(f" {result} {final}.\n#### {final}")


@pytest.mark.parametrize("name", ["minirule_choice", "minirule_range"])
def test_every_letter_is_right_as_often(
    name: str, test_items: dict[str, list[GeneratedProblem]]
) -> None:
    finals = [p.fields["final"] for p in test_items[name]]
    assert all(finals.count(letter) > COUNT / 8 for letter in minirule.LETTERS)


@pytest.mark.parametrize(("name", "first"), LONGEST)
def test_texts_are_words_of_the_vocabulary(
    name: str, first: bool, test_items: dict[str, list[GeneratedProblem]]
) -> None:
    tokenizer: Any = embedded.build_tokenizer(first=first)
    first_word = len(embedded.SPECIALS) + len(embedded.BYTES)
    for problem in test_items[name]:
        prompt, answer = (tokenizer(t).input_ids for t in (problem.prompt, problem.continuation))
        assert prompt + answer == tokenizer(problem.prompt + problem.continuation).input_ids
        assert min(prompt + answer) >= first_word
        assert len(prompt) <= LONGEST[name, first][0] and len(answer) < LONGEST[name, first][1]


@pytest.mark.parametrize("name", [*sorted(TASKS.keys() - prompts.GENERATED), "miniparallel"])
def test_the_harness_asks_and_grades(name: str) -> None:
    if name in evalplus.GENERATED:
        benchmark: Any = evalplus_benchmark(name, limit=20)
    else:
        file = task_file(name)
        primary = f"{file['metric_list'][0]['metric']},{file['filter_list'][0]['name']}"
        split = {"split": "shuffle"} if name == "miniparallel" else {}
        benchmark = lm_eval_benchmark(name, primary, limit=20, **split)
    asked = list(benchmark.requests(lambda text: [len(text)]))
    assert [r.prompt for r in asked] == [
        item["prompt"] if "prompt" in item else minigsm.prompt_of(item["question"])
        for item in benchmark.items
    ]
    texts = gold(benchmark)
    assert mean(benchmark.score(texts)) == 1
    assert mean(benchmark.score(foreign(texts))) < 0.5
    assert replace(benchmark, limit=3).dataset_hash() != benchmark.dataset_hash()


def test_a_task_without_enough_prompts_says_so(monkeypatch) -> None:
    monkeypatch.setattr("dllm_bench.benchmarks.embedded.MOST_REPEATS", 50)
    three = [GeneratedProblem(text, text, "", {}) for text in "abc"]
    task = GeneratedTask("letters", lambda rng, split: (rng.choice(three) for _ in count()))
    assert {one.prompt for one in task.problems("train", 3)} == set("abc")
    with pytest.raises(DllmBenchError, match="no more than 3 different ones"):
        list(task.problems("train", 4))
