"""Generated tasks: split by content, words of the vocabulary, gold answers right and graded so; the
items that ship are those that the generators draw.

Answers are worked out again from the prompt's text alone, so that a generator that asks one thing
and answers another is found; what a program of minicode_free does is read from its lines. Canonical
programs are our own and run here; nothing a model wrote is executed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from dllm_bench.benchmarks import embedded as sentences
from dllm_bench.benchmarks import evalplus, prompts
from dllm_bench.benchmarks.embedded import (
    SPLIT_SIZE,
    TEST,
    TRAIN,
    UNSEEN,
    UNSEEN_SIZE,
    FrozenTask,
    GeneratedProblem,
    GeneratedTask,
    read_lines,
    split_of,
    texts_file,
)
from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.benchmarks.lm_eval import LmEvalBenchmark, task_file
from dllm_bench.benchmarks.tasks import sources
from dllm_bench.benchmarks.tasks.text_scorers import FAMILIES, ParallelCase
from dllm_bench.benchmarks.tasks.text_scorers import miniparallel as score
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.training.prompts import STORED
from dllm_bench.training.prompts import task_pairs as stored_pairs
from scripts.embedded import tokenizer as embedded
from scripts.embedded.items import FROZEN_TASKS, TEXTS_OF_TASK, splits_of, task_pairs
from scripts.embedded.tasks import minicode, minigsm, minimath, miniparallel, miniread, minirule
from tests.benchmark_helpers import evalplus_benchmark, foreign, gold, lm_eval_benchmark, mean

COUNT = 400
Items = dict[str, list[GeneratedProblem]]
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
def test_items() -> Items:
    return {name: list(task.problems("test", COUNT)) for name, task in TASKS.items()}


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_problem(name: str, test_items: Items) -> None:
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


def equations(answer: str) -> list[tuple[int, str, int, int]]:
    """Return (left, operation, right, result) of an answer's equations, after a check that each is
    right."""
    texts = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", answer)
    found = [(int(left), op, int(right), int(result)) for left, op, right, result in texts]
    for left, op, right, result in found:
        assert minigsm.apply_op(op, left, right) == result
        assert 0 <= result <= minigsm.MAX_VALUE
    return found


def test_minimath_is_worked_right(test_items: Items) -> None:
    sizes = set()
    for problem in test_items["minimath"]:
        asked = problem.prompt.split("\n")[1].rstrip(".?")
        expression = re.sub(r"^(Compute|Find|What is) ", "", asked)
        assert re.fullmatch(r"[-+*() 0-9]+", expression)
        results = [result for *_, result in equations(problem.fields["answer"])]
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


def test_miniread_spans_stand_in_the_passage(test_items: Items) -> None:
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


def test_miniread_counts_are_right(test_items: Items) -> None:
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
def test_minirule_applies_its_rule(name: str, test_items: Items) -> None:
    for problem in test_items[name]:
        rule, question, _ = problem.prompt.split("\n")
        asked, *options = question.removeprefix("Question: ").replace("? ", "?|").split("|")
        result = _result(rule.removeprefix("Rule: "), asked)
        equations(problem.fields["answer"])
        work, final = problem.fields["answer"].split("\n#### ")
        assert final == problem.fields["final"]
        if options:
            offered = {option[-1]: option[:-2] for option in options[0].rstrip(".").split(", ")}
            assert len(set(offered.values())) == len(offered) == 4
            result, shown = result.split()[{True: 0, False: -1}["first?" in asked]], offered[final]
            assert work.endswith(f" {result} {final}.")
            final = shown
        assert final == result


def test_a_range_holds_the_result(test_items: Items) -> None:
    for problem in test_items["minirule_range"]:
        rule, question, _ = problem.prompt.split("\n")
        asked, offered = question.removeprefix("Question: ").replace("? ", "?|").split("|")
        result, final = _result(rule.removeprefix("Rule: "), asked), problem.fields["final"]
        ranges = dict(option.split(" ", 1) for option in offered.rstrip(".").split(", "))
        low, high = ranges[final].split(" to ")
        assert int(low) <= int(result) <= int(high)
        assert problem.fields["answer"].endswith(f" {result} {final}.\n#### {final}")


@pytest.mark.parametrize("name", ["minirule_choice", "minirule_range"])
def test_every_letter_is_right_as_often(name: str, test_items: Items) -> None:
    finals = [p.fields["final"] for p in test_items[name]]
    assert all(finals.count(letter) > COUNT / 8 for letter in minirule.LETTERS)


@pytest.mark.parametrize(("name", "first"), LONGEST)
def test_texts_are_words_of_the_vocabulary(name: str, first: bool, test_items: Items) -> None:
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


SUM = re.compile(r"(\d+) ([-+*]) (\d+)")
OPS = {verb: op for op, verbs in minigsm.VERBS.items() for verb in verbs}
both = pytest.mark.parametrize("task", [minigsm.STORY, minigsm.FREE], ids=lambda task: task.name)
VERB = "|".join(verb for verbs in minigsm.VERBS.values() for verb in verbs)


# --- word problems and minicode -------------------------------------------------------------------


def test_minigsm_arithmetic_is_right(test_items: Items) -> None:
    for problem in test_items["minigsm"]:
        answer = problem.fields["answer"]
        start, *steps = problem.content.split("|")
        asked = [step.split(":") for step in steps]
        assert [verb for verb, _ in asked] == re.findall(VERB, answer)
        before = int(start)
        for (left, op, right, result), (_, number) in zip(equations(answer), asked, strict=True):
            operands = (before, int(number))
            assert (left, right) in {operands, operands if op == "-" else operands[::-1]}
            before = result
        assert answer.endswith(f"\n#### {before}")


def test_canonical_solutions_pass_their_tests(test_items: Items) -> None:
    for problem in test_items["minicode"]:
        scope: dict[str, Any] = {}
        item = problem.fields
        assert problem.continuation == item["canonical_solution"]
        exec(problem.prompt + item["canonical_solution"] + item["test"], scope)
        scope["check"](scope[item["entry_point"]])
        inputs = item["base_input"] + item["plus_input"]
        results = {repr(scope[item["entry_point"]](*args)) for args in inputs}
        assert len(results) >= minicode.MIN_DISTINCT_RESULTS


def results_of(question: str) -> list[int]:
    """Return what there is after each sentence of a question but the last."""
    results: list[int] = []
    for sentence in question.split(". ")[:-1]:
        (number,) = map(int, re.findall(r"\d+", sentence))
        ops = [OPS[word] for word in sentence.rstrip(".").split() if word in OPS]
        results.append(minigsm.apply_op(ops[0], results[-1], number) if ops else number)
    return results


@both
def test_answers_are_worked_right(task: GeneratedTask, test_items: Items) -> None:
    for problem in test_items[task.name]:
        answer, results = problem.fields["answer"], results_of(problem.fields["question"])
        found = equations(answer)
        assert [left for left, *_ in found] == results[:-1]
        assert [result for *_, result in found] == results[1:]
        assert answer.endswith(f"\n#### {results[-1]}")
        stated = [int(n) for n in re.findall(r"(?:has|owns|are|is) (\d+)\b(?! [-+*])", answer)]
        assert set(stated) <= set(results)


def test_the_letter_is_chosen_once_and_kept(test_items: Items) -> None:
    answers = [problem.fields["answer"] for problem in test_items["ministory"]]
    letters = [set(re.findall(r"\b[abcrxy]\b", answer)) for answer in answers]
    assert all(len(used) == 1 for used in letters)
    assert set().union(*letters) == set(minigsm.PARTS.letters)


@both
def test_one_problem_has_many_right_answers(
    task: GeneratedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one length in ministory, of many lengths in minigsm_free."""
    tokenizer: Any = embedded.build_tokenizer()
    steps = minigsm.draw_steps(random.Random(0), 3)
    monkeypatch.setattr(minigsm, "draw_steps", lambda rng, count: steps)
    draw = minigsm.draw_story if task is minigsm.STORY else minigsm.draw_free
    answers = {draw(random.Random(seed)).continuation for seed in range(200)}
    lengths = {len(tokenizer(answer).input_ids) for answer in answers}
    assert len({answer.split("#### ")[1] for answer in answers}) == 1
    if task is minigsm.STORY:
        assert (len(answers), len(lengths)) == (200, 1)
    else:
        assert len(answers) > 190 and len(lengths) > 20


