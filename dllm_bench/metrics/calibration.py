"""How well a drafter knows which of its tokens survive, and Sequential Temperature Scaling.

A position's prediction is the product of the confidences up to it, its outcome whether the whole
prefix was accepted (DSpark, §3.2.1). Measured position by position: ECE over equal bins, AUROC,
Brier score, reliability diagram. STS fits one temperature per position from left to right to the
ECE of the product; the paper names neither grid nor bins: GRID is ours, BINS DeepSpec's recorder's.
Pure functions of lists; nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, zip_longest
from operator import mul
from statistics import fmean

from dllm_bench.metrics.metric import MetricFamily, MetricFunction
from dllm_bench.metrics.sample_stats import SampleStats

BINS = 20
GRID = tuple(2 ** (step / 8) for step in range(-24, 25))  # 1/8 to 8, 1 among them


@dataclass(frozen=True)
class Observed:
    """A verified proposal: logits of its confidences, and how many of its tokens were accepted."""

    logits: tuple[float, ...]
    accepted: int


@dataclass(frozen=True)
class Outcomes:
    """Predicted probabilities beside what happened."""

    predicted: tuple[float, ...]
    happened: tuple[bool, ...]


@dataclass(frozen=True)
class Bin:
    """A bar of the reliability diagram: the predictions of [low, high)."""

    low: float
    high: float
    count: int
    predicted: float
    happened: float


@dataclass(frozen=True)
class Calibration:
    """What the confidences of one position are worth."""

    count: int
    ece: float
    auroc: float | None
    brier: float
    bins: tuple[Bin, ...]


def survival(logits: Sequence[float], temperatures: Sequence[float] = ()) -> list[float]:
    """Probabilities that the prefixes 1..n survive; positions without a temperature have 1."""
    pairs = zip_longest(logits, temperatures[: len(logits)], fillvalue=1.0)
    return list(accumulate((_sigmoid(logit / t) for logit, t in pairs), mul))


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def outcomes(
    rounds: Sequence[Observed], position: int, temperatures: Sequence[float] = ()
) -> Outcomes:
    """Predictions and outcomes at one position (from 0), over the rounds that verified it."""
    seen = [r for r in rounds if len(r.logits) > position]
    predicted = (survival(r.logits[: position + 1], temperatures)[-1] for r in seen)
    return Outcomes(tuple(predicted), tuple(r.accepted > position for r in seen))


def measure(found: Outcomes, bins: int = BINS) -> Calibration | None:
    """All numbers of one position, None where nothing was seen."""
    if not found.predicted:
        return None
    bars = reliability(found, bins)
    return Calibration(len(found.predicted), _gap(bars), auroc(found), brier(found), bars)


def positions(
    rounds: Sequence[Observed], temperatures: Sequence[float] = (), bins: int = BINS
) -> list[Calibration]:
    """The numbers of every position that any round verified."""
    longest = max((len(r.logits) for r in rounds), default=0)
    found = (measure(outcomes(rounds, k, temperatures), bins) for k in range(longest))
    return [calibration for calibration in found if calibration]


def reliability(found: Outcomes, bins: int = BINS) -> tuple[Bin, ...]:
    """Equal bins that hold something, in order; a prediction of 1 is in the last one."""
    held: dict[int, list[tuple[float, bool]]] = {}
    for pair in zip(found.predicted, found.happened, strict=True):
        held.setdefault(min(int(pair[0] * bins), bins - 1), []).append(pair)
    return tuple(_bar(index, bins, held[index]) for index in sorted(held))


def _bar(index: int, bins: int, pairs: Sequence[tuple[float, bool]]) -> Bin:
    predicted, happened = zip(*pairs, strict=True)
    return Bin(index / bins, (index + 1) / bins, len(pairs), fmean(predicted), fmean(happened))


def ece(found: Outcomes, bins: int = BINS) -> float:
    """Expected calibration error: bins' distance between prediction and outcome, by their size."""
    return _gap(reliability(found, bins))


def _gap(bars: Sequence[Bin]) -> float:
    total = sum(bar.count for bar in bars)
    return sum(bar.count * abs(bar.predicted - bar.happened) for bar in bars) / total


def brier(found: Outcomes) -> float:
    """Mean squared distance between prediction and outcome."""
    pairs = zip(found.predicted, found.happened, strict=True)
    return fmean((predicted - happened) ** 2 for predicted, happened in pairs)


