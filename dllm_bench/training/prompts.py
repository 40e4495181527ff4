"""Prompts and gold answers from the train splits of the embedded tasks; prompts from FLAN files.

Learned filters, drafters and the embedded models are all trained on these texts. The test split is
drawn with the same functions, for measurements during training. Callers tokenise the texts.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks.embedded import (
    minicode,
    minigsm,
    minimath,
    miniparallel,
    miniread,
    minirule,
    open_text,
    sentences,
)
from dllm_bench.benchmarks.embedded.generated import GeneratedTask, from_draw, mixture
from dllm_bench.core.benchmark import Encode
from dllm_bench.core.errors import DllmBenchError

Pair = tuple[str, str]
"""A prompt and its gold answer, without an end token."""

STEP_WEIGHTS = (1.0, 1.0, 1.5, 2.0, 2.5)
"""How often minigsm problems of 1 to 5 steps occur in the train split, relative to each other."""
TASKS: Mapping[str, GeneratedTask] = {
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
    "sentences": sentences.TASK,
    "sentences_spelling": sentences.SPELLING,
    "open_text": open_text.TASK,
}
"""Task -> its problems, all of its forms included."""
PROGRAMS: Mapping[str, Callable[[random.Random, str], Iterator[minicode.MinicodeProgram]]] = {
    "minicode": minicode.PROGRAMS,
    "minicode_free": minicode.FREE_PROGRAMS,
}
"""Task of small functions -> its programs."""


def task_pairs(task: str, split: str, count: int, seed: int) -> list[Pair]:
    """Return `count` pairs of one task; the same for the same split and seed."""
    if task in PROGRAMS and split == "train":
        return _program_pairs(task, count, seed)
    if task == "minigsm" and split == "train":
        problems = minigsm.with_step_weights(STEP_WEIGHTS).problems(split, count, seed)
    else:
        problems = TASKS[task].problems(split, count, seed)
    return [(p.prompt, p.continuation) for p in problems]


def _program_pairs(task: str, count: int, seed: int) -> list[Pair]:
    """Return programs of the train split without the inputs that grading needs; prompts may
    repeat."""
    rng = random.Random(f"{task}/train/{seed}")
    programs = PROGRAMS[task](rng, "train")
    return [
        (minicode.prompt_of(p, rng.choice(minicode.WORDS.entry_points)), p.body)
        for p, _ in zip(programs, range(count), strict=False)
    ]


def train_pairs(tasks: Sequence[str], count: int, seed: int) -> list[Pair]:
    """Return `count` pairs from the train splits, one task after the other in turn."""
    per_task = -(-count // len(tasks))
    drawn = [task_pairs(task, "train", per_task, seed) for task in tasks]
    return [pair for turn in zip(*drawn, strict=True) for pair in turn][:count]


def gold_pairs(tasks: Sequence[str], count: int, seed: int) -> list[Pair]:
    """Return `train_pairs`; DllmBenchError for a task without gold answers."""
    pairs = train_pairs(tasks, count, seed)
    if any(not answer for _, answer in pairs):
        raise DllmBenchError(
            f"A task of {', '.join(tasks)} has no gold answers; learn a model's own: `train "
            "drafter … --texts-only`, then `train adapter … --texts FILE`."
        )
    return pairs


def train_prompts(tasks: Sequence[str], count: int, seed: int) -> list[str]:
    """Return the prompts of `train_pairs`."""
    return [prompt for prompt, _ in train_pairs(tasks, count, seed)]


def flan_prompts(folder: Path, per_task: int, seed: int) -> list[str]:
    """Return `per_task` prompts of every task, drawn uniformly from all jsonl rows (task, inputs)
    in `folder`; a task with fewer rows gives all of them.

    The files are read once, and only the chosen prompts are held in memory (reservoir sampling).
    """
    rng = random.Random(f"flan/{seed}")
    kept: dict[str, list[str]] = {}
    seen: dict[str, int] = {}
    for task, text in _flan_rows(folder):
        chosen = kept.setdefault(task, [])
        seen[task] = seen.get(task, 0) + 1
        if len(chosen) < per_task:
            chosen.append(text)
        elif (place := rng.randrange(seen[task])) < per_task:
            chosen[place] = text
    return [text for task in sorted(kept) for text in kept[task]]


def hashed_order(folder: Path, count: int, seed: int) -> list[str]:
    """Return `count` prompts of the jsonl rows (task, inputs) in `folder`, in the order of their
    hashes.

    Tasks are mixed as often as their rows occur. A smaller count gives the first of the same
    prompts. Raises DllmBenchError where there are fewer.
    """

    def place(row: tuple[str, str]) -> str:
        return hash_of([str(seed), *row])

    chosen = heapq.nsmallest(count, _flan_rows(folder), key=place)
    if len(chosen) < count:
        raise DllmBenchError(
            f"{count} prompts were asked for, {folder} holds {len(chosen)}; give fewer --prompts."
        )
    return [text for _, text in chosen]


def _flan_rows(folder: Path) -> Iterator[tuple[str, str]]:
    files = sorted(folder.rglob("*.jsonl")) if folder.is_dir() else []
    if not files:
        raise DllmBenchError(
            f"{folder} holds no .jsonl file; name a directory of FLAN rows with the fields task "
            "and inputs."
        )
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _flan_row(file, number, line)


def _flan_row(file: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row: dict[str, Any] = json.loads(line)
        return str(row["task"]), str(row["inputs"])
    except (ValueError, KeyError, TypeError) as error:
        raise DllmBenchError(
            f"Line {number} of {file} is no FLAN row ({error!r}); each line must be a JSON object "
            "with the fields task and inputs."
        ) from None


def hash_of(prompts: Sequence[str]) -> str:
    """Return sha256 of the prompts in their order."""
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()


def hash_of_rows(folder: Path) -> str:
    """Return the sha256 of all FLAN rows in `folder`, in their order."""
    return hash_of([part for row in _flan_rows(folder) for part in row])


def encoder(encode: Encode, chat: bool) -> Callable[[str], list[int]]:
    """Return a function prompt -> ids that encodes as benchmarks do.

    A prompt is one user turn for chat models, else plain text.
    """
    if not chat:
        return encode
    return lambda text: encode([{"role": "user", "content": text}])
