"""Generated tasks: what ships is what the generators draw, held-out prompts are never trained on,
texts are words of the vocabulary, gold answers are graded right and those of other items wrong.
"""

from __future__ import annotations

import hashlib
import random
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.benchmarks import embedded as shipped
from dllm_bench.benchmarks import evalplus, prompts
from dllm_bench.benchmarks.embedded import HELD_OUT, TEST, TRAIN, UNSEEN, GeneratedTask
from dllm_bench.benchmarks.lm_eval import task_file
from dllm_bench.benchmarks.tasks import sources
from dllm_bench.benchmarks.tasks.text_scorers import FAMILIES, ParallelCase
from dllm_bench.benchmarks.tasks.text_scorers import miniparallel as score
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.training.prompts import DRAWN as ENDLESS
from dllm_bench.training.prompts import task_pairs as stored_pairs
from scripts.embedded import tokenizer as embedded
from scripts.embedded.items import FROZEN_TASKS, TEXTS_OF_TASK, TRAINED, splits_of, task_pairs
from scripts.embedded.tasks import minigsm, minirule
from tests.benchmark_helpers import evalplus_benchmark, foreign, gold, lm_eval_benchmark, mean

TEXTS = "texts"
DRAWN = 40
SIZES = {TRAIN: 1000, TEXTS: TEXTS_OF_TASK, **{one: len(every) for one, every in HELD_OUT.items()}}
STORED = [name for name in TRAINED if name not in ENDLESS]
FILES = [(name, split) for name in FROZEN_TASKS for split in splits_of(name)]
FILES += [(name, TEXTS) for name in STORED]
SHORT = [(name, UNSEEN) for name in ("minigsm", "minirule", "minicode", "sentences")]
KNOWN = read_yaml(Path(__file__).with_name("gold.yaml"))


def stored(name: str, part: str) -> list[Any]:
    """Return the items of a split, or the training texts."""
    file = shipped.texts_file(name) if part == TEXTS else FROZEN_TASKS[name].frozen_file(part)
    return shipped.read_lines(file)


def drawn(name: str, part: str, limit: int) -> list[Any]:
    """Draw the first of what `stored` returns."""
    if part == TEXTS:
        return [list(pair) for pair in task_pairs(name, TRAIN, limit, seed=0)]
    return FROZEN_TASKS[name].draw_items(part, limit)


WHOLE_FILES = [
    pytest.param(*file, SIZES[file[1]], marks=getattr(pytest.mark, tier))
    for file in FILES
    for tier in ("exhaustive" if file in SHORT else "drill",)
]


@pytest.mark.parametrize(
    ("name", "part", "first"), [*((*f, DRAWN) for f in FILES if SIZES[f[1]] >= 1000), *WHOLE_FILES]
)
def test_files_hold_what_the_generators_draw(name: str, part: str, first: int) -> None:
    assert len(stored(name, part)) == SIZES[part]
    assert stored(name, part)[:first] == drawn(name, part, first)


def prompt_of(row: Any) -> str:
    if isinstance(row, list):
        return str(row[0])
    return row.get("prompt") or minigsm.prompt_of(row["question"])


def test_no_held_out_prompt_is_trained_on_or_comes_twice() -> None:
    found = {file: list(map(prompt_of, stored(*file))) for file in FILES}
    trained = {one for file, every in found.items() if file[1] in (TRAIN, TEXTS) for one in every}
    for name in FROZEN_TASKS:
        held_out = [one for split in HELD_OUT for one in found.get((name, split), ())]
        assert len(set(held_out)) == len(held_out), name
        assert trained.isdisjoint(held_out), name


def test_no_sentence_of_the_test_split_is_shown_in_training() -> None:
    train = [problem.prompt for problem in shipped.SENTENCES.problems("train", 500)]
    held_out = shipped.pool("test")
    assert len(held_out) > 400 and not set(held_out) & set(shipped.pool("train"))
    assert not [prompt for prompt in train if any(one in prompt for one in held_out)]


def test_both_forms_of_a_case_are_in_one_split() -> None:
    for seed in range(50):
        draws = (minirule.draw_free, minirule.draw_choice)
        free, choice = (draw(random.Random(seed)) for draw in draws)
        assert free.content == choice.content and free.prompt != choice.prompt


@pytest.mark.parametrize(("name", "first", "most_asked", "most_answered"), KNOWN["longest"])
def test_texts_are_words_of_the_vocabulary_and_equations_right(
    name: str, first: bool, most_asked: int, most_answered: int
) -> None:
    tokenizer: Any = embedded.build_tokenizer(first=first)
    first_word = len(embedded.SPECIALS) + len(embedded.BYTES)
    for asked, answered in stored(name, TEXTS)[:300]:
        prompt, answer = (tokenizer(text).input_ids for text in (asked, answered))
        assert prompt + answer == tokenizer(asked + answered).input_ids
        words = answer if name == "miniparallel" else prompt + answer  # a Sudoku's x is none
        assert min(words) >= first_word
        assert len(prompt) <= most_asked and len(answer) < most_answered
        for left, op, right, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", answered):
            assert minigsm.apply_op(op, int(left), int(right)) == int(result), answered


