"""Claims as they are frozen: dates and printed numbers, and the history of their verdicts."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dllm_bench.claims.findings import Findings, history, history_rows, markdown
from dllm_bench.claims.spec import Claim, source_table
from dllm_bench.claims.verdict import ClaimVerdict, Judgement
from scripts import claim_history
from tests.claims.test_claims import CLAIMS, TPF, claim, verdict

ROOT = Path(__file__).resolve().parents[2]


def printed_of(one: Claim) -> tuple[float, float] | None:
    """Return what the tables of reported values have for both sides of a claim; None if not
    both."""
    whole = source_table(one.table)
    names = [metric.name for metric in whole.metrics if metric.definition == one.metric]
    values = []
    for (side,) in (one.ours, one.theirs):
        keys = {**(one.at or {}), **side}
        found = [c.reported for c in whole.cells() if c.keys == keys and c.metric.name in names]
        values += [one.value for one in found if one and one.value is not None][:1]
    return (values[0], values[1]) if len(values) == 2 else None


def test_printed_numbers_are_those_of_the_tables_of_reported_values() -> None:
    seen = 0
    for one in CLAIMS:
        if one.untestable or one.chooses or one.table.startswith("figure/"):
            continue
        found = printed_of(one)
        if found and one.printed:
            assert one.printed == pytest.approx(found), one.name
            seen += 1
        elif found and one.printed is None:
            raise AssertionError(f"{one.name} has no margin from the printed {found}")
    assert seen >= 20


def test_no_claim_is_dated_in_the_future() -> None:
    assert all(one.frozen <= datetime.now(UTC).date() for one in CLAIMS)


def test_a_verdict_says_whether_its_runs_are_older_than_the_claim() -> None:
    forwards = [[5, 6] * 30, [11, 12] * 30]
    made = verdict(claim(TPF), [[1.0] * 60] * 2, forwards)
    assert made.runs[0].record
    day = datetime.fromtimestamp(made.runs[0].record.sealed_at, UTC).date()
    for later in (0, 1):
        frozen = claim(TPF, frozen=day + timedelta(days=later))
        again = verdict(frozen, [[1.0] * 60] * 2, forwards)
        assert again.rests_on_older_runs is bool(later)


def test_no_two_claims_compare_the_same_cells_by_the_same_metric() -> None:
    compared = [
        (one.table, str(one.at), str(one.ours), str(one.theirs), one.metric)
        for one in CLAIMS
        if not one.untestable
    ]
    assert len(set(compared)) == len(compared)


def test_every_name_that_ever_had_a_verdict_says_what_became_of_it() -> None:
    now = [Judgement(one, ClaimVerdict.NOT_RUN, "", "") for one in CLAIMS]
    rows = {name: became for name, _, became in history_rows(now)}
    assert rows["lopa/no_loss_gsm8k"] == "not run"
    assert rows["creditdecoding/score_llada"] == "part of creditdecoding/no_loss_llada"
    assert "withdrawn" not in rows.values()


def test_verdicts_in_the_prose_are_those_of_the_claims() -> None:
    now = [Judgement(one, ClaimVerdict.CONTRADICTED, "", "") for one in CLAIMS]
    page = markdown(Findings(now, {}), str)
    assert "LLaDA-MoE contradicted, on unseen items contradicted" in page
    assert "{" not in page
    other = [Judgement(one, ClaimVerdict.NOT_RUN, "", "") for one in CLAIMS]
    assert "LLaDA-MoE not run, on unseen items not run" in markdown(Findings(other, {}), str)


def test_the_history_is_what_the_versions_of_the_page_say() -> None:
    last = max((entry["date"], entry["commit"]) for said in history().values() for entry in said)
    known = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", last[1]], capture_output=True, check=False
    )
    if known.returncode:
        pytest.skip("this checkout has no history")
    commits = {entry["commit"] for said in history().values() for entry in said}
    for name, said in claim_history.history().items():
        again = [entry for entry in said if entry["commit"] in commits]
        assert again == history().get(name, []), name


def test_a_page_is_read_by_the_rows_of_its_tables() -> None:
    page = "| A (Table 1) | confirmed | × 2 [1, 3] | 60 | why. | `dllm-bench claims a/b --x y` |\n"
    ((name, said),) = claim_history.rows(page)
    assert name == "a/b"
    assert said["verdict"] == "confirmed"
    assert said["items"] == "60"
