"""The committed results (`results/reference`) and stored results of earlier versions.

The records give the committed bytes of every table and what the pages say of claims; each record is
what its hash and its samples say. Skips what a checkout does not have. A script reads them, chooses
runs, and finds differences; records of earlier versions are refused, and rewritten by another.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean

import pytest

from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.claims.verdict import Judgement, judge_stored
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import definitions
from dllm_bench.registry import TARGET, find, name_of
from dllm_bench.store.index import RecordIndex
from dllm_bench.store.store import Store, read_record
from dllm_bench.tables.frame import build
from dllm_bench.tables.load import load_profile, load_table, names_of
from dllm_bench.tables.plan import Planner
from dllm_bench.tables.render import render
from scripts import check_reference
from scripts.convert_results import FORMER_PATHS, NAMES, convert, renamed
from scripts.update_docs import findings_page, stored_findings, with_evidence
from tests.tables.builders import settings
from tests.tiers import covering

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
TABLES = [name for name in names_of("table") if (REFERENCE / "tables" / f"{name}.json").exists()]
STORE = Store(REFERENCE / "runs")
here = pytest.mark.skipif(not TABLES, reason=f"nothing is committed below {REFERENCE.name}")
shared = pytest.mark.xdist_group("reference claims")  # which share settings and `judgements`


@cache
def planner() -> Planner:
    """Plans from the committed runs; the tests of a process share what it composed and read."""
    return Planner.cached(settings(), STORE)


@cache
def judgements() -> list[Judgement]:
    """Return all claims on the committed records."""
    return judge_stored(load_profile("embedded"), planner())


@pytest.mark.exhaustive
@shared
@here
def test_the_findings_page_and_the_readme_say_what_the_records_give() -> None:
    found, root = stored_findings(planner(), judgements()), REFERENCE.parents[1]
    page, readme = root / "docs" / "findings.md", (root / "README.md").read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8") == findings_page(found), "run scripts.update_docs"
    assert readme == with_evidence(readme, found), "run scripts.update_docs"


@pytest.mark.exhaustive
@shared
@here
def test_every_claim_has_the_items_of_its_table_and_no_more() -> None:
    """None was given more items than another claim on the same cells, whatever came out."""
    for one in judgements():
        assert one.why.endswith(".") and one.command.startswith("dllm-bench claims ")
        if one.evidence is None:
            continue
        limits = [run.spec.limit for run in one.runs if run.spec]
        held = [len(run.record.columns["id"]) for run in one.runs if run.record and run.spec]
        assert held == limits, one.claim.name


@shared
@here
@pytest.mark.parametrize("name", covering(9, TABLES))
def test_the_committed_bytes_follow_from_the_records(name: str) -> None:
    [planned] = planner().common([load_table(name)], load_profile("embedded"))
    forms = render(build(*planned))
    for form in ("md", "json"):
        text, path = forms[form], REFERENCE / "tables" / f"{name}.{form}"
        assert path.read_text(encoding="utf-8") == text, f"{path.name} differs; render it again"


@here
@pytest.mark.parametrize(
    "folder", covering(20, STORE.folders(), often=10), ids=lambda folder: folder.name
)
def test_a_committed_record_is_what_its_hash_says(folder: Path) -> None:
    """The identity follows from the specification, the summary and score from the columns."""
    record = read_record(folder)
    assert record and record.spec.identity_hash == record.identity_hash
    assert folder.name.endswith(record.spec.short) and STORE.path(record.spec) == folder
    samples = record.samples
    for name, value in record.summary.items():
        again_measured = definitions.measure(name, samples)
        assert again_measured == (value if value is None else pytest.approx(value, rel=1e-12)), name
    if record.score:
        ids = map(item_id_of, record.columns["id"])
        graded = [p for p in zip(ids, record.columns["value"], strict=True) if p[1] is not None]
        items = groupby(sorted(graded), key=lambda pair: pair[0])
        means = [fmean(value for _, value in group) for _, group in items]
        assert record.score.mean == pytest.approx(fmean(means), rel=1e-12)


@pytest.mark.exhaustive  # it judges all claims
@shared
@here
def test_every_committed_record_is_shown_somewhere() -> None:
    tables = (json.loads((REFERENCE / f"tables/{name}.json").read_text()) for name in TABLES)
    shown = {run for table in tables for run in table["runs"]}
    figures = REFERENCE.glob("figures/**/*.csv")
    shown |= {word for path in figures for word in path.read_text().replace(",", " ").split()}
    of_claims = (run for one in judgements() for run in one.runs)  # of more items than in tables
    shown |= {run.record.identity_hash for run in of_claims if run.record}
    assert {json.loads(run.listed)["identity_hash"] for run in RecordIndex(STORE).sealed()} <= shown


OLD_RUN = Path(__file__).parents[1] / "data" / "run_before_registered_names"


def test_a_run_with_module_paths_is_refused_and_converted(tmp_path: Path) -> None:
    """One record and its folder as version 0.1 sealed them."""
    shutil.copytree(OLD_RUN, tmp_path / "old" / "runs")
    [folder] = (path.parent for path in OLD_RUN.rglob("record.json"))
    with pytest.raises(DllmBenchError, match=r"schema version 3.*scripts\.convert_results"):
        read_record(folder)
    convert(tmp_path / "old", tmp_path / "new")
    store = Store(tmp_path / "new" / "runs")
    [record] = store.records()
    assert store.path(record.spec).name.endswith(record.spec.short)
    assert not folder.name.endswith(record.spec.short) and store.record(record.spec) == record


def test_former_names_are_read_back() -> None:
    plain = [{TARGET: path, "inner": {TARGET: path}} for path in FORMER_PATHS.values()]
    assert renamed(renamed(plain, NAMES), FORMER_PATHS) == plain
    assert all(name_of(find(name)) == name for name in FORMER_PATHS)


def test_one_run_of_each_pair_of_decoder_and_model_is_chosen(monkeypatch) -> None:
    records = list(islice(check_reference.reference_records(), 60))
    monkeypatch.setattr(check_reference, "reference_records", lambda: iter(records))
    chosen = list(check_reference.chosen_records((), every=False))
    pairs = {(record.spec.label, record.spec.model.name) for record in chosen}
    assert len(pairs) == len(chosen) > 1
    label = records[-1].spec.label
    every = list(check_reference.chosen_records((label,), every=True))
    assert [one for one in records if label in f"{one.spec.label} {one.spec.model.name}"] == every


def test_differences_are_counted_by_column_without_times() -> None:
    record = next(check_reference.reference_records())
    assert check_reference.differences(record, record) == {}
    count = next(name for name in record.columns if name.startswith("forwards"))
    time = next(name for name in record.columns if name.endswith(check_reference.TIME_SUFFIXES))
    other = [None, *record.columns[count][1:]]
    changed = replace(record, columns={**record.columns, count: other, time: other})
    assert check_reference.differences(record, changed) == {count: 1}
    shorter = replace(record, columns={name: rows[:4] for name, rows in record.columns.items()})
    assert check_reference.differences(record, shorter) == {}
    less = replace(record, columns={n: rows for n, rows in record.columns.items() if n != count})
    assert check_reference.differences(record, less) == {count: len(record.columns[count])}