def test_another_seed_takes_other_texts_and_a_larger_count_more_of_them() -> None:
    few, more = (stored_pairs("minigsm", count, seed=1) for count in (DRAWN, 2 * DRAWN))
    assert few == more[:DRAWN] != stored_pairs("minigsm", DRAWN, seed=0)
    with pytest.raises(DllmBenchError, match="has 4000; give fewer --prompts"):
        stored_pairs("minigsm", TEXTS_OF_TASK + 1, seed=0)


def test_the_sentences_ship_with_their_licence() -> None:
    licence = shipped.POOL.with_name("gsm8k_sentences.LICENSE").read_text()
    assert "MIT License" in licence and "OpenAI" in licence


def test_a_stream_gives_distinct_prompts_by_its_seed_until_it_has_no_more(monkeypatch) -> None:
    monkeypatch.setattr("dllm_bench.benchmarks.embedded.MOST_REPEATS", 500)
    letters = [shipped.GeneratedProblem(text, text, "", {}) for text in "abcdefgh"]
    task = GeneratedTask("letters", lambda rng, split: (rng.choice(letters) for _ in count()))
    one, other = ([p.prompt for p in task.problems("train", 8, seed=seed)] for seed in (0, 1))
    assert set(one) == set(other) == set("abcdefgh") and one != other
    with pytest.raises(DllmBenchError, match="no more than 8 different ones"):
        list(task.problems("train", 9))
    with pytest.raises(ValueError, match="splits 'train' and 'test'"):
        next(task.problems("dev", 1))


WHOLE = {name for name in FROZEN_TASKS if "/" not in name} - prompts.GENERATED.keys()


@pytest.mark.parametrize("name", [*sorted(WHOLE), "miniparallel"])
def test_the_harness_asks_and_grades(name: str) -> None:
    if name in evalplus.GENERATED:
        benchmark: Any = evalplus_benchmark(name, limit=20)
    else:
        file = task_file(name)
        primary = f"{file['metric_list'][0]['metric']},{file['filter_list'][0]['name']}"
        split = {"split": "shuffle"} if name == "miniparallel" else {}
        benchmark = lm_eval_benchmark(name, primary, limit=20, **split)
    asked = list(benchmark.requests(lambda text: [len(text)]))
    assert [r.prompt for r in asked] == list(map(prompt_of, benchmark.items))
    texts = gold(benchmark)
    assert mean(benchmark.score(texts)) == 1 and mean(benchmark.score(foreign(texts))) < 0.5


def test_the_hash_of_a_benchmark_is_that_of_its_file_and_draws_no_item(monkeypatch) -> None:
    monkeypatch.setattr(GeneratedTask, "problems", lambda *_: pytest.fail("items were drawn"))
    task = shipped.FrozenTask("minigsm")
    assert task.items_hash(TEST) == hashlib.sha256(task.frozen_file().read_bytes()).hexdigest()
    assert task.items_hash(UNSEEN) not in (None, task.items_hash(TEST))
    assert task.items_hash(TRAIN) is None  # its items are hashed
    word, code = lm_eval_benchmark("minigsm"), evalplus_benchmark("minicode")
    assert word.dataset_hash() != code.dataset_hash()


# --- miniparallel: any right answer counts and no other, and only some families leave a choice ----


def is_right(item: dict[str, Any], text: str) -> bool:
    return score(item, [text]) == {"valid": 1.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gold_answer_is_right_once(family: str) -> None:
    for item in sources.GENERATED["miniparallel"].items(family)[:DRAWN]:
        assert is_right(item, f" {item['answer']}\n")
        assert not is_right(item, f"{item['answer']} {item['answer']}") and not is_right(item, "")


def test_numbers_of_answers() -> None:
    case = ParallelCase(("Ann", "Ben", "Cap", "Dan"), 2, "Zoe")
    answers = {name: FAMILIES[name](case) for name in FAMILIES if name != "sudoku"}
    assert {name: len(set(found)) for name, found in answers.items()} == KNOWN["answers"]
    assert len(FAMILIES["sudoku"](ParallelCase(("x",) * 16))) == 288


def test_a_shuffled_line_is_another_line() -> None:
    item = sources.GENERATED["miniparallel"].items("shuffle")[0]
    assert not is_right(item, item["words"])
    assert not is_right(item, " ".join([item["words"].split()[0]] * len(item["words"].split())))
