"""What the runs say about a claim: effect, interval, and tests of no effect and of a given effect.

A claim compares two rows of a table's frame, which are paired by item. A score is compared by its
difference: McNemar's exact test, for an average of benchmarks the normal one, and the interval of
Agresti and Min (2005) for paired shares, which stays wide where no item differs. All else, and
scores that are no right/wrong values, is compared by the rows' resamples of whole items; its tests
refer the effect, for ratios its logarithm, to Student's distribution with the resamples' standard
error. Averages of benchmarks weigh each benchmark the same.

A decoder that beats an impaired baseline shows nothing, so `loss_of_baseline` says how much worse
the other side is than the best that its model does token by token, among all stored runs of the
same weights and items. Its estimate decides, without a test: chance can only take a claim out of
the test, whichever way it would have come out. Speculative decoders verify every token with the
target, so theirs is sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

from dllm_bench.claims.spec import Claim, Keys
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import accuracy
from dllm_bench.metrics.accuracy import LEVEL, Effect
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import leaves
from dllm_bench.store.store import Store, read_record
from dllm_bench.tables import derive
from dllm_bench.tables.derive import PERCENT, records_of
from dllm_bench.tables.frame import Row, frame_of
from dllm_bench.tables.plan import PlannedCell
from dllm_bench.tables.spec import SCORE, Profile

DEVELOPMENT, TEST = 0, 1
"""Halves of the items: settings are chosen on the first, reported on the second."""


class Sides(NamedTuple):
    """The rows of both sides."""

    ours: Row
    """Our side."""
    theirs: Row
    """The other."""

    @property
    def are_one_run(self) -> bool:
        """True if both sides are the same runs, so that nothing is compared."""
        return [run.key for run in self.ours.runs] == [run.key for run in self.theirs.runs]


Rows = Mapping[tuple[str, frozenset[tuple[str, str]]], Row]
"""(definition, facets and their values) -> row."""


# --- choosing settings ---------------------------------------------------------------------------


def sides_of(claim: Claim, planned: Sequence[PlannedCell], profile: Profile) -> list[Sides]:
    """Return both sides of a claim whose runs are sealed, for each of its trainings.

    If settings are chosen, the development half of the items decides, and the rows are of the test
    half alone.
    """
    halves = (DEVELOPMENT, TEST) if claim.chooses else (None,)
    rows = [_rows_of([only_half(cell, half) for cell in planned], profile) for half in halves]
    return [
        Sides(*(_row(rows[-1], one, keys) for keys in chosen_settings(one, rows[0])))
        for one in claim.by_training()
    ]


def chosen_settings(claim: Claim, rows: Rows) -> tuple[Keys, Keys]:
    """Return the setting of each side that is compared: of those that lose at most `keep` points
    against the setting that both sides list (one token per forward), the one with the highest
    metric. If they share none, the limit is the best score of both sides. That score is biased
    upward, because it is the best of many.
    """
    if not claim.chooses:
        return claim.ours[0], claim.theirs[0]

    def value(keys: Keys, definition: str) -> float:
        return value_of(_row(rows, claim, keys, definition))

    shared = [keys for keys in claim.ours if keys in claim.theirs]
    scores = [value(keys, SCORE) for keys in shared or (*claim.ours, *claim.theirs)]
    least = max(scores) - claim.keep
    chosen = []
    for name, side in (("ours", claim.ours), ("theirs", claim.theirs)):
        kept = [keys for keys in side if value(keys, SCORE) >= least]
        if not kept:
            raise DllmBenchError(
                f"No setting of {name} loses at most {claim.keep:g} points; "
                "give the side a slower one."
            )
        chosen.append(max(kept, key=lambda keys: value(keys, claim.metric)))
    return chosen[0], chosen[1]


def _rows_of(planned: Sequence[PlannedCell], profile: Profile) -> Rows:
    frame = frame_of(planned, profile, planned[0].cell.keys)
    return {
        (row.definition, frozenset(row.planned.cell.keys.items())): row
        for row in frame.itertuples()
    }


def _row(rows: Rows, claim: Claim, keys: Keys, definition: str = "") -> Row:
    """Return the row of a claim's setting for a metric, by default the claim's."""
    return rows[definition or claim.metric, frozenset({**(claim.at or {}), **keys}.items())]


def value_of(row: Row) -> float:
    """Return the number of a row whose runs are sealed; DllmBenchError if they do not define it."""
    if math.isnan(row.value):
        raise DllmBenchError(
            f"{row.definition} of {row.planned.run.command} was to be compared, and its samples do "
            "not define it; choose another metric for the claim."
        )
    return float(row.value)


def only_half(planned: PlannedCell, half: int | None) -> PlannedCell:
    """Return the cell with every second item of its records, or as it is if `half` is None.

    Items are sorted by name: even places are the development half, odd ones the test half.
    """
    if half is None:
        return planned
    record = planned.run.record
    run = replace(planned.run, record=_half_of(record, half)) if record else planned.run
    return PlannedCell(planned.cell, run, tuple(only_half(part, half) for part in planned.parts))


def _half_of(record: RunRecord, half: int) -> RunRecord:
    part = record.of_items(set(sorted(set(record.item_ids))[half::2]))
    return replace(part, score=accuracy.mean_score(list(part.values.values())))


# --- the effect ----------------------------------------------------------------------------------


def effect_of(claim: Claim, sides: Sides) -> Effect:
    """Return effect, interval and tests; DllmBenchError if the two sides cannot be compared."""
    import numpy as np

    ours, theirs = sides
    if claim.is_difference and (scores := derive.paired_scores(ours.planned, theirs.planned)):
        return accuracy.paired_shares(scores, PERCENT)
    if len(machines := derive.timed_on(ours.planned) | derive.timed_on(theirs.planned)) > 1:
        raise DllmBenchError(
            f"Claim {claim.name} compares {claim.metric} of different machines "
            f"({', '.join(sorted(machines))}); make the runs of both sides on one."
        )
    cells, sign = (ours.planned, theirs.planned), "minus" if claim.is_difference else "over"
    metric = replace(cells[0].cell.metric, **{sign: cells[1].cell.keys})
    compared = PlannedCell(replace(cells[0].cell, metric=metric), cells[0].run, cells)
    draws = derive.number_of(compared)  # of the same items, whatever the seeds of the sides
    if len(draws) == 1:
        raise DllmBenchError(
            f"Claim {claim.name} compares {claim.metric}, which has no interval by items here (its "
            "sides differ in items, or it is neither a mean nor a ratio of sums); choose another "
            "metric."
        )
    is_ratio = not claim.is_difference
    if is_ratio and draws.min() <= 0:
        raise DllmBenchError(
            f"Claim {claim.name} compares {claim.metric} by its ratio, which is 0 in some "
            "resamples; choose another metric."
        )
    records = records_of(ours.planned)
    items = sum(record.items for record in records)
    place, *spread = np.log(draws) if is_ratio else draws
    if np.ptp(spread) <= 1e-12:
        raise DllmBenchError(
            f"Claim {claim.name} compares {claim.metric}, in which no resample of its {items} "
            "items differs, so that its interval has no width; run more items."
        )
    return Effect(
        float(draws[0]),
        *derive.ends_of(draws),
        items,
        error=float(np.std(spread, ddof=1)),
        centre=float(place),
        freedom=items - len(records),
        is_ratio=is_ratio,
    )


def crossed(evidence: Sequence[Effect]) -> Effect:
    """Return the mean effect over trainings with the same items, a geometric mean for ratios.

    Its variance is that between trainings plus that of the items, which all trainings share. The
    tests have one degree of freedom less than there are trainings.
    """
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


def trained_parts(row: Row) -> set[str]:
    """Return the hashes of the weights that a side's runs use: model, drafter, filter."""
    specs = [record.spec for record in records_of(row.planned)]
    heads = {str(v) for spec in specs for key, v in leaves(spec.decoder) if key.endswith("sha256")}
    return heads | {str(spec.inputs.get("weights")) for spec in specs}


