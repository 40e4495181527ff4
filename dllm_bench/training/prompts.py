"""Prompts and gold answers from the train splits of the embedded tasks; prompts from FLAN files.

Learned filters, drafters and adapters are trained on these texts. Callers tokenise them.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks import embedded
from dllm_bench.core.benchmark import Encode
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.text import library_errors_named

Pair = tuple[str, str]
"""A prompt and its gold answer, without an end token."""

DRAWN: Mapping[str, embedded.GeneratedTask] = {
    "sentences": embedded.SENTENCES,
    "sentences_spelling": embedded.SPELLING,
    "sentences_misspelled": embedded.MISSPELLED,
    "open_text": embedded.OPEN_TEXT,
}
"""Task -> its problems, of which any number can be drawn. The train splits of other tasks are in
files, all of their forms included.
"""


def task_pairs(task: str, count: int, seed: int) -> list[Pair]:
    """Return `count` pairs of one task; the same for the same seed, a shuffle of the file's order
    unless that is 0. DllmBenchError if its file holds fewer.
    """
    if task in DRAWN:
        return [(p.prompt, p.continuation) for p in DRAWN[task].problems("train", count, seed)]
    pairs = [(prompt, answer) for prompt, answer in embedded.read_lines(embedded.texts_file(task))]
    if len(pairs) < count:
        raise DllmBenchError(
            f"{count} prompts of {task} were asked for, and its train split has {len(pairs)}; give "
            "fewer --prompts, or more --benchmark."
        )
    if seed:
        random.Random(f"{task}/train/{seed}").shuffle(pairs)
    return pairs[:count]


def train_pairs(tasks: Sequence[str], count: int, seed: int) -> list[Pair]:
    """Return `count` pairs from the train splits, one task after the other in turn."""
    per_task = -(-count // len(tasks))
    drawn = [task_pairs(task, per_task, seed) for task in tasks]
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
    rows = _flan_rows(folder)
    chosen = heapq.nsmallest(count, rows, key=lambda row: hash_of([str(seed), *row]))
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
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _flan_row(file, number, line)


def _flan_row(file: Path, number: int, line: bytes) -> tuple[str, str]:
    failed = f"Line {number} of {file} is no FLAN row"
    todo = "each line must be a JSON object in UTF-8 with the fields task and inputs"
    with library_errors_named(failed, todo):
        row: dict[str, Any] = json.loads(line.decode())
        return str(row["task"]), str(row["inputs"])


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
