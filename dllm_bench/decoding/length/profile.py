"""How fast a machine takes steps: measured seconds per step against tokens in the step.

DSpark's SPS(B) (section 3.2.2): profiled once per machine and model by `dllm-bench train sps`, kept
as a lookup table, interpolated between measured sizes. Nothing is known beyond the largest size, so
nothing larger is scheduled. Plain Python: the load simulation reads the same table.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.length.stored import read


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


def read_profile(source: str) -> StepProfile:
    """The profile in a file that `dllm-bench train sps` wrote; assets/… are shipped ones."""
    return read(
        source,
        lambda plain: StepProfile(
            tuple(map(int, plain["tokens"])), tuple(map(float, plain["steps_per_s"]))
        ),
        "step profile",
        "train sps MODEL",
    )


def check_profile(source: str, model: str) -> None:
    """Refuse a file that says another model took the steps: they say nothing about this one."""
    whose: str | None = read(
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
