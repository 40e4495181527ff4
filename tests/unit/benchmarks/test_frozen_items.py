"""The test items that the package reads are the ones that the generators draw."""

from __future__ import annotations

import hashlib

import pytest

from dllm_bench.benchmarks.embedded import minigsm
from dllm_bench.benchmarks.embedded.generated import SPLIT_SIZE, TEST, UNSEEN, UNSEEN_SIZE
from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.benchmarks.lm_eval import LmEvalBenchmark
from scripts.embedded.items import frozen_tasks

TASKS = frozen_tasks()
DRAWN = 40


@pytest.mark.parametrize("name", TASKS)
def test_frozen_items_are_what_the_generator_draws(name: str) -> None:
    frozen = TASKS[name].items(TEST)
    assert len(frozen) == SPLIT_SIZE
    assert frozen[:DRAWN] == TASKS[name].draw_items(TEST, DRAWN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TASKS)
def test_all_frozen_items_are_what_the_generator_draws(name: str) -> None:
    assert TASKS[name].items(TEST) == TASKS[name].draw_items(TEST)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in TASKS if "/" not in name])
def test_unseen_items_are_drawn_after_the_test_items(name: str) -> None:
    frozen, task = TASKS[name].items(UNSEEN), TASKS[name]
    assert frozen == task.draw_items(UNSEEN)
    assert len(frozen) == UNSEEN_SIZE


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
    content = minigsm.TASK.frozen_file().read_bytes()
    assert minigsm.TASK.items_hash(TEST) == hashlib.sha256(content).hexdigest()
    assert minigsm.TASK.items_hash(UNSEEN) not in (None, minigsm.TASK.items_hash(TEST))
    assert minigsm.TASK.items_hash("train") is None  # drawn, so its items are hashed


def test_no_item_is_drawn_to_hash_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("items were drawn")

    for task in TASKS.values():
        monkeypatch.setattr(type(task), "problems", refuse)
    word = LmEvalBenchmark(
        name="minigsm", task="minigsm", max_new_tokens=64, primary="exact_match,strict-match"
    )
    code = EvalPlusBenchmark(name="minicode", dataset="minicode", max_new_tokens=96)
    assert word.dataset_hash() != code.dataset_hash()
