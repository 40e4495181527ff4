"""How well a drafter predicts which of its tokens survive, and Sequential Temperature Scaling.

The prediction at a position is the product of the confidences up to it; the outcome is whether the
whole prefix was accepted (DSpark, §3.2.1). For each position there are: ECE over equal bins, AUROC,
Brier score, reliability diagram. Sequential Temperature Scaling fits one temperature per position,
from left to right, to the ECE of the product. The paper gives neither grid nor bins: GRID is our
choice, BINS is that of DeepSpec's recorder. All functions are pure; plots are made elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, zip_longest
from operator import mul
from statistics import fmean
from typing import TYPE_CHECKING

from dllm_bench.metrics.metric import MetricFamily, MetricFunction

if TYPE_CHECKING:
    from pandas import DataFrame

BINS = 20
"""Equal bins of the reliability diagram and of the ECE."""
GRID = tuple(2 ** (step / 8) for step in range(-24, 25))
"""Temperatures tried in a fit: 1/8 to 8, including 1."""


@dataclass(frozen=True)
class ObservedDraft:
    """A verified draft."""

    logits: tuple[float, ...]  # from the confidence head, one per verified token
    accepted: int  # tokens accepted


@dataclass(frozen=True)
class Outcomes:
    """Predicted probabilities and whether each event happened."""

    predicted: tuple[float, ...]
    happened: tuple[bool, ...]


@dataclass(frozen=True)
class ReliabilityBin:
    """A bar of the reliability diagram: the predictions in [low, high)."""

    low: float
    high: float
    count: int
    predicted: float  # mean prediction
    happened: float  # share of events that happened


@dataclass(frozen=True)
class Calibration:
    """Quality of the predictions at one position."""

    count: int  # predictions
    ece: float
    auroc: float | None  # None if there is only one kind of outcome
    brier: float
    bins: tuple[ReliabilityBin, ...]


def survival_probabilities(
    logits: Sequence[float], temperatures: Sequence[float] = ()
) -> list[float]:
    """Return the probabilities that the prefixes of length 1..n survive; positions without a
    temperature use 1."""
    pairs = zip_longest(logits, temperatures[: len(logits)], fillvalue=1.0)
    return list(accumulate((_sigmoid(logit / t) for logit, t in pairs), mul))


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def outcomes_by_position(
    rounds: Sequence[ObservedDraft], temperatures: Sequence[float] = ()
) -> list[Outcomes]:
    """Return predictions and outcomes at every position at which any draft was verified.

    Each position counts the drafts that were verified up to it.
    """
    predicted = [survival_probabilities(r.logits, temperatures) for r in rounds]
    pairs = list(zip(predicted, rounds, strict=True))
    return [
        Outcomes(
            tuple(known[k] for known in predicted if len(known) > k),
            tuple(r.accepted > k for known, r in pairs if len(known) > k),
        )
        for k in range(max(map(len, predicted), default=0))
    ]


def calibration_of(outcomes: Outcomes) -> Calibration | None:
    """Return all measures of one position; None without predictions."""
    if not outcomes.predicted:
        return None
    bars = reliability_bins(outcomes)
    return Calibration(len(outcomes.predicted), _gap(bars), auroc(outcomes), brier(outcomes), bars)


def calibration_by_position(
    rounds: Sequence[ObservedDraft], temperatures: Sequence[float] = ()
) -> list[Calibration]:
    """Return the calibration of every position that was verified in any draft."""
    found = outcomes_by_position(rounds, temperatures)
    measured = (calibration_of(one) for one in found)
    return [one for one in measured if one]


def reliability_bins(outcomes: Outcomes, bins: int = BINS) -> tuple[ReliabilityBin, ...]:
    """Return the equal bins that are not empty, in order; a prediction of 1 is in the last one."""
    held: dict[int, list[tuple[float, bool]]] = {}
    for pair in zip(outcomes.predicted, outcomes.happened, strict=True):
        held.setdefault(min(int(pair[0] * bins), bins - 1), []).append(pair)
    means = {index: map(fmean, zip(*pairs, strict=True)) for index, pairs in sorted(held.items())}
    return tuple(
        ReliabilityBin(index / bins, (index + 1) / bins, len(held[index]), *both)
        for index, both in means.items()
    )


def ece(outcomes: Outcomes) -> float:
    """Return the expected calibration error: |mean prediction - share happened|, averaged over bins
    by size."""
    return _gap(reliability_bins(outcomes))


def _gap(bars: Sequence[ReliabilityBin]) -> float:
    total = sum(bar.count for bar in bars)
    return sum(bar.count * abs(bar.predicted - bar.happened) for bar in bars) / total


def brier(outcomes: Outcomes) -> float:
    """Return the Brier score: the mean squared difference between prediction and outcome (0 or
    1)."""
    pairs = zip(outcomes.predicted, outcomes.happened, strict=True)
    return fmean((predicted - happened) ** 2 for predicted, happened in pairs)


def auroc(outcomes: Outcomes) -> float | None:
    """Return the probability that an accepted prefix has a higher prediction than a rejected one.

    Ties count half. None if all prefixes were accepted, or all rejected.
    """
    from scipy.stats import rankdata

    accepted = sum(outcomes.happened)
    rejected = len(outcomes.happened) - accepted
    if not accepted or not rejected:
        return None
    ranks = rankdata(outcomes.predicted)[list(outcomes.happened)]  # half for ties, so exact
    return float(ranks.sum() - accepted * (accepted + 1) / 2) / (accepted * rejected)


def fit_temperatures(rounds: Sequence[ObservedDraft]) -> tuple[float, ...]:
    """Return one temperature per position, fitted from left to right: each has the lowest ECE given
    the previous ones.

    Of equally good ones the nearest to 1 is used. Fit on held-out drafts that were verified in
    full.
    """
    fitted: list[float] = []
    for position in range(max((len(r.logits) for r in rounds), default=0)):
        seen = [r for r in rounds if len(r.logits) > position]
        before = [
            survival_probabilities(r.logits[:position], fitted)[-1] if position else 1.0
            for r in seen
        ]
        happened = tuple(r.accepted > position for r in seen)
        errors = {}
        for temperature in GRID:
            last = (_sigmoid(r.logits[position] / temperature) for r in seen)
            errors[temperature] = ece(Outcomes(tuple(map(mul, before, last)), happened))
        fitted.append(min(errors, key=lambda t: (errors[t], abs(math.log(t)))))
    return tuple(fitted)


def observed(samples: DataFrame) -> list[ObservedDraft]:
    """Return the verified drafts of samples whose drafter has a confidence head."""
    return [
        ObservedDraft(tuple(logits[:proposed]), accepted)
        for rounds, survival in zip(samples.rounds, samples.survival, strict=True)
        if survival is not None
        for (proposed, accepted, *_), logits in zip(rounds or (), survival, strict=True)
        if logits
    ]


def halves(samples: DataFrame) -> tuple[list[ObservedDraft], list[ObservedDraft]]:
    """Return the drafts of the first half of the samples, to fit on, and of the second, to measure
    on."""
    half = len(samples) // 2
    return observed(samples[:half]), observed(samples[half:])


@lru_cache(maxsize=64)
def _fitted(rounds: tuple[ObservedDraft, ...]) -> tuple[float, ...]:
    return fit_temperatures(rounds)


@dataclass(frozen=True, eq=False)
class ObservedRun:
    """The observed drafts of one run, computed once for the metrics of all positions."""

    samples: DataFrame

    @cached_property
    def all(self) -> list[Outcomes]:
        """Outcomes by position, over all samples."""
        return outcomes_by_position(observed(self.samples))

    @cached_property
    def halves(self) -> tuple[list[ObservedDraft], list[ObservedDraft]]:
        """The drafts of both halves of the samples."""
        return halves(self.samples)

    @cached_property
    def unscaled(self) -> list[Outcomes]:
        """Outcomes by position, over the second half of the samples."""
        return outcomes_by_position(self.halves[1])

    @cached_property
    def scaled(self) -> list[Outcomes]:
        """Outcomes of the second half with temperatures fitted on the first half, for positions it
        has drafts of.

        The temperature of a position does not depend on later ones.
        """
        temperatures = _fitted(tuple(self.halves[0]))
        return outcomes_by_position(self.halves[1], temperatures)[: len(temperatures)]


_latest: list[ObservedRun] = []  # the last run: its metrics are computed one after the other


def observed_run(samples: DataFrame) -> ObservedRun:
    """Return the observed run of these samples; it is cached while the frame is the same."""
    if not _latest or _latest[0].samples is not samples:
        _latest[:] = [ObservedRun(samples)]
    return _latest[0]


def outcomes_of(samples: DataFrame, part: str, k: int) -> Outcomes:
    """Return predictions and outcomes at position k, from 1; none beyond the longest draft.

    part: which samples, an attribute of `ObservedRun`.
    """
    by_position: list[Outcomes] = getattr(observed_run(samples), part)
    return by_position[k - 1] if k <= len(by_position) else Outcomes((), ())


MEASURES: dict[str, tuple[str, Callable[[Outcomes], float | None]]] = {
    "ece": (f"expected calibration error ({BINS} equal bins) of the predicted survival", ece),
    "auroc": ("chance that a prefix that survives has the higher predicted survival", auroc),
    "brier": ("mean squared distance of the predicted survival from what happened", brier),
}
COVERED = {  # end of the name -> (words, attribute of `ObservedRun`)
    "": ("as the confidence head gives it, over the rounds that verified the position", "all"),
    "_unscaled": (
        "as the head gives it, over the second half of the samples: what _scaled compares with",
        "unscaled",
    ),
    "_scaled": (
        "after Sequential Temperature Scaling fitted on the first half of the samples, over the "
        "second half",
        "scaled",
    ),
}


def family(measured: str, covered: str) -> MetricFamily:
    """Return a metric family: one measure over one part of the samples, for every position."""
    what, number = MEASURES[measured]
    how, part = COVERED[covered]

    def function(k: int) -> MetricFunction:
        def at(samples: DataFrame) -> float | None:
            outcomes = outcomes_of(samples, part, k)
            return number(outcomes) if outcomes.predicted else None

        return at

    name, unit = f"calibration/{measured}{covered}", "share"
    return MetricFamily(name, unit, f"{what} of the prefix, {how}.", function, "survival")


FAMILIES = tuple(family(measured, covered) for measured in MEASURES for covered in COVERED)