# --- minicode_free --------------------------------------------------------------------------------


def worked_out(text: str) -> str:
    """Return the text with every sum, difference and product of two numbers in place of its
    value."""
    values = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    return SUM.sub(lambda m: str(values[m[2]](int(m[1]), int(m[3]))), text)


def asked(problem: GeneratedProblem) -> list[tuple[str, str]]:
    """Operations and operands of the docstring, worked out."""
    text = worked_out(problem.prompt.split('"""')[1])
    found, form = [], 0 if text.startswith("Start") else 1
    for op, forms in minicode.WORDS.chain.items():
        pattern = forms[form].replace("{0}", r"(\w+)").replace(".", "")
        found += [(m.start(), op, m[1]) for m in re.finditer(pattern, text)]
    return [(op, operand) for _, op, operand in sorted(found)]


def done(problem: GeneratedProblem) -> list[tuple[str, str]]:
    """Operations and operands of the gold program, names that stand for numbers filled in."""
    numbers: dict[str, str] = {}
    current, steps = "a", []
    for line in worked_out(problem.continuation).splitlines():
        found = re.fullmatch(r"    (?:return|(\w) =) (.*)", line)
        if found is None:
            assert line.startswith('    """')
            continue
        target, value = found.groups()
        if value.isdigit():
            numbers[target] = value
            continue
        call = re.fullmatch(r"(max|min)\((\w+), (\w+)\)|(\w+) ([-+*%]) (\w+)", value)
        if call is None:
            assert value == current
            continue
        left, op, right = call[2] or call[4], call[1] or call[5], call[3] or call[6]
        if right == current and left != current and op in "+*":
            left, right = right, left
        assert left == current
        steps.append((op, numbers.get(right, right)))
        current = target
    return steps


