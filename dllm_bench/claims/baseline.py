"""Whether the side that a claim compares with is the best that its model does token by token.

A decoder that beats an impaired baseline shows nothing. The best one-token decoding is looked for
among all stored runs of the same weights and items. Its estimate decides, without a test: chance
can only take a claim out of the test, whichever way it would have come out. Speculative decoders
verify every token with the target, so theirs is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from dllm_bench.claims.evidence import Sides
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store, read_record
from dllm_bench.tables.derive import PERCENT, leaves_of

RecordsBeside = Callable[[str], Sequence[RunRecord]]
"""Folder of a run -> the one-token decodings of its benchmark and model."""


@dataclass(frozen=True)
class OneTokenRuns:
    """The stored one-token decodings, read when a benchmark and model is first asked for."""

    store: Store
    read: dict[str, list[RunRecord]] = field(default_factory=dict)

    def __call__(self, folder: str) -> Sequence[RunRecord]:
        """Return the records beside a run's folder that commit at most one token per forward."""
        beside = str(Path(folder).parent)
        if beside not in self.read:
            root = Path(self.store.root)
            near = [one for one in self.store.folders() if one.parent == root / beside]
            found = [record for record in map(read_record, near) if record]
            self.read[beside] = [record for record in found if is_one_token(record)]
        return self.read[beside]


def is_one_token(record: RunRecord) -> bool:
    """Whether a masked decoding committed at most one token per forward, in every sample."""
    made, forwards = (record.columns.get(name, []) for name in ("committed", "forwards"))
    pairs = list(zip(made, forwards, strict=True)) if made and not is_speculative(record) else []
    return bool(pairs) and all(m is not None and f and m <= f for m, f in pairs)


def is_speculative(record: RunRecord) -> bool:
    """Whether drafts were verified by an autoregressive target."""
    return any(record.columns.get("rounds", []))


def loss_of_baseline(sides: Sides, one_token: RecordsBeside) -> float | None:
    """Return by how many points the best one-token decoding of the baseline's model is better than
    the baseline, averaged over benchmarks, on the items that both graded; None if none is stored.
    """
    found = [(leaf.run.record, leaf.run.folder) for leaf in leaves_of(sides.theirs.planned)]
    runs = [(record, folder) for record, folder in found if record]
    if any(is_speculative(record) for record, _ in runs):
        return 0.0
    compared = [list(_losses(record, one_token(folder))) for record, folder in runs]
    return PERCENT * fmean(map(max, compared)) if all(compared) else None


def _losses(record: RunRecord, others: Sequence[RunRecord]) -> Iterator[float]:
    """Mean score of each other run minus the baseline's, on the items that both graded."""
    inputs, own = record.spec.inputs, record.values
    for other in others:
        is_same = all(other.spec.inputs.get(k) == inputs.get(k) for k in ("weights", "dataset"))
        shared = own.keys() & other.values.keys()
        if is_same and shared:
            yield fmean(other.values[key] - own[key] for key in sorted(shared))
