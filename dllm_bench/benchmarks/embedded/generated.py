"""What the generated tasks minimath, miniread and minirule share: problems, splits, rows.

A task draws problems from a random stream; a hash of a problem's content (its wording left out)
decides its split, so that no seed can mix them, and no prompt comes twice. `rows` are the items a
harness reads. What a problem is about lies in the tasks' own files.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SPLITS = ("train", "test")
TEST_ONE_IN = 8
"""One problem in this many belongs to the test split (by hash of its content)."""
TEST_SIZE = 1000


@dataclass(frozen=True)
class Problem:
    """One item: the whole `prompt`, the gold `answer` behind a space, and what a grader reads."""

    content: str
    prompt: str
    answer: str
    facts: Mapping[str, Any]


Draw = Callable[[random.Random], Problem]


def split_of(content: str) -> str:
    """The split a problem belongs to."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_ONE_IN == 0 else "train"


def generate(task: str, draw: Draw, split: str, limit: int, seed: int = 0) -> Iterator[Problem]:
    """Yield `limit` problems with distinct prompts of a split, the same for a seed."""
    if split not in SPLITS:
        raise ValueError(f"{task} has the splits 'train' and 'test', not {split!r}")
    rng = random.Random(f"{task}/{split}/{seed}")
    seen: set[str] = set()
    while len(seen) < limit:
        problem = draw(rng)
        if split_of(problem.content) == split and problem.prompt not in seen:
            seen.add(problem.prompt)
            yield problem


def mixture(*draws: Draw) -> Draw:
    """One of several draws at a time, all as often."""
    return lambda rng: rng.choice(draws)(rng)


def rows(task: str, draw: Draw, split: str) -> list[dict[str, Any]]:
    """The items of a split as plain dictionaries with stable ids."""
    problems = generate(task, draw, split, TEST_SIZE)
    return [
        {"id": f"{task}/{split}/{i}", "prompt": p.prompt, "answer": p.answer, **p.facts}
        for i, p in enumerate(problems)
    ]
