"""The committed results (`results/reference`): every number again, from the records alone.

Walks the committed tables: cell -> record -> per-sample columns -> number, computed here a second
time, equal to the last printed digit. And the same records give the same bytes. Skips what a
checkout does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import groupby, pairwise
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.metrics import definitions
from dllm_bench.metrics.sample_stats import from_columns
from dllm_bench.store.index import RecordIndex
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_record
from dllm_bench.tables.derive import has_curve
from dllm_bench.tables.frame import BuiltTable, build
from dllm_bench.tables.load import load_profile, load_table, names_of
from dllm_bench.tables.plan import PlannedCell
from dllm_bench.tables.render import number, render
from dllm_bench.tables.spec import TableMetric
from tests.claims.test_reference_claims import judgements, planner
from tests.tiers import covering

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
TABLES = [name for name in names_of("table") if (REFERENCE / "tables" / f"{name}.json").exists()]
STORE = Store(REFERENCE / "runs")
here = pytest.mark.skipif(not TABLES, reason=f"nothing is committed below {REFERENCE.name}")
DIGITS = 4  # of the json form
SCORE = TableMetric("score", "Score", "score")
MEASURED: dict[tuple[Any, ...], float] = {}  # of a record; several cells and tables show it
shared = pytest.mark.xdist_group("reference claims")  # which share composed settings


@cache
def committed(name: str) -> dict[str, Any]:
    """Return a committed table in its form for programs."""
    plain: dict[str, Any] = json.loads((REFERENCE / "tables" / f"{name}.json").read_text())
    return plain


@cache
def built(name: str) -> BuiltTable:
    """Return the table from the committed records."""
    [planned] = planner().common([load_table(name)], load_profile("embedded"))
    return build(*planned)


def again(metric: TableMetric, columns: Mapping[str, list]) -> float:
    """Return a number of a run from its per-sample columns; a score is computed here, item by
    item."""
    if not metric.is_score:
        value = definitions.measure(metric.definition, from_columns(columns))
        assert value is not None
        return value
    pairs = sorted(
        (item_id_of(key), value)
        for key, value in zip(columns["id"], columns["value"], strict=True)
        if value is not None
    )
    items = [fmean(v for _, v in group) for _, group in groupby(pairs, key=lambda pair: pair[0])]
    return 100 * fmean(items)


def under(xs: list[float], scores: list[float]) -> float:
    """Return the area under a curve of scores, weighted by the best of all (d3LLM's AUP)."""
    points = sorted(zip(xs, scores, strict=False))
    points = [(x, y) for x, y in points if y >= points[0][1] - 5 - 1e-9]
    weighted = [y * min(1.0, exp(-3 * (1 - y / max(scores)))) for _, y in points]
    steps = [after - before for (before, _), (after, _) in pairwise(points)]
    means = [(before + after) / 2 for before, after in pairwise(weighted)]
    return points[0][0] * points[0][1] + sum(a * b for a, b in zip(steps, means, strict=True))


def recomputed(planned: PlannedCell) -> float:
    """Return the number of a cell, by the formula of its yaml."""
    metric = planned.cell.metric
    if not planned.parts:
        record = planned.run.record
        assert record
        if metric.is_score:
            return again(metric, record.columns)
        key = (record.identity_hash, len(record.columns["id"]), record.sealed_at, metric.definition)
        if key not in MEASURED:
            MEASURED[key] = again(metric, record.columns)
        return MEASURED[key]
    values = [recomputed(part) for part in planned.parts]
    if has_curve(planned):
        return under(values[: len(planned.cell.curve)], values[len(planned.cell.curve) :])
    if metric.minus:
        return values[0] - values[1]
    if metric.over:
        return 100 * (values[0] / values[1] - 1) if metric.gain else values[0] / values[1]
    return fmean(values)


@shared
@here
@pytest.mark.parametrize("name", covering(9, TABLES))
def test_every_committed_number_follows_from_its_record(name: str) -> None:
    """Cell -> record -> samples -> number, to the last printed digit."""
    found = committed(name)["cells"]
    for cell, plain in zip(built(name).cells.itertuples(), found, strict=True):
        assert (*plain["keys"].values(), plain["metric"]) == cell.Index
        if plain["state"] != "sealed" or plain["measured"] is None:
            continue
        value = recomputed(cell.planned)
        assert round(value, DIGITS) == pytest.approx(plain["measured"], abs=10**-DIGITS)
        printed = number(cell.value, plain["unit"])  # as in the committed bytes, see below
        assert number(value, plain["unit"]) == printed, cell.Index
        assert plain["runs"] == [run.spec.identity_hash for run in cell.runs if run.spec]


@shared
@here
@pytest.mark.parametrize("name", covering(9, TABLES))
def test_the_committed_bytes_follow_from_the_records(name: str) -> None:
    forms = render(built(name))
    for form in ("md", "json"):
        text, path = forms[form], REFERENCE / "tables" / f"{name}.{form}"
        assert path.read_text(encoding="utf-8") == text, f"{path.name} differs; render it again"


@here
def test_every_committed_run_keeps_its_hash() -> None:
    """However settings are declared and read, what they identify stays."""
    runs = [json.loads(run.listed) for run in RecordIndex(STORE).sealed()]
    assert len(runs) == len(STORE.folders())
    for run in runs:
        assert RunSpec.from_plain(run["spec"]).identity_hash == run["identity_hash"]


@here
@pytest.mark.parametrize(
    "folder", covering(20, STORE.folders(), often=10), ids=lambda folder: folder.name
)
def test_a_committed_record_is_what_its_hash_says(folder: Path) -> None:
    """The identity follows from the specification, the summary and score from the columns."""
    record = read_record(folder)
    assert record
    assert record.spec.identity_hash == record.identity_hash
    assert folder.name.endswith(record.spec.short)
    assert STORE.path(record.spec) == folder
    samples = record.samples
    for name, value in record.summary.items():
        again_measured = definitions.measure(name, samples)
        assert again_measured == (value if value is None else pytest.approx(value, rel=1e-12)), name
    if record.score:
        assert 100 * record.score.mean == pytest.approx(again(SCORE, record.columns), rel=1e-12)


@shared
@here
def test_every_committed_record_is_shown_somewhere() -> None:
    shown = {run for name in TABLES for run in committed(name)["runs"]}
    figures = REFERENCE.glob("figures/**/*.csv")
    shown |= {word for path in figures for word in path.read_text().replace(",", " ").split()}
    of_claims = (run for one in judgements() for run in one.runs)  # of more items than in tables
    shown |= {run.record.identity_hash for run in of_claims if run.record}
    stored = {json.loads(run.listed)["identity_hash"] for run in RecordIndex(STORE).sealed()}
    assert stored <= shown
