"""Measurements that length rules read from json files: step times and calibration temperatures.

A file is one that `dllm-bench train` wrote, or one shipped below `assets/`. Only its content is
part of a run's identity, never its path. Plain Python: the load simulation uses the same values.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Proposal
from dllm_bench.paths import place_of
from dllm_bench.registry import register

Value = TypeVar("Value")


def read_json(source: str, make: Callable[[Any], Value], what: str, command: str) -> Value:
    """What `make` finds in the json at `source`; a sentence where it finds nothing."""
    try:
        return make(json.loads(place_of(source).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DllmBenchError(
            f"{source!r} holds no {what} ({type(error).__name__}); make one with "
            f"`dllm-bench {command}` and name the file it writes."
        ) from error


@register("length.step_profile")
@dataclass(frozen=True)
class StepProfile:
    """Measured steps per second of steps that feed `tokens` tokens, sizes rising from 1."""

    tokens: tuple[int, ...]
    steps_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = self.tokens[:1] == (1,) and all(a < b for a, b in pairwise(self.tokens))
        fits = len(self.tokens) == len(self.steps_per_s) and min(self.steps_per_s, default=0) > 0
        if not (rising and fits):
            raise DllmBenchError(
                f"A profile has sizes {list(self.tokens)} with steps per second "
                f"{list(self.steps_per_s)}; give rising sizes from 1, each with a rate above 0."
            )

    @property
    def largest(self) -> int:
        """Tokens of the largest measured step."""
        return self.tokens[-1]

    def step_s(self, tokens: int) -> float:
        """Seconds of a step, linear between measured sizes."""
        if not 1 <= tokens <= self.largest:
            raise DllmBenchError(
                f"A step of {tokens} tokens is wanted, the profile knows 1 to {self.largest}; "
                "measure larger steps with `dllm-bench train sps MODEL --batches …`."
            )
        right = bisect_left(self.tokens, tokens)
        if self.tokens[right] == tokens:
            return 1 / self.steps_per_s[right]
        (t0, t1), (r0, r1) = self.tokens[right - 1 : right + 1], self.steps_per_s[right - 1 :][:2]
        part = (tokens - t0) / (t1 - t0)
        return (1 - part) / r0 + part / r1

    def rate(self, tokens: int) -> float:
        """Steps per second."""
        return 1 / self.step_s(tokens)


@register("length.read_step_profile")
def read_step_profile(source: str) -> StepProfile:
    """The profile in a file that `dllm-bench train sps` wrote; assets/… are shipped ones."""
    return read_json(
        source,
        lambda plain: StepProfile(
            tuple(map(int, plain["tokens"])), tuple(map(float, plain["steps_per_s"]))
        ),
        "step profile",
        "train sps MODEL",
    )


def check_step_profile(source: str, model: str) -> None:
    """Refuse a file that says another model took the steps: they say nothing about this one."""
    whose: str | None = read_json(
        source,
        lambda plain: plain.get("model", {}).get("name"),
        "step profile",
        "train sps MODEL",
    )
    if whose not in (None, model):
        raise DllmBenchError(
            f"Step profile {source!r} was measured with {whose}, and {model} is asked about; "
            f"measure one with `dllm-bench train sps {model}` and name its file."
        )


@register("length.temperatures")
@dataclass(frozen=True)
class Temperatures:
    """One temperature per position; positions beyond the last have 1."""

    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in self.values):
            raise DllmBenchError(
                f"Temperatures {list(self.values)} are given for the positions of a draft; give "
                "numbers above 0."
            )

    def chances(self, logits: Sequence[float]) -> list[float]:
        """Chance of every token to be accepted if all before it are."""
        scales = [*self.values, *[1.0] * len(logits)]
        return [sigmoid(logit / scale) for logit, scale in zip(logits, scales, strict=False)]


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), for any logit."""
    return (1 + math.tanh(logit / 2)) / 2


def chances(proposal: Proposal, temperatures: Temperatures) -> list[float]:
    """The same of a proposal with survival estimates."""
    assert proposal.survival_N is not None  # the draft gives survival estimates
    return temperatures.chances(proposal.survival_N.double().tolist())


@register("length.read_temperatures")
def read_temperatures(source: str | None) -> Temperatures:
    """The temperatures in a file that `dllm-bench train temperatures` wrote; None: none."""
    if source is None:
        return Temperatures()
    return read_json(
        source,
        lambda plain: Temperatures(tuple(map(float, plain["temperatures"]))),
        "temperatures",
        "train temperatures RUN",
    )
