"""The items and training texts that the package reads are the ones that the generators draw."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from dllm_bench.benchmarks.embedded import (
    SPLIT_SIZE,
    TEST,
    TRAIN,
    UNSEEN,
    UNSEEN_SIZE,
    FrozenTask,
    GeneratedTask,
    read_lines,
    texts_file,
)
from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.benchmarks.lm_eval import LmEvalBenchmark
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.training import prompts
from scripts.embedded.items import FROZEN_TASKS as TASKS
from scripts.embedded.items import TEXTS_OF_TASK, splits_of, task_pairs

TEXTS = "texts"
DRAWN = 40


SIZES = {TRAIN: SPLIT_SIZE, TEST: SPLIT_SIZE, UNSEEN: UNSEEN_SIZE, TEXTS: TEXTS_OF_TASK}
FILES = [(name, split) for name in TASKS for split in splits_of(name)]
FILES += [(name, TEXTS) for name in prompts.STORED]


def stored(name: str, part: str) -> list[Any]:
    """Return the items of a split, or the training texts."""
    return read_lines(texts_file(name) if part == TEXTS else TASKS[name].frozen_file(part))


def drawn(name: str, part: str, limit: int) -> list[Any]:
    """Draw the first of what `stored` returns."""
    if part == TEXTS:
        return [list(pair) for pair in task_pairs(name, TRAIN, limit, seed=0)]
    return TASKS[name].draw_items(part, limit)


@pytest.mark.parametrize(("name", "part"), [file for file in FILES if file[1] != UNSEEN])
def test_files_begin_with_what_the_generators_draw(name: str, part: str) -> None:
    assert len(stored(name, part)) == SIZES[part]
    assert stored(name, part)[:DRAWN] == drawn(name, part, DRAWN)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "part"), FILES)
def test_files_hold_what_the_generators_draw(name: str, part: str) -> None:
    assert stored(name, part) == drawn(name, part, SIZES[part])


def test_another_seed_takes_other_texts_and_a_larger_count_more_of_them() -> None:
    few, more = (prompts.task_pairs("minigsm", count, seed=1) for count in (DRAWN, 2 * DRAWN))
    assert few == more[:DRAWN] != prompts.task_pairs("minigsm", DRAWN, seed=0)
    with pytest.raises(DllmBenchError, match="has 4000; give fewer --prompts"):
        prompts.task_pairs("minigsm", TEXTS_OF_TASK + 1, seed=0)


@pytest.mark.parametrize("name", [name for name in TASKS if "/" not in name])
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