# --- the best one-token decoding -----------------------------------------------------------------


RecordsBeside = Callable[[str], Sequence[RunRecord]]
"""Folder of a run -> the one-token decodings of its benchmark and model."""


def one_token_runs(store: Store) -> RecordsBeside:
    """Return a function that reads the stored one-token decodings beside a run's folder: those that
    commit at most one token per forward."""

    @cache
    def in_folder(folder: Path) -> Sequence[RunRecord]:
        found = (read_record(one) for one in store.folders() if one.parent == folder)
        return [record for record in found if record and is_one_token(record)]

    return lambda folder: in_folder(Path(store.root, folder).parent)


def is_one_token(record: RunRecord) -> bool:
    """Return whether a masked decoder committed at most one token per forward in every sample; a
    token that was masked again counts each time it was committed."""
    made, again, forwards = map(record.columns.get, ("committed", "remasked", "forwards"))
    if not made or not forwards or is_speculative(record):
        return False
    counts = zip(made, again or [0] * len(made), forwards, strict=True)
    return all(m is not None and f and m + (r or 0) <= f for m, r, f in counts)


def is_speculative(record: RunRecord) -> bool:
    """Return whether an autoregressive target verified drafts."""
    return any(record.columns.get("rounds", []))


def loss_of_baseline(sides: Sides, one_token: RecordsBeside) -> float | None:
    """Return by how many points the best one-token decoding of the baseline's model is better than
    the baseline, averaged over benchmarks, on the items that both graded; None if none is stored.
    """
    leaves = derive.leaves_of(sides.theirs.planned)
    runs = [(leaf.run.record, leaf.run.folder) for leaf in leaves if leaf.run.record]
    if any(is_speculative(record) for record, _ in runs):
        return 0.0
    compared = [list(_losses(record, one_token(folder))) for record, folder in runs]
    return PERCENT * fmean(map(max, compared)) if all(compared) else None


def _losses(record: RunRecord, others: Sequence[RunRecord]) -> Iterator[float]:
    """Yield each other run's mean score minus the baseline's, on the items that both graded."""
    inputs, own = record.spec.inputs, record.values
    for other in others:
        is_same = all(other.spec.inputs.get(k) == inputs.get(k) for k in ("weights", "dataset"))
        scores = other.values
        if is_same and (shared := sorted(own.keys() & scores.keys())):
            yield fmean(scores[key] - own[key] for key in shared)
