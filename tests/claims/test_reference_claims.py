"""Every claim on the committed results: which items it was judged on, and what the pages say of it.

How verdicts follow from runs is in test_claims, how often they err in test_procedure. Skips what a
checkout does not have.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.claims.verdict import Judgement, judge_stored
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store
from dllm_bench.tables.derive import records_of
from dllm_bench.tables.frame import Row
from dllm_bench.tables.load import load_profile
from dllm_bench.tables.plan import Planner
from scripts.update_docs import findings_page, stored_findings, with_evidence

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
pytestmark = [
    pytest.mark.xdist_group("reference claims"),  # which share `judgements`
    pytest.mark.exhaustive,
]
here = pytest.mark.skipif(
    not (REFERENCE / "runs.tar.xz").exists(), reason="no reference results are committed"
)


@cache
def settings() -> SettingsCache:
    """Composed settings that the tests of a process share; never saved."""
    return SettingsCache(REFERENCE, compose)


@cache
def judgements() -> list[Judgement]:
    """Return all claims on the committed records."""
    planner = Planner.cached(settings(), Store(REFERENCE / "runs"))
    return judge_stored(load_profile("embedded"), planner)


def records(side: Row) -> list[RunRecord]:
    """Return the records behind a side, one for each benchmark that is averaged."""
    return records_of(side.planned)


@here
def test_chosen_settings_are_reported_on_items_that_did_not_choose_them() -> None:
    for one in judgements():
        if one.evidence is None or not one.claim.chooses:
            continue
        for half in records(one.sides.ours):
            used, text = set(half.columns["id"]), half.spec.benchmark.name
            stored = [r.record for r in one.runs if r.record]
            whole = [r.columns["id"] for r in stored if r.spec.benchmark.name == text]
            assert all(used < set(ids) and len(used) == len(ids) // 2 for ids in whole)


@here
def test_every_testable_claim_has_a_verdict_or_a_reason() -> None:
    for one in judgements():
        assert one.why.endswith(".")
        assert one.command.startswith("dllm-bench claims ")


@here
def test_the_findings_page_and_the_readme_say_what_the_records_give() -> None:
    found, root = stored_findings(judgements()), REFERENCE.parents[1]
    page, readme = root / "docs" / "findings.md", (root / "README.md").read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8") == findings_page(found), "run scripts.update_docs"
    assert readme == with_evidence(readme, found), "run scripts.update_docs"


@here
def test_every_claim_has_the_items_of_its_table_and_no_more() -> None:
    """None was given more items than another claim on the same cells, whatever came out."""
    for one in judgements():
        if one.evidence is None:
            continue
        limits = [run.spec.limit for run in one.runs if run.spec]
        held = [len(run.record.columns["id"]) for run in one.runs if run.record and run.spec]
        assert held == limits, one.claim.name
