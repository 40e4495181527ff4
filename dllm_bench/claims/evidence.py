"""What the runs say about a claim: effect, interval, and tests of no effect and of a given effect.

Both sides are paired by item. A score is compared by its difference: McNemar's exact test, and the
interval of Agresti and Min (2005) for paired shares, which stays wide where no item differs. All
else, and scores that are no right/wrong values, is compared by bootstrapping whole items (the
tables' interval); its tests refer the effect, for ratios its logarithm, to Student's distribution
with the bootstrap's standard error. Averages of benchmarks weigh each benchmark the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.claims.spec import Claim, Keys
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import accuracy
from dllm_bench.metrics.accuracy import LEVEL, Effect
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import leaves
from dllm_bench.tables.derive import PERCENT, interval, leaves_of, measure, number_of
from dllm_bench.tables.plan import PlannedCell, combined_run
from dllm_bench.tables.spec import SCORE

DEVELOPMENT, TEST = 0, 1
"""Halves of the items: settings are chosen on the first, reported on the second."""


@dataclass(frozen=True)
class Sides:
    """The chosen cells of both sides; `effect` is the derived cell of the two."""

    claim: Claim
    """What they test."""
    ours: PlannedCell
    """Our side."""
    theirs: PlannedCell
    """The other."""

    @cached_property
    def effect(self) -> PlannedCell:
        """The difference or ratio, as a derived cell of a table."""
        metric, other = self.ours.cell.metric, self.theirs.cell.keys
        is_difference = self.claim.is_difference
        metric = replace(metric, minus=other) if is_difference else replace(metric, over=other)
        run = combined_run([self.ours.run, self.theirs.run])
        return PlannedCell(replace(self.ours.cell, metric=metric), run, (self.ours, self.theirs))

    @property
    def are_one_run(self) -> bool:
        """True if both sides are the same runs, so that nothing is compared."""
        return _hashes(self.ours) == _hashes(self.theirs)


def _hashes(planned: PlannedCell) -> list[str]:
    return [run.spec.identity_hash if run.spec else run.command for run in planned.runs]


# --- choosing settings ---------------------------------------------------------------------------


def chosen_sides(claim: Claim, planned: Sequence[PlannedCell]) -> Sides:
    """Both sides of a claim whose runs are sealed. Where settings are chosen, the development half
    of the items decides and the sides hold the test half alone: of a side's settings that lose at
    most `keep` points against the setting that both sides list (one token per forward), the one
    with the highest metric. Where they share none, the best score of both sides takes its place,
    which is higher than what that setting scores on other items: the best of many is biased
    upward.
    """
    cells = {
        (entry.cell.metric.definition, tuple(sorted(entry.cell.keys.items()))): entry
        for entry in planned
    }

    def cell_of(definition: str, keys: Keys) -> PlannedCell:
        return cells[definition, tuple(sorted({**(claim.at or {}), **keys}.items()))]

    if not claim.chooses:
        (ours,), (theirs,) = claim.ours, claim.theirs
        return Sides(claim, cell_of(claim.metric, ours), cell_of(claim.metric, theirs))

    def score(keys: Keys) -> float:
        return value_of(only_half(cell_of(SCORE, keys), DEVELOPMENT))

    shared = [keys for keys in claim.ours if keys in claim.theirs]
    least = max(map(score, shared or (*claim.ours, *claim.theirs))) - claim.keep
    chosen = []
    for name, side in (("ours", claim.ours), ("theirs", claim.theirs)):
        kept = [cell_of(claim.metric, keys) for keys in side if score(keys) >= least]
        if not kept:
            raise DllmBenchError(
                f"No setting of {name} loses at most {claim.keep:g} points; "
                "give the side a slower one."
            )
        chosen.append(max(kept, key=lambda cell: value_of(only_half(cell, DEVELOPMENT))))
    return Sides(claim, *(only_half(cell, TEST) for cell in chosen))


def value_of(planned: PlannedCell) -> float:
    """The number of a cell whose runs are sealed; DllmBenchError if they do not define it."""
    value = measure(planned)[0]
    if value is None:
        raise DllmBenchError(
            f"{planned.cell.metric.definition} of {planned.run.command} was to be compared, and "
            "its samples do not define it; choose another metric for the claim."
        )
    return value


def only_half(planned: PlannedCell, half: int) -> PlannedCell:
    """The cell with every second item of its records: even places in the order of the items' names
    are the development half, odd ones the test half.
    """
    record = planned.run.record
    run = replace(planned.run, record=_half_of(record, half)) if record else planned.run
    parts = tuple(only_half(part, half) for part in planned.parts)
    return PlannedCell(planned.cell, run, parts)


def _half_of(record: RunRecord, half: int) -> RunRecord:
    items = sorted({item_id_of(key) for key in record.columns["id"]})
    kept = set(items[half::2])
    places = [i for i, key in enumerate(record.columns["id"]) if item_id_of(key) in kept]
    columns = {name: [column[i] for i in places] for name, column in record.columns.items()}
    part = replace(record, columns=columns)
    return replace(part, score=accuracy.mean_score(list(part.values.values())))


# --- the effect ----------------------------------------------------------------------------------


def evidence_of(sides: Sides) -> Effect:
    """Effect, interval and tests; DllmBenchError if the two sides cannot be compared."""
    import numpy as np

    pairs = list(zip(leaves_of(sides.ours), leaves_of(sides.theirs), strict=True))
    scores = [_paired_scores(*pair) for pair in pairs] if sides.claim.is_difference else []
    if scores and all(accuracy.is_binary(side) for pair in scores for side in pair):
        return _paired_shares(scores)
    effect, *resampled = number_of(sides.effect)
    ends, drawn = interval(sides.effect, number_of(sides.effect)), np.array(resampled)
    if ends is None:
        raise DllmBenchError(
            f"Claim {sides.claim.name} compares {sides.claim.metric}, which has no interval by "
            "items here (the sides share not all items, or it is no mean or ratio of sums); "
            "choose another metric."
        )
    is_ratio = not sides.claim.is_difference
    if is_ratio and min(effect, drawn.min()) <= 0:
        raise DllmBenchError(
            f"Claim {sides.claim.name} compares {sides.claim.metric} by its ratio, which is 0 in "
            "some resamples; choose another metric."
        )
    records = [ours.run.record for ours, _ in pairs if ours.run.record]
    items = sum(len(set(map(item_id_of, record.columns["id"]))) for record in records)
    place, spread = (np.log(effect), np.log(drawn)) if is_ratio else (effect, drawn)
    if np.ptp(spread) <= 1e-12:
        raise DllmBenchError(
            f"Claim {sides.claim.name} compares {sides.claim.metric}, in which no resample of its "
            f"{items} items differs, so that its interval has no width; run more items."
        )
    return Effect(
        float(effect),
        *ends,
        items,
        error=float(spread.std(ddof=1)),
        centre=float(place),
        freedom=items - len(pairs),
        is_ratio=is_ratio,
    )


def crossed(evidence: Sequence[Effect]) -> Effect:
    """The mean effect over trainings whose items are the same, a geometric mean for ratios.

    Its variance is that between trainings plus that of the items, which all trainings share; the
    tests have a degree of freedom less than there are trainings.
    """
    from statistics import fmean, variance

    from scipy.stats import t

    first, n = evidence[0], len(evidence)
    places = [math.log(one.value) if first.is_ratio else one.value for one in evidence]
    spread = variance(places) / n if n > 1 else math.inf
    error = math.sqrt(spread + fmean(one.error**2 for one in evidence))
    centre, freedom = fmean(places), n - 1
    width = float(t.ppf((1 + LEVEL) / 2, freedom)) * error if freedom else math.inf

    def effect(place: float) -> float:
        return math.exp(min(place, 700.0)) if first.is_ratio else place

    return Effect(
        effect(centre),
        effect(centre - width),
        effect(centre + width),
        first.n,
        error=error,
        centre=centre,
        freedom=max(freedom, 1),
        is_ratio=first.is_ratio,
    )


def trained_parts(planned: PlannedCell) -> set[str]:
    """Hashes of the weights that a side's runs use: model, drafter, filter."""
    specs = [leaf.run.record.spec for leaf in leaves_of(planned) if leaf.run.record]
    heads = {str(v) for spec in specs for key, v in leaves(spec.decoder) if key.endswith("sha256")}
    return heads | {str(spec.inputs.get("weights")) for spec in specs}


def _paired_scores(ours: PlannedCell, theirs: PlannedCell) -> tuple[list[float], list[float]]:
    """The scores of both runs on the items that both answered."""
    if not (ours.run.record and theirs.run.record):
        raise DllmBenchError("Two runs were to be compared, and one is not sealed; run it first.")
    first, second = ours.run.record.values, theirs.run.record.values
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise DllmBenchError(
            f"The runs {ours.run.command} and {theirs.run.command} share no graded item; compare "
            "runs of the same benchmark and limit."
        )
    return [first[key] for key in shared], [second[key] for key in shared]


def _paired_shares(scores: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Effect:
    """The difference of right/wrong scores, averaged over benchmarks, in points."""
    found = accuracy.paired_shares(scores)
    scaled = ("value", "low", "high", "error", "centre")
    points = {name: PERCENT * getattr(found, name) for name in scaled}
    return replace(found, **points)
