"""The generators of the embedded tasks; the package reads what `scripts.embedded.items` writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from dllm_bench.benchmarks.embedded import GeneratedProblem, split_of


class HasContent(Protocol):
    """What `from_draw` draws."""

    @property
    def content(self) -> str:
        """The text whose hash decides the split."""


C = TypeVar("C", bound=HasContent)
Draw = Callable[[random.Random], GeneratedProblem]
"""Draws one problem of either split."""


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
