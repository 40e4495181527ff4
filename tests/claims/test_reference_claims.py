"""Claims on the committed results: what the pages say of them. Skips what a checkout does not have.

That effects, intervals and verdicts are the published ones is tested on made-up runs
(`test_claims`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.claims.verdict import Judgement, judge_stored
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.store import Store
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
def planner() -> Planner:
    """Plans from the committed runs; the tests of a process share what it composed and read."""
    return Planner.cached(settings(), Store(REFERENCE / "runs"))


@cache
def judgements() -> list[Judgement]:
    """Return all claims on the committed records."""
    return judge_stored(load_profile("embedded"), planner())


@here
def test_the_findings_page_and_the_readme_say_what_the_records_give() -> None:
    found, root = stored_findings(planner(), judgements()), REFERENCE.parents[1]
    page, readme = root / "docs" / "findings.md", (root / "README.md").read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8") == findings_page(found), "run scripts.update_docs"
    assert readme == with_evidence(readme, found), "run scripts.update_docs"


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
