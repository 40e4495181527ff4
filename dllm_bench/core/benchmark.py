"""What a benchmark offers: requests, and scores of the texts that answer them."""

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
    """What happened in a word: "correct", "wrong", "timeout", …"""
    metrics: Mapping[str, float]
    """All metrics of the sample by name."""
    detail: str = ""
    """Why there is no grade, for `JUDGE_ERROR`."""


@dataclass(frozen=True)
class GradedAnswer:
    """What grading a text looked at."""

    gold: str
    """What is right: the reference answer, or the reference solution of a program."""
    extracted: str
    """What was read of the text."""
    readings: Mapping[str, str] = field(default_factory=dict)
    """Further ways of grading: filter -> what it reads of the text; the one that counts too."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """"<metric>,<filter>" -> value of this text; empty where a program has to run for it."""


def judge_error(detail: str) -> SampleScore:
    """The score of a sample whose grading failed: none, so that it is not taken for a wrong one."""
    return SampleScore(math.nan, JUDGE_ERROR, {}, detail)


class Benchmark(ABC):
    """What to ask and how to grade. Grading needs no model and gives the same for stored texts."""

    name: str
    """Name in records and tables."""

    @property
    def generated(self) -> bool:
        """Whether the package generates the items, so that no file is read for them."""
        return False

    @property
    def runs_code(self) -> bool:
        """Whether grading runs programs that a model wrote."""
        return False

    @property
    def asks_likelihoods(self) -> bool:
        """Whether its requests have options to score, so that nothing is generated."""
        return False

    @property
    def scores_fast(self) -> bool:
        """Whether grading one text takes no time, so that a progress line may show the score."""
        return False

    def check(self) -> None:  # noqa: B027 (a benchmark may have nothing to check)
        """Raise DllmBenchError for what would fail later: names, data, consent; loads no data."""

    @abstractmethod
    def requests(self, encode: Encode) -> Sequence[Request]:
        """All requests in a fixed order; `encode` turns text or chat turns into prompt ids."""

    @abstractmethod
    def dataset_hash(self) -> str:
        """sha256 of the items, templates and few-shot examples behind the requests."""

    @abstractmethod
    def score(self, texts: Mapping[str, str]) -> Mapping[str, SampleScore]:
        """Grade texts by request id; any part of the requests may be given."""

    def answers(self, texts: Mapping[str, str]) -> Mapping[str, GradedAnswer]:
        """What `score` looks at, by request id; empty for a benchmark that does not tell."""
        return {}
