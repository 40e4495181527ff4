"""Every claim on the committed results, its effect and interval computed a second time.

The formulas here are written down again: which columns a metric divides, McNemar's table, the
interval of paired shares, the bootstrap. Skips what a checkout does not have.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from dllm_bench.api.compose import compose
from dllm_bench.claims.verdict import Judgement, judge_stored
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store, read_record
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
COUNTS = {  # metric -> (numerator, denominator) of one sample
    "tpf/committed": lambda c, i: (c["committed"][i], c["forwards"][i]),
    "tpf/net": lambda c, i: (c["committed"][i], c["forwards"][i]),  # where nothing is masked again
    "tpf/lopa": lambda c, i: (c["allocated"][i], c["forwards"][i] + 1),
    "tpf/lopa_dist": lambda c, i: (c["committed"][i], c["forwards"][i] + 1),
    "tpf/lopa_coder": lambda c, i: (c["content"][i], c["forwards"][i]),
    "forwards/mean": lambda c, i: (c["forwards"][i], 1),
    "acceptance/length": lambda c, i: (sum(r[2] for r in c["rounds"][i]), len(c["rounds"][i])),
    "acceptance/verify_rate": lambda c, i: (
        sum(r[2] for r in c["rounds"][i]),
        sum(r[0] + 1 for r in c["rounds"][i]),
    ),
    "acceptance/conditional@1": lambda c, i: (
        sum(r[1] > 0 for r in c["rounds"][i]),
        sum(r[0] > 0 for r in c["rounds"][i]),
    ),
    "acceptance/conditional@7": lambda c, i: (
        sum(r[1] > 6 for r in c["rounds"][i]),
        sum(r[0] > 6 and r[1] > 5 for r in c["rounds"][i]),
    ),
}
TIMES = {"tps/e2e", "speedup/baseline"}  # passes of the same items widen their intervals, too


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


def records(side: Row) -> list[RunRecord]:
    """Return the records behind a side, one for each benchmark that is averaged."""
    return records_of(side.planned)


def trainings(one: Judgement) -> list[tuple[list[RunRecord], list[RunRecord]]]:
    """Records of both sides of each training, which the names of trained parts tell apart."""
    if not one.claim.trainings:
        return [(records(one.sides.ours), records(one.sides.theirs))]
    seeds = len(one.claim.trainings["training"].split())
    sides = []
    for side in (one.sides.ours.runs, one.sides.theirs.runs):
        by_benchmark = []
        for first in side:
            alike = [run for run in one.runs if plain(run.command) == plain(first.command)]
            found = [run.record for run in sorted(alike, key=lambda run: seed_of(run.command))]
            assert len(found) in (1, seeds), one.claim.name
            by_benchmark.append(found * (seeds if len(found) == 1 else 1))
        sides.append([list(records) for records in zip(*by_benchmark, strict=True)])
    return list(zip(*sides, strict=True))


def plain(command: str) -> str:
    """Return the command without the seed of a training."""
    return re.sub(r"-seed\d+", "", command)


def seed_of(command: str) -> int:
    """Return the seed of a training; the first one is not named."""
    return int((re.findall(r"-seed(\d+)", command) or [0])[0])


def check_crossed(one: Judgement, values: list[float], variances: list[float]) -> None:
    """The mean over trainings; their variance and that of the shared items add up."""
    n = len(values)
    middle = np.mean(values)
    error = np.sqrt(np.var(values, ddof=1) / n + np.mean(variances))
    ends = middle + scipy.stats.t.ppf([0.5, 0.025, 0.975], n - 1) * error
    wanted = ends if one.claim.is_difference else np.exp(ends)
    found = (one.evidence.value, one.evidence.low, one.evidence.high)
    slack = 0 if one.claim.is_difference else 0.05 * (wanted[2] - wanted[1])
    assert found[0] == pytest.approx(wanted[0]), one.claim.name
    assert found[1:] == pytest.approx(tuple(wanted[1:]), abs=slack or 1e-4), one.claim.name


def ratio_of(record: RunRecord, metric: str, weights: np.ndarray) -> np.ndarray:
    """Return the metric with each sample counted `weights` times; one value per row of weights."""
    places = range(len(record.columns["id"]))
    tops, bottoms = np.array([COUNTS[metric](record.columns, i) for i in places], float).T
    return weights @ tops / (weights @ bottoms)


@cache
def resamples(benchmark: str, n: int) -> np.ndarray:
    """Return how often each of n items counts: once, then in 4,000 resamples of a benchmark."""
    rng = np.random.default_rng([11, *benchmark.encode()])
    return np.vstack([np.ones(n), rng.multinomial(n, [1 / n] * n, 4000)])


def drawn_ratios(ours: list[RunRecord], theirs: list[RunRecord], metric: str) -> np.ndarray:
    """Our mean of benchmarks over the other, as measured and in resamples of the items."""
    sides: tuple[list, list] = ([], [])
    for pair in zip(ours, theirs, strict=True):
        assert pair[0].columns["id"] == pair[1].columns["id"]
        weights = resamples(pair[0].spec.benchmark["name"], len(pair[0].columns["id"]))
        for side, record in zip(sides, pair, strict=True):
            side.append(ratio_of(record, metric, weights))
    return np.mean(sides[0], axis=0) / np.mean(sides[1], axis=0)


@here
def test_every_ratio_and_its_interval_are_recomputed() -> None:
    seen = 0
    for one in judgements():
        if one.evidence is None or one.claim.is_difference or one.claim.metric in TIMES:
            continue
        seen += 1
        metric = one.claim.metric
        drawn_T = [drawn_ratios(*pair, metric) for pair in trainings(one)]
        if one.claim.trainings:
            logs = np.log(drawn_T)
            check_crossed(one, logs[:, 0].tolist(), logs[:, 1:].var(axis=1, ddof=1).tolist())
            continue
        (drawn,) = drawn_T
        exact, low, high = drawn[0], *np.quantile(drawn[1:], [0.025, 0.975])
        assert one.evidence.value == pytest.approx(exact), one.claim.name
        slack = 0.12 * (high - low)
        assert one.evidence.low == pytest.approx(low, abs=slack), one.claim.name
        assert one.evidence.high == pytest.approx(high, abs=slack), one.claim.name
    assert seen >= 15


def paired(ours: list[RunRecord], theirs: list[RunRecord]) -> tuple[float, float, float]:
    """Mean difference of scores, centre and standard error by Agresti and Min, in points."""
    effects, centres, variances = [], [], []
    for one, other in zip(ours, theirs, strict=True):
        assert one.columns["id"] == other.columns["id"]
        both = list(zip(one.columns["value"], other.columns["value"], strict=True))
        b, c, n = both.count((1.0, 0.0)), both.count((0.0, 1.0)), len(both)
        p12, p21 = (b + 0.5) / (n + 2), (c + 0.5) / (n + 2)  # half an item in each cell
        effects.append(100 * (b - c) / n)
        centres.append(100 * (p12 - p21))
        variances.append(100**2 * (p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    k = len(effects)
    return sum(effects) / k, sum(centres) / k, float(np.sqrt(sum(variances)) / k)


@here
def test_every_score_difference_and_its_interval_are_recomputed() -> None:
    seen = 0
    for one in judgements():
        if one.evidence is None or not one.claim.is_difference:
            continue
        seen += 1
        found = [paired(*pair) for pair in trainings(one)]
        if one.claim.trainings:
            check_crossed(one, [value for value, _, _ in found], [error**2 for *_, error in found])
            continue
        ((value, centre, error),) = found
        width = 1.959964 * error
        assert one.evidence.value == pytest.approx(value), one.claim.name
        assert one.evidence.low == pytest.approx(centre - width, abs=1e-4)
        assert one.evidence.high == pytest.approx(centre + width, abs=1e-4)
    assert seen >= 10


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


@cache
def one_token_scores() -> dict[tuple[str, str, str], list[dict[str, float]]]:
    """(benchmark, weights, items) -> item scores of each decoding of a token per forward."""
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    store = planner().store
    compared = [records(one.sides.theirs) for one in judgements() if one.evidence]
    folders = {store.path(record.spec).parent for side in compared for record in side}
    for record in map(read_record, (one for one in store.folders() if one.parent in folders)):
        assert record
        made, forwards = record.columns.get("committed"), record.columns.get("forwards")
        if not made or any(record.columns.get("rounds", [])):
            continue
        if all(m is not None and f and f >= m for m, f in zip(made, forwards, strict=True)):
            found.setdefault(of_model(record), []).append(record.values)
    return found


def of_model(record: RunRecord) -> tuple[str, str, str]:
    inputs, names = record.spec.inputs, (record.spec.benchmark["name"], record.spec.model["name"])
    return f"{names}", inputs["weights"], inputs["dataset"]


def loss_of(baseline: list[RunRecord]) -> float | None:
    """Points that the best one-token decoding is above the baseline; None: none is stored."""
    losses = []
    for record in baseline:
        own = record.values
        shared = [
            np.mean([other[k] - own[k] for k in other.keys() & own.keys()])
            for other in one_token_scores().get(of_model(record), [])
            if other.keys() & own.keys()
        ]
        if not shared:
            return None
        losses.append(100 * max(shared))
    return float(np.mean(losses))


def heads(side: list[RunRecord]) -> set[str]:
    """Hashes of the trained parts of a side, found in the text of its settings."""
    words = " ".join(str(record.spec.decoder) for record in side).replace("'", " ").split()
    return {word for word in words if len(word) == 64} | {r.spec.inputs["weights"] for r in side}


def admissible(one: Judgement) -> set[str]:
    """Return the verdicts that the rules of docs/claims.md allow for what the records say."""
    ours, theirs = records(one.sides.ours), records(one.sides.theirs)
    drafts = any(any(record.columns.get("rounds", [])) for record in ours)
    trained = trainings(one)
    compared = heads(ours) != heads(theirs) and not (drafts and one.claim.metric == "score")
    if compared and len({frozenset(heads(each)) for each, _ in trained}) < 6:
        return {"too few trainings"}
    for _, baseline in [] if drafts else trained:
        loss = loss_of(baseline)
        if loss is None or loss > 2:
            return {"baseline unchecked"} if loss is None else {"baseline impaired"}
    low, high, allowed = one.evidence.low, one.evidence.high, {"not settled"}
    a, b = one.claim.printed or (None, None)
    if one.claim.metric == "score":
        stated, none, margin = (a - b if a else None), 0.0, (abs(a - b) / 2 if a else 2.0)
        least, most = -margin, margin
        band = (stated - margin, stated + margin) if a else None
    else:
        stated, none = (a / b if a else None), 1.0
        most = max(a / b, b / a) ** 0.5 if a else 1.05
        least, width = 1 / most, min(most, 1.2)
        band = (stated / width, stated * width) if a else None
    if one.claim.direction == "equal":
        allowed |= {"confirmed"} if least < low and high < most else set()
        allowed |= {"contradicted"} if high < least else set()
        return allowed | ({"direction only"} if low > least else set())
    up = one.claim.direction == "higher"
    if (high < most) if up else (low > least):
        allowed.add("contradicted")
    if (low > none) if up else (high < none):
        allowed.add("direction only")
        if stated is None:
            allowed.add("confirmed")
        elif low <= stated <= high:
            allowed |= {"confirmed"} if band[0] <= low and high <= band[1] else set()
        else:
            beyond = low > stated if up else high < stated
            allowed.add("larger than printed" if beyond else "smaller than printed")
    return allowed


@here
def test_every_verdict_follows_from_the_records_by_the_published_rules() -> None:
    """Holm's correction may hold a verdict back; it gives none that the intervals do not."""
    seen = 0
    for one in judgements():
        if one.evidence is not None:
            seen += 1
            assert str(one.verdict) in admissible(one), (one.claim.name, admissible(one))
    assert seen >= 50
