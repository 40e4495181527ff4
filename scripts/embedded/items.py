"""Draw the items and training texts of every embedded task and write the files the package reads.

    .venv/bin/python -m scripts.embedded.items [TASK ...]

Only after a change of a generator that is meant to change its problems: the hash of a file is part
of the identity of all runs on its task.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks.embedded import (
    FROZEN,
    HELD_OUT,
    SENTENCES,
    SPLITS,
    TEST,
    TEXTS,
    TRAIN,
    GeneratedTask,
    texts_file,
)
from dllm_bench.training.prompts import DRAWN, Pair
from scripts.embedded.tasks import (
    from_draw,
    minicode,
    minigsm,
    minimath,
    miniparallel,
    miniread,
    minirule,
    mixture,
)

TEXTS_OF_TASK = 4000
"""Training texts in the file of a task."""
STEP_WEIGHTS = (1.0, 1.0, 1.5, 2.0, 2.5)
"""How often minigsm problems of 1 to 5 steps occur in training, relative to each other."""
FROZEN_TASKS: Mapping[str, GeneratedTask] = {
    task.name: task
    for task in (
        minigsm.TASK, minimath.TASK, miniread.SPAN, miniread.COUNT, minirule.FREE, minirule.CHOICE,
        minirule.RANGE, minigsm.STORY, minigsm.FREE, SENTENCES, minicode.TASK, minicode.FREE,
        *miniparallel.OF_FAMILY.values(),
    )
}  # fmt: skip
"""Task with files of items -> its problems; the families of miniparallel are tasks."""
TRAINED: Mapping[str, GeneratedTask] = {
    "minigsm": minigsm.TASK,
    "minicode": minicode.TASK,
    "minimath": minimath.TASK,
    "miniread": GeneratedTask(
        "miniread",
        from_draw(mixture(miniread.draw_span, miniread.draw_span, miniread.draw_count)),
    ),
    "minirule": GeneratedTask(
        "minirule", from_draw(mixture(minirule.draw_free, minirule.draw_choice))
    ),
    "minirule_range": minirule.RANGE,
    "ministory": minigsm.STORY,
    "minigsm_free": minigsm.FREE,
    "minicode_free": minicode.FREE,
    "miniparallel": miniparallel.TASK,
    **DRAWN,
}
"""Task that models are trained on -> its problems, all of its forms included."""
PROGRAMS: Mapping[str, Callable[[random.Random, str], Iterator[minicode.MinicodeProgram]]] = {
    "minicode": minicode.PROGRAMS,
    "minicode_free": minicode.FREE_PROGRAMS,
}
"""Task of small functions -> its programs."""


def task_pairs(task: str, split: str, count: int, seed: int) -> list[Pair]:
    """Return `count` prompts of one task with their answers; the same for the same split and
    seed."""
    if task in PROGRAMS and split == TRAIN:
        return _program_pairs(task, count, seed)
    drawn = TRAINED[task]
    if task == "minigsm" and split == TRAIN:
        drawn = minigsm.with_step_weights(STEP_WEIGHTS)
    return [(p.prompt, p.continuation) for p in drawn.problems(split, count, seed)]


def _program_pairs(task: str, count: int, seed: int) -> list[Pair]:
    """Return programs of the train split without the inputs that grading needs; prompts may
    repeat."""
    rng = random.Random(f"{task}/train/{seed}")
    programs = PROGRAMS[task](rng, TRAIN)
    return [
        (minicode.prompt_of(p, rng.choice(minicode.WORDS.entry_points)), p.body)
        for p, _ in zip(programs, range(count), strict=False)
    ]


def splits_of(name: str) -> Sequence[str]:
    """Return the splits of a task that have files; a family of miniparallel is a split itself."""
    if name in DRAWN:
        return tuple(HELD_OUT)
    return (TEST,) if "/" in name else SPLITS


def write(names: Sequence[str]) -> None:
    """Write the files of each named task, or of all."""
    FROZEN.mkdir(exist_ok=True)
    TEXTS.mkdir(exist_ok=True)
    for name, task in FROZEN_TASKS.items():
        for split in splits_of(name) if name in names or not names else ():
            _write_lines(task.frozen_file(split), task.draw_items(split))
    for name in TRAINED.keys() - DRAWN.keys():
        if name in names or not names:
            _write_lines(texts_file(name), task_pairs(name, TRAIN, TEXTS_OF_TASK, seed=0))


def _write_lines(file: Path, rows: Iterable[Any]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    content = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    file.write_bytes(content)
    print(f"{file.name}: {text.count(chr(10))} lines, {len(content):,} bytes")


if __name__ == "__main__":
    write(sys.argv[1:])
