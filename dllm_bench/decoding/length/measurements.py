"""Measurements that length rules read from json files: step times and calibration temperatures.

Step times are DSpark's SPS(B) (section 3.2.2): profiled once per machine and model by
`dllm-bench train sps`. Temperatures calibrate a confidence head (Sequential Temperature Scaling,
section 3.2.1): `dllm-bench train temperatures` fits them. A file is one that these commands wrote,
or one shipped below `assets/`. Only its content is part of a run's identity, never its path. Plain
Python: the load simulation uses the same values.
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
from dllm_bench.core.transfer import to_host
from dllm_bench.paths import place_of
from dllm_bench.registry import register

Parsed = TypeVar("Parsed")


def read_measurement(
    source: str, parse: Callable[[Any], Parsed], what: str, command: str
) -> Parsed:
    """What `parse` makes of the json file at `source`; DllmBenchError if there is no such thing."""
    try:
        return parse(json.loads(place_of(source).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DllmBenchError(
            f"{source!r} holds no {what} ({type(error).__name__}); make one with "
            f"`dllm-bench {command}` and name the file it writes."
        ) from error


@register("length.step_profile")
@dataclass(frozen=True)
class StepProfile:
    """Measured speed of a machine and model: steps per second by the tokens fed in a step.

    Linear interpolation of seconds between measured sizes. Nothing is known beyond the largest
    size, so no larger step is scheduled.
    """

    tokens: tuple[int, ...]
    """Measured step sizes, rising from 1."""
    steps_per_s: tuple[float, ...]
    """Speed at each of these sizes, above 0."""

    def __post_init__(self) -> None:
        rising = self.tokens[:1] == (1,) and all(a < b for a, b in pairwise(self.tokens))
        fits = len(self.tokens) == len(self.steps_per_s) and min(self.steps_per_s, default=0) > 0
        if not (rising and fits):
            raise DllmBenchError(
                f"A step profile has sizes {list(self.tokens)} with steps per second "
                f"{list(self.steps_per_s)}; give rising sizes from 1, each with a speed above 0."
            )

    @property
    def largest(self) -> int:
        """Tokens of the largest measured step."""
        return self.tokens[-1]

    def step_s(self, tokens: int) -> float:
        """Seconds of a step that feeds `tokens` tokens; DllmBenchError if that was not measured."""
        if not 1 <= tokens <= self.largest:
            raise DllmBenchError(
                f"A step of {tokens} tokens is needed, and the step profile covers 1 to "
                f"{self.largest}; measure larger steps with "
                "`dllm-bench train sps MODEL --batches …`."
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
    return read_measurement(
        source,
        lambda plain: StepProfile(
            tuple(map(int, plain["tokens"])), tuple(map(float, plain["steps_per_s"]))
        ),
        "step profile",
        "train sps MODEL",
    )


def check_step_profile(source: str, model: str) -> None:
    """Refuse a profile that was measured with another model than `model`."""
    measured: str | None = read_measurement(
        source,
        lambda plain: plain.get("model", {}).get("name"),
        "step profile",
        "train sps MODEL",
    )
    if measured not in (None, model):
        raise DllmBenchError(
            f"Step profile {source!r} was measured with {measured}, but the model is {model}; "
            f"measure one with `dllm-bench train sps {model}` and name its file."
        )


def device_of_step_profile(source: str) -> str:
    """Name of the device that a step profile was measured on."""
    return str(
        read_measurement(
            source, lambda plain: plain["machine"]["device"], "step profile", "train sps MODEL"
        )
    )


@register("length.temperatures")
@dataclass(frozen=True)
class Temperatures:
    """Calibration of a confidence head: each position's logit is divided by its temperature.

    Without any the head is taken as it is. Logits stored with a run stay unscaled.
    """

    values: tuple[float, ...] = ()
    """One temperature per position, above 0; positions beyond the last have 1."""

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in self.values):
            raise DllmBenchError(
                f"The temperatures of a confidence head are {list(self.values)}; give numbers "
                "above 0."
            )

    def probabilities(self, logits: Sequence[float]) -> list[float]:
        """Probability of each token to be accepted if all before it are."""
        scales = [*self.values, *[1.0] * len(logits)]
        return [sigmoid(logit / scale) for logit, scale in zip(logits, scales, strict=False)]


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), for any logit without overflow."""
    return (1 + math.tanh(logit / 2)) / 2


def acceptance_probabilities(
    proposals: Sequence[Proposal], temperatures: Temperatures
) -> list[list[float]]:
    """`Temperatures.probabilities` of proposals with survival estimates, copied at once."""
    logits = [one.survival_D.double() for one in proposals if one.survival_D is not None]
    assert len(logits) == len(proposals)  # the draft gives survival estimates
    return [temperatures.probabilities(logits_D) for logits_D in to_host(logits)]


@register("length.read_temperatures")
def read_temperatures(source: str | None) -> Temperatures:
    """The temperatures in a file that `dllm-bench train temperatures` wrote; none for None."""
    if source is None:
        return Temperatures()
    return read_measurement(
        source,
        lambda plain: Temperatures(tuple(map(float, plain["temperatures"]))),
        "temperatures",
        "train temperatures RUN",
    )