def auroc(found: Outcomes) -> float | None:
    """Chance that an accepted prefix has the higher prediction, ties half; None with one class."""
    pairs = sorted(zip(found.predicted, found.happened, strict=True))
    accepted = sum(found.happened)
    rejected = len(pairs) - accepted
    if not accepted or not rejected:
        return None
    won, below, start = 0.0, 0, 0
    while start < len(pairs):
        stop = start
        while stop < len(pairs) and pairs[stop][0] == pairs[start][0]:
            stop += 1
        hits = sum(happened for _, happened in pairs[start:stop])
        misses = stop - start - hits
        won += hits * (below + misses / 2)
        below, start = below + misses, stop
    return won / (accepted * rejected)


def fit_temperatures(
    rounds: Sequence[Observed], grid: Sequence[float] = GRID, bins: int = BINS
) -> tuple[float, ...]:
    """One temperature per position, from left to right, each the best by ECE given those before.

    Held-out rounds of full proposals are meant. Among equals the one nearest to 1 is taken.
    """
    fitted: list[float] = []
    for position in range(max((len(r.logits) for r in rounds), default=0)):
        seen = [r for r in rounds if len(r.logits) > position]
        before = [survival(r.logits[:position], fitted)[-1] if position else 1.0 for r in seen]
        happened = tuple(r.accepted > position for r in seen)
        errors = {}
        for temperature in grid:
            last = (_sigmoid(r.logits[position] / temperature) for r in seen)
            errors[temperature] = ece(Outcomes(tuple(map(mul, before, last)), happened), bins)
        fitted.append(min(errors, key=lambda t: (errors[t], abs(math.log(t)))))
    return tuple(fitted)


def observed(facts: Sequence[SampleStats]) -> list[Observed]:
    """The verified proposals of samples whose drafter has a confidence head."""
    return [
        Observed(tuple(logits[:proposed]), accepted)
        for fact in facts
        if fact.survival is not None
        for (proposed, accepted, _), logits in zip(fact.rounds or (), fact.survival, strict=True)
        if logits
    ]


def halves(facts: Sequence[SampleStats]) -> tuple[list[Observed], list[Observed]]:
    """Proposals of the first half of the samples, to fit on, and of the second, to measure on."""
    half = len(facts) // 2
    return observed(facts[:half]), observed(facts[half:])


@lru_cache(maxsize=64)
def _fitted(rounds: tuple[Observed, ...]) -> tuple[float, ...]:
    return fit_temperatures(rounds)


def found_in(facts: Sequence[SampleStats], k: int) -> Outcomes:
    """Predictions and outcomes at position k, from 1, over all samples."""
    return outcomes(observed(facts), k - 1)


def found_unscaled(facts: Sequence[SampleStats], k: int) -> Outcomes:
    """The same over the second half of the samples."""
    return outcomes(halves(facts)[1], k - 1)


def found_scaled(facts: Sequence[SampleStats], k: int) -> Outcomes:
    """The same, scaled by temperatures fitted on the first half; nothing where it has no round."""
    first, second = halves(facts)
    reaching = tuple(replace(r, logits=r.logits[:k]) for r in first)
    temperatures = _fitted(reaching)
    return outcomes(second if len(temperatures) >= k else [], k - 1, temperatures)


MEASURES: dict[str, tuple[str, Callable[[Outcomes], float | None]]] = {
    "ece": (f"expected calibration error ({BINS} equal bins) of the predicted survival", ece),
    "auroc": ("chance that a prefix that survives has the higher predicted survival", auroc),
    "brier": ("mean squared distance of the predicted survival from what happened", brier),
}
COVERED: dict[str, tuple[str, Callable[[Sequence[SampleStats], int], Outcomes]]] = {
    "": ("as the confidence head gives it, over the rounds that verified the position", found_in),
    "_unscaled": (
        "as the head gives it, over the second half of the samples: what _scaled compares with",
        found_unscaled,
    ),
    "_scaled": (
        "after Sequential Temperature Scaling fitted on the first half of the samples, over the "
        "second half",
        found_scaled,
    ),
}


def family(measured: str, covered: str) -> MetricFamily:
    """One measure over one part of the samples."""
    what, number = MEASURES[measured]
    how, find = COVERED[covered]

    def function(k: int) -> MetricFunction:
        def at(facts: Sequence[SampleStats]) -> float | None:
            found = find(facts, k)
            return number(found) if found.predicted else None

        return at

    name, unit = f"calibration/{measured}{covered}", "share"
    return MetricFamily(name, unit, f"{what} of the prefix, {how}.", function, "survival")


FAMILIES = tuple(family(measured, covered) for measured in MEASURES for covered in COVERED)
