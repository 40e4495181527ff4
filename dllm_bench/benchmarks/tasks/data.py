"""Items of the lm-eval tasks: ours from the generator, the others from original files or the hub.

`rows` gives plain dictionaries with a stable `id`; `dataset` is what the task yaml names as
`custom_dataset`, so that lm-eval's own evaluator sees the same items in the same order. Few-shot
examples are the first of a split that is never graded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.benchmarks import base, minigsm
from dllm_bench.core.request import DllmBenchError

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
HUB = "huggingface.co"
MINIGSM_SIZE = 1000
DEFAULT_SHOTS = 8
MBPP_SPLITS: Mapping[str, range] = {
    "prompt": range(2, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""Split -> task ids; item 1 of the prompt split is left out, the usual three shots are 2, 3, 4."""


@dataclass(frozen=True)
class Source:
    """Where a task's items are: split -> file in a data directory; (id, config) on the hub."""

    files: Mapping[str, str]
    hub: tuple[str, str | None]
    shots: str | None = None
    number: Callable[[int, Row], int] = lambda i, row: i
    splits: Mapping[str, range] | None = None


SOURCES: Mapping[str, Source] = {
    "minigsm": Source({}, ("", None), shots="train"),
    "gsm8k": Source(
        {"test": "gsm8k/test.jsonl", "train": "gsm8k/train.jsonl"},
        ("openai/gsm8k", "main"),
        shots="train",
    ),
    "humaneval": Source({"test": "humaneval/HumanEval.jsonl"}, ("openai/openai_humaneval", None)),
    "mbpp": Source(
        dict.fromkeys(MBPP_SPLITS, "mbpp/mbpp.jsonl"),
        ("google-research-datasets/mbpp", "full"),
        shots="prompt",
        number=lambda i, row: int(row["task_id"]),
        splits=MBPP_SPLITS,
    ),
}


def splits(task: str) -> tuple[str, ...]:
    """Splits that can be graded."""
    return tuple(SOURCES[task].files) or ("test", "train")


def check(task: str, split: str, data_dir: str | None) -> None:
    """Raise if the items cannot be had; reads nothing."""
    source = SOURCES[task]
    base.known(f"split of {task!r}", split, splits(task))
    if not source.files:
        return
    if data_dir is None:
        folder = "datasets--" + source.hub[0].replace("/", "--")
        base.require_download(task, HUB, hub_cache() / folder, source.files[split])
        return
    for name in (split, source.shots or split):
        base.data_file(data_dir, source.files[name], task)


def hub_cache() -> Path:
    """Where the hub's client keeps what it fetched."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


@cache
def rows(task: str, split: str, data_dir: str | None) -> list[Row]:
    """All items of a split in the original order, each with its `id`."""
    source = SOURCES[task]
    if not source.files:
        return _minigsm(split)
    if data_dir is None:
        found = _hub_rows(task, split)
    else:
        found = base.read_jsonl(base.data_file(data_dir, source.files[split], task))
    numbered = [(source.number(i, row), row) for i, row in enumerate(found)]
    if source.splits is not None:
        numbered = [(n, row) for n, row in numbered if n in source.splits[split]]
    return [{"id": f"{task}/{split}/{n}", **row} for n, row in numbered]


def _minigsm(split: str) -> list[Row]:
    return [
        {"id": p.task_id, "question": p.question, "answer": p.answer}
        for p in minigsm.generate(split, MINIGSM_SIZE)
    ]


def _hub_rows(task: str, split: str) -> list[Row]:
    import datasets

    path, config = SOURCES[task].hub
    try:
        return [dict(row) for row in datasets.load_dataset(path, config, split=split)]
    except (OSError, ValueError) as error:
        raise DllmBenchError(
            f"Benchmark {task!r} has no data directory and {path} could not be had from the hub "
            f"({type(error).__name__}); name a directory that holds "
            f"{SOURCES[task].files[split]} with paths.data=DIR."
        ) from error


def shots(task: str, count: int, data_dir: str | None) -> list[Row]:
    """The first `count` few-shot examples."""
    if count == 0:
        return []
    split = SOURCES[task].shots
    found = rows(task, split, data_dir)[:count] if split else []
    if len(found) < count:
        raise DllmBenchError(
            f"Benchmark {task!r} was asked for {count} few-shot examples and has {len(found)}; "
            "set shots lower."
        )
    return found


def dataset(
    task: str,
    split: str = "test",
    limit: int | None = None,
    data_dir: str | None = None,
    shots_count: int = DEFAULT_SHOTS,
    config_source: str = "",
) -> dict[str, Dataset]:
    """The chosen items as lm-eval's split "test", few-shot examples as "shots".

    lm-eval adds `config_source`, the path of the yaml, which is not used.
    """
    from datasets import Dataset

    chosen = {"test": base.choose(rows(task, split, data_dir), limit)}
    if SOURCES[task].shots:
        chosen["shots"] = shots(task, max(shots_count, 1), data_dir)
    return {name: Dataset.from_list(items) for name, items in chosen.items()}