def test_gold_programs_do_what_is_asked(test_items: Items) -> None:
    for problem in test_items["minicode_free"]:
        steps = asked(problem)
        assert len(steps) == minicode.FREE_STEPS
        assert done(problem) == steps, problem.prompt + problem.continuation
        stated = re.findall(r"(\d+ [-+*] \d+) = (\d+)", problem.continuation)
        assert all(worked_out(sum_) == value for sum_, value in stated)


def test_one_problem_has_many_right_programs_of_many_lengths() -> None:
    tokenizer: Any = embedded.build_tokenizer()
    steps = [
        ("+", minicode.Operand("4 * 6", "24")),
        ("*", minicode.Operand("9 - 2", "7")),
        ("min", minicode.Operand("30 + 12", "42")),
    ]
    bodies = {minicode.free_body(random.Random(seed), steps) for seed in range(200)}
    assert len(bodies) > 150
    assert len({len(tokenizer(body).input_ids) for body in bodies}) > 20


# --- sentences ------------------------------------------------------------------------------------


Right = Callable[[str, str], bool]
"""(prompt without its last line, answer) -> whether the answer is the one that was asked for."""


def shown(prompt: str) -> str:
    """Return the sentence that a prompt shows."""
    return prompt.partition("sentence: ")[2]


def named(prompt: str) -> list[str]:
    """Return the words that a prompt names."""
    return re.findall(r'"(\w+)"', prompt)


def replaced(prompt: str, answer: str) -> bool:
    old, new = named(prompt)
    words = shown(prompt).split(" ")
    place = words.index(old)
    return words.count(old) == 1 and answer.split(" ") == [*words[:place], new, *words[place + 1 :]]


def deleted(prompt: str, answer: str) -> bool:
    (word,) = named(prompt)
    words = shown(prompt).split(" ")
    words.remove(word)
    return word not in words and answer.split(" ") == words


def inserted(prompt: str, answer: str) -> bool:
    new, old = named(prompt)
    words = shown(prompt).split(" ")
    words.insert(words.index(old) + 1, new)
    return words.count(old) == 1 and answer.split(" ") == words


def mended(prompt: str, answer: str) -> bool:
    pairs = zip(shown(prompt).split(" "), answer.split(" "), strict=True)
    ((wrong, right),) = [(a, b) for a, b in pairs if a != b]
    (first, second) = [i for i in range(len(right)) if wrong[i] != right[i]]
    swapped = wrong[first] == right[second] and wrong[second] == right[first]
    return swapped and second == first + 1 and wrong[0] == right[0] and wrong[-1] == right[-1]


def ordered(prompt: str, answer: str) -> bool:
    parts = re.split(r"\((\d)\) ", prompt.partition("sentence: ")[2])[1:]
    pairs = sorted(zip(parts[::2], parts[1::2], strict=True))
    return answer == " ".join(part.strip() for _, part in pairs)


def found(prompt: str, answer: str) -> bool:
    passage = prompt.removeprefix("Passage: ").partition("\n")[0]
    (word,) = named(prompt)
    having = [one for one in re.split(r"(?<=\.) ", passage) if word in one.lower()]
    return having == [answer]


RIGHT: dict[str, Right] = {
    "repeat": lambda prompt, answer: answer == shown(prompt),
    "replace": replaced,
    "delete": deleted,
    "insert": inserted,
    "order": ordered,
    "find": found,
}


@pytest.mark.parametrize("kind", sentences.CHANGES)
def test_every_answer_is_what_its_prompt_asks_for(kind: str) -> None:
    items = [item for item in sentences.SENTENCES.items("test") if item["kind"] == kind]
    asked = [(item["prompt"].removesuffix("\nAnswer:"), item["answer"]) for item in items]
    if kind == "spelling":  # where no word can be misspelled, the sentence is to be repeated
        asked = [(prompt, answer) for prompt, answer in asked if not prompt.startswith("Repeat")]
        assert len(asked) > 0.9 * len(items)
    assert [pair for pair in asked if not RIGHT.get(kind, mended)(*pair)] == []


