"""The interface of a task whose problems are generated: problems, splits, items.

To add a task, write a function that draws one `GeneratedProblem` from a random stream, wrap it as
`TASK = GeneratedTask("name", from_draw(draw))`, list it in `GENERATED` of `tasks/sources.py`, and
add its task file (`tasks/NAME.yaml`) and its configuration (`conf/benchmark/NAME.yaml`).

The split of a problem is decided by a hash of its content (the question, without its wording), so
the train and test splits never share a problem, for any seed. Within a split no prompt occurs
twice.

The test items are read from `items/NAME.jsonl.xz`, written once by `scripts/embedded/items.py`:
drawing them would take seconds in every process. A run's identity contains the hash of the file.
The split `unseen` contains the test problems drawn after these, for confirming claims on new items.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

FROZEN = Path(__file__).parent / "items"
SPLITS = ("train", TEST := "test", UNSEEN := "unseen")
TEST_ONE_IN = 8
"""One problem in this many belongs to the test split (by the hash of its content)."""
SPLIT_SIZE = 1000
"""Items of a split; training draws as many problems as it needs instead."""
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


class HasContent(Protocol):
    """What `from_draw` draws."""

    @property
    def content(self) -> str:
        """The text whose hash decides the split."""


C = TypeVar("C", bound=HasContent)
Draw = Callable[[random.Random], GeneratedProblem]
"""Draws one problem of either split."""
Stream = Callable[[random.Random, str], Iterator[GeneratedProblem]]
"""(random stream, split) -> endless problems of that split; a prompt may come twice."""


@dataclass(frozen=True)
class GeneratedTask:
    """A named source of generated problems."""

    name: str
    """Prefix of the item ids and part of the seed."""
    stream: Stream
    """Where the problems come from, see `from_draw`."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The names that `items` takes."""
        return SPLITS

    def problems(self, split: str, limit: int, seed: int = 0) -> Iterator[GeneratedProblem]:
        """Yield `limit` problems with distinct prompts; a larger limit extends the same list.

        Raises ValueError for an unknown split.
        """
        if split not in SPLITS[:2]:
            raise ValueError(f"{self.name} has the splits 'train' and 'test', not {split!r}")
        seen: set[str] = set()
        for problem in self.stream(random.Random(f"{self.name}/{split}/{seed}"), split):
            if len(seen) >= limit:
                return
            if problem.prompt not in seen:
                seen.add(problem.prompt)
                yield problem

    def items(self, split: str) -> list[dict[str, Any]]:
        """Return the `SPLIT_SIZE` items of a split, each a plain dictionary with a stable `id`; of
        `unseen` the `UNSEEN_SIZE` ones.
        """
        if split not in (TEST, UNSEEN):
            return self.draw_items(split)
        lines = lzma.decompress(self.frozen_file(split).read_bytes()).splitlines()
        return [json.loads(line) for line in lines]

    def draw_items(self, split: str, limit: int = SPLIT_SIZE) -> list[dict[str, Any]]:
        """Draw the first `limit` items of a split, which `items` returns of the frozen ones.

        Unseen ones have no prompt of a test item, since they continue the test split's list.
        """
        first, last = (SPLIT_SIZE, SPLIT_SIZE + UNSEEN_SIZE) if split == UNSEEN else (0, limit)
        drawn = self.problems(TEST if split == UNSEEN else split, last)
        problems = islice(drawn, first, first + limit)
        return [{"id": f"{self.name}/{split}/{i}", **p.fields} for i, p in enumerate(problems)]

    def frozen_file(self, split: str = TEST) -> Path:
        """Return the file of the test or unseen items: a JSON object a line, compressed by xz."""
        name = self.name.replace("/", "-")
        return FROZEN / f"{name}{'' if split == TEST else '-' + split}.jsonl.xz"

    def items_hash(self, split: str) -> str | None:
        """Return the sha256 of the file with a split's items; None if they are drawn."""
        if split not in (TEST, UNSEEN):
            return None
        return hashlib.sha256(self.frozen_file(split).read_bytes()).hexdigest()


def split_of(content: str) -> str:
    """Return the split that a problem with this content belongs to."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_ONE_IN == 0 else "train"


def from_draw(draw: Callable[[random.Random], C]) -> Callable[[random.Random, str], Iterator[C]]:
    """Return the stream that draws problems, or programs, and keeps those of the split."""

    def stream(rng: random.Random, split: str) -> Iterator[C]:
        while True:
            drawn = draw(rng)
            if split_of(drawn.content) == split:
                yield drawn

    return stream


def mixture(*draws: Draw) -> Draw:
    """Return a draw that picks one of several draws each time, all with the same chance."""
    return lambda rng: rng.choice(draws)(rng)


def text_problem(
    content: str, prompt: str, answer: str, grading: Mapping[str, Any]
) -> GeneratedProblem:
    """Return a problem whose item holds `prompt`, `answer` and the fields only a grader reads."""
    fields = {"prompt": prompt, "answer": answer, **grading}
    return GeneratedProblem(content, prompt, f" {answer}", fields)
