"""Which sealed runs of a figure still lack the evolution of their tokens, and how it is made.

Runs decode without it; a reading that needs it names how many samples. It is made from the sealed
run, beside which it is stored (`run/token_replay`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.spec import PaperFigure
from dllm_bench.run import token_replay
from dllm_bench.tables.plan import PlannedCell

if TYPE_CHECKING:
    from dllm_bench.store.spec import RunSpec
    from dllm_bench.store.store import Store


def lacking(
    figure: PaperFigure, planned: Iterable[PlannedCell], store: Store
) -> Iterator[tuple[RunSpec, int]]:
    """Sealed runs without an evolution that a reading asks for, and of how many samples."""
    asked: dict[RunSpec, int] = {}
    for entry in planned:
        call, spec = figure.calls.get(entry.cell.metric.name), entry.run.spec
        if call and call.evolve and spec and entry.run.record:
            asked[spec] = max(call.evolve, asked.get(spec, 0))
    for spec, samples in asked.items():
        if not (store.path(spec) / token_replay.FILE).exists():
            yield spec, samples


def make(missing: Sequence[tuple[RunSpec, int]], store: Store) -> list[str]:
    """Make them one after the other; sentences of what failed."""
    failed = []
    for index, (spec, samples) in enumerate(missing, start=1):
        print(f"[{index}/{len(missing)}] evolution of {spec.folder}", file=sys.stderr)
        try:
            token_replay.record_replays(spec, store, samples)
        except DllmBenchError as error:
            failed.append(f"{spec.folder}: {error}")
    return failed