def test_kinds_are_about_equally_frequent_and_answers_are_single_lines() -> None:
    items = sentences.SENTENCES.items("test")
    counts = Counter(item["kind"] for item in items)
    assert set(counts) == set(sentences.CHANGES) and min(counts.values()) > 100
    assert all(
        item["answer"] == item["answer"].strip() and "\n" not in item["answer"] for item in items
    )


def test_no_sentence_of_the_test_split_is_shown_in_training() -> None:
    train = [problem.prompt for problem in sentences.SENTENCES.problems("train", 2_000)]
    held_out = sentences.pool("test")
    assert len(held_out) > 400 and not set(held_out) & set(sentences.pool("train"))
    assert not [prompt for prompt in train if any(one in prompt for one in held_out)]


def test_the_sentences_ship_with_their_licence_and_are_small() -> None:
    licence = sentences.POOL.with_name("gsm8k_sentences.LICENSE").read_text()
    assert "MIT License" in licence and "OpenAI" in licence
    assert (
        sentences.POOL.stat().st_size + sentences.SENTENCES.frozen_file().stat().st_size < 200_000
    )


# --- miniparallel: any right answer counts and no other, and only some families leave a choice ----


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


# --- items that ship ------------------------------------------------------------------------------

TEXTS = "texts"
DRAWN = 40
SIZES = {TRAIN: SPLIT_SIZE, TEST: SPLIT_SIZE, UNSEEN: UNSEEN_SIZE, TEXTS: TEXTS_OF_TASK}
FILES = [(name, split) for name in FROZEN_TASKS for split in splits_of(name)]
FILES += [(name, TEXTS) for name in STORED]


def stored(name: str, part: str) -> list[Any]:
    """Return the items of a split, or the training texts."""
    return read_lines(texts_file(name) if part == TEXTS else FROZEN_TASKS[name].frozen_file(part))


def drawn(name: str, part: str, limit: int) -> list[Any]:
    """Draw the first of what `stored` returns."""
    if part == TEXTS:
        return [list(pair) for pair in task_pairs(name, TRAIN, limit, seed=0)]
    return FROZEN_TASKS[name].draw_items(part, limit)


@pytest.mark.parametrize(("name", "part"), [file for file in FILES if file[1] != UNSEEN])
def test_files_begin_with_what_the_generators_draw(name: str, part: str) -> None:
    assert len(stored(name, part)) == SIZES[part]
    assert stored(name, part)[:DRAWN] == drawn(name, part, DRAWN)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "part"), FILES)
def test_files_hold_what_the_generators_draw(name: str, part: str) -> None:
    assert stored(name, part) == drawn(name, part, SIZES[part])


def test_another_seed_takes_other_texts_and_a_larger_count_more_of_them() -> None:
    few, more = (stored_pairs("minigsm", count, seed=1) for count in (DRAWN, 2 * DRAWN))
    assert few == more[:DRAWN] != stored_pairs("minigsm", DRAWN, seed=0)
    with pytest.raises(DllmBenchError, match="has 4000; give fewer --prompts"):
        stored_pairs("minigsm", TEXTS_OF_TASK + 1, seed=0)


@pytest.mark.parametrize("name", TASKS)
def test_no_unseen_item_is_a_test_item(name: str) -> None:
    seen, unseen = (
        {item["prompt"] if "prompt" in item else str(item) for item in without_ids(name, split)}
        for split in (TEST, UNSEEN)
    )
    assert len(unseen) == UNSEEN_SIZE
    assert not seen & unseen


def without_ids(name: str, split: str) -> list[dict[str, object]]:
    """Return the items of a split without what differs between equal items of two splits."""
    items = TASKS[name].items(split)
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


def test_the_hash_of_the_items_is_the_hash_of_their_file() -> None:
    task = FrozenTask("minigsm")
    content = task.frozen_file().read_bytes()
    assert task.items_hash(TEST) == hashlib.sha256(content).hexdigest()
    assert task.items_hash(UNSEEN) not in (None, task.items_hash(TEST))
    assert task.items_hash(TRAIN) is None  # its items are hashed


def test_no_item_is_drawn_to_hash_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("items were drawn")

    monkeypatch.setattr(GeneratedTask, "problems", refuse)
    word = LmEvalBenchmark(
        name="minigsm", task="minigsm", max_new_tokens=64, primary="exact_match,strict-match"
    )
    code = EvalPlusBenchmark(name="minicode", dataset="minicode", max_new_tokens=96)
    assert word.dataset_hash() != code.dataset_hash()
