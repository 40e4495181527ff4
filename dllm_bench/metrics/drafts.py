"""Drafts of speculative decoding: how many tokens are accepted, and how well a drafter predicts it.

A round is one verification: n tokens proposed, a accepted, and one more token of the target's own
unless an accepted token ends the text. The token from the prefill is never counted.

The prediction at a position is the product of the confidences up to it; the outcome is whether the
whole prefix was accepted (DSpark, §3.2.1). For each position there are: ECE over equal bins, AUROC,
Brier score, reliability diagram. Sequential Temperature Scaling fits one temperature per position,
from left to right, to the ECE of the product. The paper gives neither grid nor bins: GRID is our
choice, BINS is that of DeepSpec's recorder. All functions are pure; plots are made elsewhere.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, takewhile, zip_longest
from operator import mul
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from dllm_bench.core.trace import Forward, ForwardKind, Trace

if TYPE_CHECKING:
    from pandas import DataFrame

BINS = 20
"""Equal bins of the reliability diagram and of the ECE."""
GRID = tuple(2 ** (step / 8) for step in range(-24, 25))
"""Temperatures tried in a fit: 1/8 to 8, including 1."""


# --- rounds --------------------------------------------------------------------------------------


class DraftRound(NamedTuple):
    """One verification, in tokens."""

    proposed: int  # draft tokens verified
    accepted: int  # draft tokens accepted
    committed: int  # accepted tokens and the target's own
    depth: int | None = None  # tokens of the longest path of a tree; None: a chain


def rounds_of(trace: Trace, born: Sequence[int]) -> list[DraftRound]:
    """Return the rounds of a stored sample, from its trace and the forward that committed each
    token.

    If an accepted end token cut a draft, only the tokens up to it count as proposed.
    """
    new = Counter(born)
    rounds = []
    for index, forward in enumerate(trace.forwards):
        if forward.kind == ForwardKind.VERIFY or forward.proposed:
            ended = new[index] == forward.accepted
            proposed = forward.accepted if ended else forward.proposed
            depth = proposed if ended else max(depths(forward.parents[:proposed]))
            chain = DraftRound(proposed, forward.accepted, new[index])
            rounds.append(chain._replace(depth=depth) if forward.parents else chain)
    return rounds


def rounds_array(rounds: Sequence[Sequence[int]] | None) -> Any:
    """Return stored rounds as an array (rounds, 4) of the fields of `DraftRound`, where a chain's
    depth is its length; None without rounds.
    """
    import numpy as np

    if rounds is None:
        return None
    return np.array([[*one, one[0]][:4] for one in rounds], int).reshape(-1, 4)


def depths(parents: Sequence[int]) -> list[int]:
    """Return the path lengths, in tokens, to the anchor (0) and to each token of a tree."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


LOOP = {
    ForwardKind.PREFILL,
    ForwardKind.DRAFT,
    ForwardKind.SELF_DRAFT,
    ForwardKind.HEAD,
    ForwardKind.VERIFY,
}
"""The kinds of forward that the draft-verify loop makes."""


def speculative_columns(trace: Trace, born: Sequence[int], ids: Sequence[int]) -> dict[str, Any]:
    """Return the `SampleStats` columns about drafts of one sample; empty if there were none."""
    rows = trace.forwards
    if any(row.masks and row.proposed for row in rows):  # a masked model that drafts for itself
        spent_s = sum(row.ms for row in rows if row.proposed) / 1000
        return {"rounds": _stored_rounds(trace, born), **({"verify_s": spent_s} if spent_s else {})}
    if not rows or any(row.kind not in LOOP or row.masks for row in rows):
        return {}
    verified = {index: row for index, row in enumerate(rows) if row.kind == ForwardKind.VERIFY}
    spent = {kind: sum(row.ms for row in rows if row.kind == kind) / 1000 for kind in LOOP}
    spent[ForwardKind.DRAFT] += spent.pop(ForwardKind.SELF_DRAFT)
    columns: dict[str, Any] = {"rounds": _stored_rounds(trace, born)}
    if any(spent.values()):
        columns |= {f"{kind}_s": seconds for kind, seconds in spent.items()}
    if all(row.survival for row in verified.values()):
        columns["survival"] = [list(row.survival) for row in verified.values()]
    if all(len(row.drafted) >= row.proposed for row in verified.values()):  # old traces lack some
        columns["right"] = [
            right_tokens(row, ids[bisect_left(born, index) :]) for index, row in verified.items()
        ]
    return columns


def _stored_rounds(trace: Trace, born: Sequence[int]) -> list[list[int]]:
    return [[n for n in one if n is not None] for one in rounds_of(trace, born)]


def right_tokens(row: Forward, text: Sequence[int]) -> int:
    """Return how many first tokens of a text a draft matches, as a chain or along a path of a
    tree."""
    if not row.parents:
        return common_prefix(row.drafted, text)
    places = {pair: at for at, pair in enumerate(zip(row.parents, row.drafted, strict=True), 1)}
    count = place = 0
    while count < len(text) and (place, text[count]) in places:
        place, count = places[place, text[count]], count + 1
    return count


def common_prefix(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Return the length of the common prefix of a draft and a text."""
    pairs = zip(drafted, text, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def longest_draft(samples: DataFrame) -> int:
    """Return the length of the longest proposed chain; 0 without drafts."""
    return max((depth for rounds in samples.rounds.dropna() for *_, depth in rounds), default=0)


# --- calibration ---------------------------------------------------------------------------------


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
    gaps = (bar.count * abs(bar.predicted - bar.happened) for bar in reliability_bins(outcomes))
    return sum(gaps) / len(outcomes.predicted)


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
        for (proposed, accepted, *_), logits in zip(rounds.tolist(), survival, strict=True)
        if logits
    ]


def halves(samples: DataFrame) -> tuple[list[ObservedDraft], list[ObservedDraft]]:
    """Return the drafts of the first half of the samples, to fit on, and of the second, to measure
    on."""
    half = len(samples) // 2
    return observed(samples[:half]), observed(samples[half:])


@lru_cache(maxsize=8)
def _by_position(
    rounds: tuple[ObservedDraft, ...], fitted_on: tuple[ObservedDraft, ...] | None
) -> list[Outcomes]:
    """Return outcomes by position. With `fitted_on`, temperatures are fitted on these drafts, and
    positions that none of them has are left out.
    """
    if fitted_on is None:
        return outcomes_by_position(rounds)
    temperatures = fit_temperatures(fitted_on)  # that of a position does not depend on later ones
    return outcomes_by_position(rounds, temperatures)[: len(temperatures)]


def outcomes_of(samples: DataFrame, part: str, k: int) -> Outcomes:
    """Return predictions and outcomes at position k, from 1; none beyond the longest draft.

    part: "all" samples; the second half of them, "unscaled" or "scaled", which is with temperatures
    fitted on the first half.
    """
    if part == "all":
        found = _by_position(tuple(observed(samples)), None)
    else:
        first, second = map(tuple, halves(samples))
        found = _by_position(second, first if part == "scaled" else None)
    return found[k - 1] if k <= len(found) else Outcomes((), ())
