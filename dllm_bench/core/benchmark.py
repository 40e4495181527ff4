"""What a benchmark offers: requests, and the grades of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dllm_bench.core.request import Request

Turns = Sequence[Mapping[str, str]]  # chat turns: [{"role": "user", "content": "..."}, ...]
Encode = Callable[[str | Turns], list[int]]


@dataclass(frozen=True)
class SampleScore:
    """Outcome of one sample: `value` in [0, 1]; `verdict` names how ("correct", "timeout", …)."""

    value: float
    verdict: str
    metrics: Mapping[str, float]


class Benchmark(Protocol):
    """What to ask and how to grade; scoring is pure and repeatable from stored text."""

    name: str

    def requests(self, encode: Encode) -> Sequence[Request]:
        """All requests in a fixed order; `encode` turns text or chat turns into prompt ids."""

    def dataset_hash(self) -> str:
        """sha256 of the items, templates and few-shot examples behind the requests."""

    def score(self, texts: Mapping[str, str]) -> Mapping[str, SampleScore]:
        """Grade texts by request id."""
