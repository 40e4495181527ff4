"""Numbers of drafting walk from the loop to a cell: the same from the samples file as in the cell.

A real run of the draft-verify loop on a table of distributions, with a drafter that has a
confidence head and a sequential one, and a baseline. What a cell shows has to follow from the
stored samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dllm_bench.core.request import SpecialTokens
from dllm_bench.core.speculative import Context, Proposal, Sampler
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.drafting import NoDraft, SurvivalThreshold
from dllm_bench.metrics.definitions import DEFINITIONS, FAMILIES, definition, measure
from dllm_bench.metrics.sample_stats import SampleStats
from dllm_bench.runs.runner import run
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_samples
from dllm_bench.tables.derive import measure as measured_cell
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun
from dllm_bench.tables.spec import Cell, TableMetric
from tests.resume import fakes
from tests.speculative import Chain, FromDistribution

NOBODY = SpecialTokens(mask=0, eos=1)
TOKENS, SAMPLES = 6, 16
LAW = torch.tensor([0.0, 0.02, 0.5, 0.3, 0.1, 0.08])
DRAFT = (0.0, 0.02, 0.4, 0.2, 0.2, 0.18)
NEW = {"rounds", "survival", "baseline_s", "baseline_equal"}
NAMES = [name for name, entry in DEFINITIONS.items() if entry.requires in NEW]
NAMES += [f"{name}@{k}" for name in FAMILIES for k in (1, 2)]


@dataclass(frozen=True)
class Guess(FromDistribution):
    """Drafts from one distribution as if a network and a head did, with estimates of survival."""

    gives = frozenset({"survival estimates"})

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        context.head_begins()
        made = super().propose(context, sampler)
        before_D = torch.cat([context.tokens_L[-1:], made.tokens_D[:-1]])
        return replace(made, survival_D=before_D - 1.5, calls=1, fed=4, cached=0)


class Model(fakes.FakeModel):
    """Prompts and texts are tokens 2 to 5, whatever they say."""

    def encode(self, text: Any) -> list[int]:
        return [2 + ord(c) % 4 for c in str(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("abcdef"[i] for i in ids)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, list[SampleRecord]]:
    """Return a sealed record, read again, and its samples, read again."""
    length = SurvivalThreshold(0.6)
    own = SpeculativeDecoder(Guess(4, DRAFT), length=length, temperature=1.0)
    plain = SpeculativeDecoder(NoDraft(), temperature=1.0)
    spec = fakes.spec(SAMPLES, baseline={"_target_": "plain"})
    model: Any = Model(Chain(NOBODY, LAW.repeat(TOKENS, 1)))  # type: ignore[arg-type]
    store = Store(tmp_path_factory.mktemp("runs"))

    def decoder(asked: RunSpec) -> SpeculativeDecoder:
        return plain if asked.decoder == {"_target_": "plain"} else own

    run(spec, store=store, deps=replace(fakes.deps(model=model), decoder=decoder))
    record = store.record(spec)
    assert record is not None
    return record, list(read_samples(store.path(spec)).values())


def cell_of(record: RunRecord, name: str) -> tuple[float | None, Any]:
    """Return what a table's cell shows of the number called `name`, with its interval."""
    cell = Cell({}, TableMetric("m", "M", name), run=(), reported=None, notes=())
    return measured_cell(PlannedCell(cell, PlannedRun((), CellState.SEALED, record=record)))


def to_the_microsecond(facts: SampleStats) -> SampleStats:
    """Facts of a sample with their seconds as exact as a record has them."""
    seconds = {name: value for name, value in vars(facts).items() if isinstance(value, float)}
    return replace(facts, **{name: round(value, 6) for name, value in seconds.items()})


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_is_its_definition_over_the_stored_samples(name, made) -> None:
    record, samples = made
    wanted = measure(name, [to_the_microsecond(sample.stats()) for sample in samples])
    assert wanted is not None
    measured, interval = cell_of(record, name)
    assert measured == pytest.approx(wanted, rel=1e-9)
    if definition(name).unit == "share" and "calibration" not in name:
        low, high = interval
        assert low <= wanted <= high
