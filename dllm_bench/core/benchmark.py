"""The contract of a benchmark: it makes requests and grades the texts that answer them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dllm_bench.core.request import Request

Turns = Sequence[Mapping[str, str]]
"""Chat turns: [{"role": "user", "content": "..."}, ...]."""
Encode = Callable[[str | Turns], list[int]]
"""Plain text or chat turns -> prompt ids."""
JUDGE_ERROR: Literal["judge_error"] = "judge_error"
"""Verdict of a sample that has no grade, because grading it failed."""


@dataclass(frozen=True)
class SampleScore:
    """Grade of one sample."""

    value: float
    """The score that counts, in [0, 1]; NaN for a benchmark that grades nothing."""
    verdict: str
    """The outcome in one word: "correct", "wrong", "timeout", …"""
    metrics: Mapping[str, float]
    """All metrics of the sample by name."""
    detail: str = ""
    """Why there is no grade, for `JUDGE_ERROR`."""


@dataclass(frozen=True)
class GradedAnswer:
    """The inputs of grading a text."""

    gold: str
    """The reference answer, or the reference solution of a program."""
    extracted: str
    """The answer extracted from the text."""
    readings: Mapping[str, str] = field(default_factory=dict)
    """All ways of grading, including the one that counts: filter -> the answer it extracts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """"<metric>,<filter>" -> value of this text; empty if that requires running a program."""


def judge_error(detail: str) -> SampleScore:
    """Return a score without a grade for a sample whose grading failed, so that it does not count
    as wrong."""
    return SampleScore(math.nan, JUDGE_ERROR, {}, detail)


class Benchmark(ABC):
    """A set of requests and their grading. Grading needs no model, and stored texts are graded the
    same again."""

    name: str
    """Name in records and tables."""

    @property
    def is_hash_known(self) -> bool:
        """Whether the package knows the items' hash without reading files from elsewhere."""
        return False

    @property
    def runs_code(self) -> bool:
        """Whether grading runs programs that a model wrote."""
        return False

    @property
    def asks_likelihoods(self) -> bool:
        """Whether its requests have options to score; then nothing is generated."""
        return False

    @property
    def scores_fast(self) -> bool:
        """Whether grading a text is so fast that a progress line can show the running score."""
        return False

    def check(self) -> None:  # noqa: B027 (a benchmark may have nothing to check)
        """Raise DllmBenchError for wrong names, missing data or missing consent, without loading
        data."""

    @abstractmethod
    def requests(self, encode: Encode) -> Sequence[Request]:
        """Return all requests in a fixed order; `encode` turns text or chat turns into prompt
        ids."""

    @abstractmethod
    def dataset_hash(self) -> str:
        """Return sha256 of the items, templates and few-shot examples that the requests are made
        from."""

    @abstractmethod
    def score(self, texts: Mapping[str, str]) -> Mapping[str, SampleScore]:
        """Grade texts by request id; any subset of the requests may be given."""

    def answers(self, texts: Mapping[str, str]) -> Mapping[str, GradedAnswer]:
        """Return the inputs of `score` by request id; empty if the benchmark does not report
        them."""
        return {}
