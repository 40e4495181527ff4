"""The embedded tasks' items, which are read from files, and the interface of their generators.

To add a task, write a function that draws one `GeneratedProblem` from a random stream, wrap it as
`TASK = GeneratedTask("name", from_draw(draw))` in `scripts/embedded/tasks`, list it in
`scripts/embedded/items.py`, which writes the files, and its name in `EMBEDDED` of
`tasks/sources.py`, and add its task file (`tasks/NAME.yaml`) and its configuration
(`conf/benchmark/NAME.yaml`).

The split of a problem is decided by a hash of its content (the question, without its wording), so
the train and test splits never share a problem, for any seed. Within a split no prompt occurs
twice. A run's identity contains the hash of the file with its items. The split `unseen` contains
the test problems drawn after the test items, for confirming claims on new items; `train` gives
few-shot examples.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError

FROZEN = Path(__file__).parent / "items"
TEXTS = Path(__file__).parent / "texts"
SPLITS = (TRAIN := "train", TEST := "test", UNSEEN := "unseen")
TEST_ONE_IN = 8
"""One problem in this many belongs to the test split (by the hash of its content)."""
SPLIT_SIZE = 1000
"""Items of a split; training draws as many problems as it needs instead."""
MOST_REPEATS = 100_000
"""Known prompts drawn one after the other, after which a stream has no others."""
UNSEEN_SIZE = 200
"""Items of the split `unseen`."""


@dataclass(frozen=True)
class GeneratedProblem:
    """One problem with its gold answer."""

    content: str
    """The question without its wording; the hash of this text decides the split."""
    prompt: str
    """The whole plain prompt."""
    continuation: str
    """The gold answer as it follows the prompt, a leading space included."""
    fields: Mapping[str, Any]
    """Fields of the item: what the harness builds the prompt from and grades with."""


Stream = Callable[[random.Random, str], Iterator[GeneratedProblem]]
"""(random stream, split) -> endless problems of that split; a prompt may come twice."""


@dataclass(frozen=True)
class FrozenTask:
    """A named set of items, stored in a file for each split."""

    name: str
    """Prefix of the item ids and of the files."""
    splits: tuple[str, ...] = field(default=SPLITS, kw_only=True)
    """The names that `items` takes."""

    def items(self, split: str) -> list[dict[str, Any]]:
        """Return the items of a split, each a plain dictionary with a stable `id`."""
        return read_lines(self.frozen_file(split))

    def frozen_file(self, split: str = TEST) -> Path:
        """Return the file of a split's items: a JSON object a line, compressed by xz."""
        name = self.name.replace("/", "-")
        return FROZEN / f"{name}{'' if split == TEST else '-' + split}.jsonl.xz"

    def items_hash(self, split: str) -> str | None:
        """Return the sha256 of the file with a split's items; None for `train`, whose items enter
        a run's identity themselves.
        """
        if split == TRAIN:
            return None
        return hashlib.sha256(self.frozen_file(split).read_bytes()).hexdigest()


@dataclass(frozen=True)
class GeneratedTask(FrozenTask):
    """A set whose problems can be drawn, which the frozen items were."""

    stream: Stream
    """Where the problems come from. The name is part of the seed."""

    def problems(self, split: str, limit: int, seed: int = 0) -> Iterator[GeneratedProblem]:
        """Yield `limit` problems with distinct prompts; a larger limit extends the same list.

        Raises ValueError for an unknown split; DllmBenchError if the stream has no `limit` prompts.
        """
        if split not in (TRAIN, TEST):
            raise ValueError(f"{self.name} has the splits 'train' and 'test', not {split!r}")
        seen, repeats = set[str](), 0
        for problem in self.stream(random.Random(f"{self.name}/{split}/{seed}"), split):
            if len(seen) >= limit:
                return
            repeats = repeats + 1 if problem.prompt in seen else 0
            if not repeats:
                seen.add(problem.prompt)
                yield problem
            elif repeats == MOST_REPEATS:
                raise DllmBenchError(
                    f"{limit} prompts of {self.name} were asked for, and its {split} split has no "
                    f"more than {len(seen)} different ones; ask for fewer."
                )

    def items(self, split: str) -> list[dict[str, Any]]:
        """Return the items of a split, those of `train` drawn."""
        return self.draw_items(split) if split == TRAIN else super().items(split)

    def draw_items(self, split: str, limit: int = SPLIT_SIZE) -> list[dict[str, Any]]:
        """Draw the first `limit` items of a split, which `items` returns of the frozen ones.

        Unseen ones have no prompt of a test item, since they continue the test split's list.
        """
        first, last = (SPLIT_SIZE, SPLIT_SIZE + UNSEEN_SIZE) if split == UNSEEN else (0, limit)
        drawn = self.problems(TEST if split == UNSEEN else split, last)
        problems = islice(drawn, first, first + limit)
        return [{"id": f"{self.name}/{split}/{i}", **p.fields} for i, p in enumerate(problems)]


def texts_file(task: str) -> Path:
    """Return the file with a task's texts for training: [prompt, answer] a line."""
    return TEXTS / f"{task}.jsonl.xz"


def read_lines(file: Path) -> list[Any]:
    """Return what the lines of a compressed file hold, each in JSON."""
    return [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]


def split_of(content: str) -> str:
    """Return the split that a problem with this content belongs to."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_ONE_IN == 0 else "train"


def text_problem(
    content: str, prompt: str, answer: str, grading: Mapping[str, Any]
) -> GeneratedProblem:
    """Return a problem whose item holds `prompt`, `answer` and the fields only a grader reads."""
    fields = {"prompt": prompt, "answer": answer, **grading}
    return GeneratedProblem(content, prompt, f" {answer}", fields)
