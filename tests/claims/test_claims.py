"""Claims and their statistics on made-up runs: choice of settings, tests, verdicts, power."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dllm_bench.claims.evidence import crossed, is_one_token, sides_of
from dllm_bench.claims.findings import Findings, history, markdown
from dllm_bench.claims.spec import Claim, Direction, load_claim, read_claim, source_table
from dllm_bench.claims.verdict import ClaimVerdict, Judgement, items_needed, judge_claims
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.accuracy import Effect, holm, mean_score
from dllm_bench.tables.load import load_profile, names_of
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun
from dllm_bench.tables.spec import SCORE, Cell, FacetValue, TableMetric, parse_number
from scripts import claim_history
from tests.tables.builders import compose, record_of, spec_of

CLAIMS = [load_claim(name) for name in names_of("claim")]
EMBEDDED = load_profile("embedded")
TPF, FORWARDS = "tpf/committed", 10
OfSides = Sequence[Sequence[float]]  # numbers of our items, then of theirs
SPEC = spec_of(compose(["model=m", "decoder=d", "benchmark=quiz", "hardware=cpu"]))


def claim(metric: str, direction: str = "higher", **changes: object) -> Claim:
    """Return a claim on `ours` against `theirs`."""
    sides = {"ours": ({"side": "ours"},), "theirs": ({"side": "theirs"},)}
    plain = {"metric": metric, "direction": Direction(direction), **sides}
    return Claim("paper/claim", "A is more than B.", "Table 1", table="x", **{**plain, **changes})


made_up = cache(lambda n: record_of(SPEC, n=n))
"""A run of n items, whose columns callers replace."""


def cell(side: str, metric: str, right: Sequence[float], forwards: Sequence[float]) -> PlannedCell:
    """Return a sealed run whose items have these scores and forwards."""
    record = made_up(len(right))
    columns = {**record.columns, "value": list(right), "forwards": list(forwards)}
    record = replace(record, columns=columns, score=mean_score(list(right)))
    run = PlannedRun((f"decoder={side}",), CellState.SEALED, record=record)
    made_of = TableMetric("", "", metric)
    return PlannedCell(Cell({"side": FacetValue(side)}, made_of, run.query, "", ()), run)


def cells(metric: str, right: OfSides, forwards: OfSides) -> list[PlannedCell]:
    return list(map(cell, ("ours", "theirs"), (metric,) * 2, right, forwards))


def with_record(planned: PlannedCell, **changes: object) -> PlannedCell:
    """Return the cell with other fields of its run's record."""
    assert planned.run.record
    return replace(planned, run=replace(planned.run, record=replace(planned.run.record, **changes)))


def verdict(one: Claim, right: OfSides, forwards: OfSides) -> Judgement:
    """Return the judgement of one claim that is a family of its own."""
    return judge_claims([one], [cells(one.metric, right, forwards)], EMBEDDED)[0]


UNTESTABLE = "sentence: a, stands: b, untestable: c, frozen: 2026-11-26"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{sentence: a, stands: b, tabel: c}", "tabel"),
        ("{sentence: a, stands: b, table: t, frozen: 2026-11-26}", "add what is missing"),
        ("{sentence: a, stands: b, untestable: c}", "has no date"),
        (f"{{{UNTESTABLE}, printed: [1, 1]}}", "equal"),
        (f"{{{UNTESTABLE}, printed: [1, 0], metric: tpf/net}}", "a ratio, not above 0"),
        (f"{{{UNTESTABLE}, printed: [1, 2, 3]}}", "a.yaml .* as a claim: printed of a Claim"),
        (f"{{{UNTESTABLE}, direction: more}}", "a.yaml .* as a claim: 'more' is not"),
        (f"{{{UNTESTABLE}, trainings: {{a: b, c: d}}}}", "too many values"),
        ("{stands: b}", "it has no 'sentence'"),
        ("", "a.yaml cannot be read as a claim"),
    ],
)
def test_a_wrong_claim_is_refused_with_what_to_do(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(DllmBenchError, match=words):
        read_claim("paper/a", tmp_path / "a.yaml")


def test_a_claim_on_a_value_that_the_table_lacks_names_the_facet() -> None:
    wrong = replace(load_claim("lopa/tpf_gsm8k"), ours=({"decoder": "magic"},))
    with pytest.raises(DllmBenchError, match="facet decoder has vanilla"):
        wrong.cells()


@pytest.mark.parametrize(
    ("direction", "times", "printed", "expected"),
    [
        ("higher", 2.0, None, ClaimVerdict.CONFIRMED),
        ("higher", 1.0, None, ClaimVerdict.CONTRADICTED),
        ("higher", 0.5, None, ClaimVerdict.CONTRADICTED),
        ("lower", 0.5, None, ClaimVerdict.CONFIRMED),
        ("lower", 2.0, None, ClaimVerdict.CONTRADICTED),
        ("higher", 2.0, (2.0, 1.0), ClaimVerdict.CONFIRMED),
        ("higher", 2.0, (1.5, 1.0), ClaimVerdict.LARGER),
        ("higher", 2.0, (4.0, 1.0), ClaimVerdict.SMALLER),
        ("lower", 0.5, (1.0, 1.5), ClaimVerdict.LARGER),
        ("lower", 0.5, (1.0, 4.0), ClaimVerdict.SMALLER),
    ],
)
def test_a_clear_ratio_is_judged_by_direction_and_size(direction, times, printed, expected) -> None:
    """`times` as many tokens per forward, whose items vary."""
    ours = [20, 22] * 30
    forwards = [ours, [int(times * n) for n in reversed(ours)]]
    one = claim(TPF, direction, printed=printed)
    assert verdict(one, [[1.0] * 60] * 2, forwards).verdict is expected


def test_an_interval_wider_than_the_band_confirms_no_size() -> None:
    rng = np.random.default_rng(1)
    forwards = [rng.integers(2, 40, 24).tolist(), rng.integers(4, 80, 24).tolist()]
    one = claim(TPF, printed=(sum(forwards[1]), sum(forwards[0])))
    assert verdict(one, [[1.0] * 24] * 2, forwards).verdict is ClaimVerdict.DIRECTION_ONLY


def scores(only_ours: int, only_theirs: int, both: int) -> list[list[float]]:
    ours = [1.0] * only_ours + [0.0] * only_theirs + [1.0] * both
    return [ours, [0.0] * only_ours + [1.0] * only_theirs + [1.0] * both]


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        (scores(2, 2, 596), ClaimVerdict.CONFIRMED),
        (scores(0, 0, 20), ClaimVerdict.NOT_SETTLED),  # no item differs, and 20 are not enough
        (scores(5, 60, 200), ClaimVerdict.CONTRADICTED),
        (scores(10, 40, 500), ClaimVerdict.NOT_SETTLED),  # a loss, and not beyond the margin
        (scores(30, 2, 100), ClaimVerdict.DIRECTION_ONLY),  # a gain is no loss, and not equality
        (scores(6, 8, 46), ClaimVerdict.NOT_SETTLED),
        (scores(9, 9, 176), ClaimVerdict.NOT_SETTLED),  # each one-sided test is at half the level
    ],
)
def test_no_loss_is_an_equivalence(right: list[list[float]], expected: ClaimVerdict) -> None:
    one = claim(SCORE, "equal", printed=(90.0, 80.0))
    made = verdict(one, right, [[FORWARDS] * len(right[0])] * 2)
    assert made.verdict is expected
    assert (f"{made.needed} items are needed." in made.why) is (made.verdict == "not settled")


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_an_effect_worth_seeing_is_excluded_at_half_the_level(direction: str) -> None:
    made = verdict(claim(SCORE, direction), scores(2, 2, 229), [[FORWARDS] * 233] * 2)
    assert made.verdict is ClaimVerdict.NOT_SETTLED


def test_an_effect_and_its_interval_are_the_published_formulas() -> None:
    """Of scores by Agresti and Min; of speeds by items drawn for both, whatever their seeds."""
    found, n = verdict(claim(SCORE), scores(30, 12, 100), [[FORWARDS] * 142] * 2).evidence, 142
    b, c = 30.5 / (n + 2), 12.5 / (n + 2)
    width = 1.959964 * ((b + c - (b - c) ** 2) / (n + 2)) ** 0.5
    assert found and found.value == pytest.approx(100 * 18 / n)
    ends = (100 * (b - c - width), 100 * (b - c + width))
    assert (found.low, found.high) == pytest.approx(ends, abs=1e-4)
    rng = np.random.default_rng(11)
    forwards_SI = rng.integers(5, 30, (2, 60)) * [[1], [2]]
    found = verdict(claim(TPF), [[1.0] * 60] * 2, forwards_SI.tolist()).evidence
    sums_SR = forwards_SI @ rng.multinomial(60, [1 / 60] * 60, 4000).T
    low, high = np.quantile(sums_SR[1] / sums_SR[0], [0.025, 0.975])
    assert found and found.value == pytest.approx(forwards_SI[1].sum() / forwards_SI[0].sum())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.12 * (high - low))
    planned = cells(TPF, [[1.0] * 60] * 2, forwards_SI.tolist())
    planned[0] = with_record(planned[0], spec=replace(SPEC, seed=1))
    assert judge_claims([claim(TPF)], [planned], EMBEDDED)[0].evidence == found


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("no width", "no width"),
        ("one run", "same runs"),
        ("one pass", "make the runs again with --passes 5"),
        ("other machine", r"\(Another CPU, Test CPU\); make the runs of both sides on one"),
    ],
)
def test_sides_that_cannot_be_compared_are_untestable(what: str, why: str) -> None:
    metric = "tps/e2e" if what in ("other machine", "one pass") else TPF
    planned = cells(metric, [[1.0] * 20] * 2, [[5] * 20, [10] * 20])
    if what == "one pass":
        planned[1].run.record.columns["seconds"] = [1.0 + i % 3 for i in range(20)]
    if what == "one run":
        planned[1] = replace(planned[1], run=planned[0].run)
    if what == "other machine":
        [first] = made_up(20).sessions
        elsewhere = replace(first, environment={**first.environment, "device": "Another CPU"})
        planned[1] = with_record(planned[1], sessions=[elsewhere])
    judged = judge_claims([claim(metric)], [planned], EMBEDDED)[0]
    assert judged.verdict is ClaimVerdict.UNTESTABLE and re.search(why, judged.why)


def test_a_missing_run_weighs_on_the_family_and_changes_no_verdict_for_the_better() -> None:
    forwards = [[9 + i % 4 for i in range(60)], [10 + i % 3 for i in range(60)]]
    made = cells(TPF, [[1.0] * 60] * 2, forwards)
    missing = [replace(c, run=PlannedRun(c.run.query, CellState.MISSING)) for c in made]
    alone = judge_claims([claim(TPF)], [made], EMBEDDED)[0]
    among = judge_claims([claim(TPF)] * 3, [made, missing, missing], EMBEDDED)
    assert [one.verdict for one in among[1:]] == [ClaimVerdict.NOT_RUN] * 2
    assert among[0].tests.supports > alone.tests.supports


@pytest.mark.parametrize(
    ("right", "expected"),
    [(range(60), "baseline impaired"), (range(40), "confirmed"), ((), "baseline unchecked")],
)
def test_a_baseline_below_one_token_per_forward_tests_nothing(right, expected) -> None:
    forwards = [[5 + i % 3 for i in range(60)], [20 + i % 3 for i in range(60)]]
    planned = cells(TPF, [[float(i < 40) for i in range(60)]] * 2, forwards)
    slow = cell("slow", TPF, [float(i in right) for i in range(60)], [64] * 60).run.record
    assert slow
    spec = replace(slow.spec, inputs={"weights": "of another model"})
    worse, other = cell("worse", TPF, [0.0] * 60, [64] * 60).run.record, replace(slow, spec=spec)
    beside = [worse, slow] if right else [other]
    judged = judge_claims([claim(TPF)], [planned], EMBEDDED, lambda _: beside)[0]
    assert str(judged.verdict) == expected and judged.evidence
    revised = replace(slow, columns={**slow.columns, "remasked": [1] * 60})
    assert [is_one_token(slow), is_one_token(revised)] == [True, False]


@pytest.mark.parametrize(("n", "expected"), [(1, "too few"), (3, "too few"), (6, "confirmed")])
def test_a_claim_about_training_needs_six_trainings(n: int, expected: str) -> None:
    """Both sides have weights of their own, and the gain differs between trainings."""
    names = [f"s{i}" for i in range(n)]
    one = claim(TPF, trainings={"training": " ".join(names)}) if n > 1 else claim(TPF)
    rng = np.random.default_rng(5)
    planned = []
    for name in names:
        for side, least in (("ours", 5), ("theirs", 15)):
            own: dict[str, Any] = {"inputs": {"weights": side + name}}
            if n == 3:
                own = {"decoder": {"draft": {"sha256": side + name}}}
            made = cell(side, TPF, [1.0] * 60, (least + rng.integers(0, 4, 60)).tolist())
            made = with_record(made, spec=replace(SPEC, **own))
            training = {"training": FacetValue(name)} if n > 1 else {}
            values = {"side": FacetValue(side), **training}
            run = replace(made.run, query=(side, name))
            planned.append(PlannedCell(replace(made.cell, values=values), run))
    judged = judge_claims([one], [planned], EMBEDDED)[0]
    assert expected in str(judged.verdict) and len(Findings([judged], {}).records) == 2 * n


@pytest.mark.parametrize(
    ("metric", "drafts", "expected"),
    [(SCORE, True, "confirmed"), (SCORE, False, "too few"), (TPF, True, "too few")],
)
def test_the_score_of_verified_drafts_needs_no_trainings(metric, drafts, expected) -> None:
    """Its text does not depend on the drafter; nor is there a baseline of one token to check."""
    planned = []
    for made in cells(metric, scores(30, 2, 100), [[5, 6] * 66, [11, 12] * 66]):
        rounds = {"rounds": [[[3, 2, 3]]] * 132} if drafts else {}
        spec = replace(SPEC, inputs={"weights": str(made.cell.values["side"])})
        planned.append(with_record(made, columns={**made.run.record.columns, **rounds}, spec=spec))
    judged = judge_claims([claim(metric)], [planned], EMBEDDED, lambda _: [])[0]
    assert expected in str(judged.verdict)


def test_crossing_counts_trainings_and_not_only_items() -> None:
    """Six trainings that differ by a tenth: their mean is less sure than one of them seems."""
    same = verdict(claim(TPF), [[1.0] * 60] * 2, [[5, 6] * 30, [11, 10] * 30]).evidence
    assert same
    steps = np.linspace(-0.1, 0.1, 6)
    varied = [replace(same, value=same.value * np.exp(step)) for step in steps]
    mean, equal = crossed(varied), crossed([same] * 6)
    assert mean.value == pytest.approx(same.value)
    assert mean.high - mean.low > 1.2 * (equal.high - equal.low)
    assert equal.low < same.value < equal.high
    assert mean.error == pytest.approx(np.sqrt(np.var(steps, ddof=1) / 6 + same.error**2))
    assert mean.freedom == 5


def test_settings_are_chosen_on_one_half_and_reported_on_the_other() -> None:
    """The setting that is best on the test half alone must not be chosen."""
    n = 40
    early = [(5, 20)[i % 2] + i // 2 % 2 for i in range(n)]  # fast on the development half
    late = [(20, 5)[i % 2] + i // 2 % 2 for i in range(n)]
    ours = ({"side": "early"}, {"side": "late"}, {"side": "fast but wrong"})
    one = claim(TPF, ours=ours, keep=5.0)
    runs = {"early": early, "late": late, "fast but wrong": [1] * n, "theirs": [9, 10] * (n // 2)}
    made = product(runs.items(), one.definitions)
    planned = [cell(s, m, [float("wrong" not in s)] * n, fed) for (s, fed), m in made]
    names = [f"item-{i:02d}" for i in range(n)]
    for entry in planned:
        entry.run.record.columns["id"] = names
    ((ours, _),) = sides_of(one, planned, EMBEDDED)
    assert ours.planned.cell.keys == {"side": "early"}
    assert ours.planned.run.record.columns["id"] == names[1::2]
    assert ours.planned.run.record.score.n == n // 2
    assert judge_claims([one], [planned], EMBEDDED)[0].verdict is ClaimVerdict.CONTRADICTED


def test_what_both_sides_list_is_what_scores_are_held_against() -> None:
    """A setting that is right more often than one token per forward does not raise the bar."""
    n = 40
    right = {"one token": 32, "lucky": 40, "fast": 31, "faster but wrong": 20}
    names = {"ours": ("one token", "fast", "faster but wrong"), "theirs": ("one token", "lucky")}
    forwards = {"one token": 20, "lucky": 10, "fast": 5, "faster but wrong": 2}
    listed = {side: tuple({"side": name} for name in own) for side, own in names.items()}
    one = claim(TPF, **listed, keep=5.0)
    planned = [
        cell(name, metric, [1.0] * right[name] + [0.0] * (n - right[name]), [forwards[name]] * n)
        for name, metric in product(right, one.definitions)
    ]
    (sides,) = sides_of(one, planned, EMBEDDED)
    assert [row.planned.cell.keys["side"] for row in sides] == ["fast", "lucky"]


def test_holm_corrects_the_smallest_p_value_most() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # Holm 1979
    assert holm([0.5, 0.6]) == [1.0, 1.0]


RATIO = Effect(1.1, 1.0, 1.2, 60, error=0.05, is_ratio=True)
POINTS = Effect(1.0, -2.0, 4.0, 58, pairs=[(58, 9, 8)])
PAIRS = 18 / 60  # discordant, with half an item in each cell
PER_ITEM = 0.05**2 * 60


@pytest.mark.parametrize(
    ("one", "found", "expected"),
    [
        (claim(TPF), RATIO, PER_ITEM * (2.802 / np.log(1.05)) ** 2),
        (claim(TPF, printed=(4.0, 1.0)), RATIO, PER_ITEM * (2.802 / np.log(2)) ** 2),
        (claim(TPF, ours=({}, {})), RATIO, 2 * PER_ITEM * (2.802 / np.log(1.05)) ** 2),
        (claim(TPF, "equal"), RATIO, PER_ITEM * (3.242 / np.log(1.05)) ** 2),
        (claim(TPF, trainings={"training": "a b"}), RATIO, None),  # which items leave as they are
        (claim(SCORE), POINTS, (98 * PAIRS**0.5 + 42.1 * (PAIRS - 0.02**2) ** 0.5) ** 2),
        (claim(SCORE, "equal", printed=(73.8, 78.5)), POINTS, PAIRS * (3.242 / 0.0235) ** 2),
        (claim(SCORE, printed=(90.0, 10.0)), POINTS, (1.96 / 0.4**0.5 + 0.842 * 1.5**0.5) ** 2),
    ],
    ids="ratio,printed,chosen on one half,equal,trainings,score,no loss,few pairs".split(","),
)
def test_the_items_needed_are_those_of_the_published_formulas(one, found, expected) -> None:
    """Of the margin, which is half of the printed gap, else 5 % or 2 points (Connor 1987)."""
    needed = items_needed(one, found, runs=1, level=0.05)
    assert needed == (expected and pytest.approx(expected, rel=2e-3, abs=1))


def test_an_average_of_no_difference_is_not_shown_by_the_larger_benchmark() -> None:
    """Two benchmarks differ by as much, in opposite directions: pooled items would show a loss."""
    planned = []
    sizes = {"quiz": scores(50, 150, 800), "code": scores(10, 4, 46)}
    for side in (0, 1):
        parts = []
        for name, right in sizes.items():
            part = cell(("ours", "theirs")[side], SCORE, right[side], [FORWARDS] * len(right[0]))
            parts.append(with_record(part, spec=replace(SPEC, benchmark={"name": name})))
        planned.append(replace(parts[0], parts=tuple(parts)))
    found = judge_claims([claim(SCORE)], [planned], EMBEDDED)[0].evidence
    assert found and found.value == pytest.approx(0.0, abs=1e-9) and found.p_same > 0.5


def printed_of(one: Claim) -> tuple[float, float] | None:
    """Return the numbers that a table reports for both sides of a claim; None if not both."""
    whole = source_table(one.table)
    names = [metric.name for metric in whole.metrics if metric.definition == one.metric]
    values = []
    for (side,) in (one.ours, one.theirs):
        keys = {**(one.at or {}), **side}
        found = [c.reported for c in whole.cells() if c.keys == keys and c.metric.name in names]
        values += [number for number in map(parse_number, found) if number is not None][:1]
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


def test_a_verdict_says_whether_its_runs_are_older_than_the_claim() -> None:
    forwards = [[5, 6] * 30, [11, 12] * 30]
    made = verdict(claim(TPF), [[1.0] * 60] * 2, forwards)
    assert made.runs[0].record
    day = datetime.fromtimestamp(made.runs[0].record.sealed_at, UTC).date()
    for later in (0, 1):
        frozen = claim(TPF, frozen=day + timedelta(days=later))
        assert verdict(frozen, [[1.0] * 60] * 2, forwards).rests_on_older_runs is bool(later)


def test_no_claim_is_of_the_future_and_no_two_compare_the_same_cells_by_one_metric() -> None:
    assert all(one.frozen <= datetime.now(UTC).date() for one in CLAIMS)
    tested = [one for one in CLAIMS if not one.untestable]
    compared = {str((one.table, one.at, one.ours, one.theirs, one.metric)) for one in tested}
    assert len(compared) == len(tested)


def test_every_name_that_ever_had_a_verdict_says_what_became_of_it() -> None:
    now = [Judgement(one, ClaimVerdict.NOT_RUN, "", "") for one in CLAIMS]
    rows = {name: became for name, _, became in Findings(now, {}).history}
    assert rows["lopa/no_loss_gsm8k"] == "not run"
    assert rows["creditdecoding/score_llada"] == "part of creditdecoding/no_loss_llada"
    assert "withdrawn" not in rows.values()


def test_verdicts_in_the_prose_are_those_of_the_claims() -> None:
    for now in (ClaimVerdict.CONTRADICTED, ClaimVerdict.NOT_RUN):
        page = markdown(Findings([Judgement(one, now, "", "") for one in CLAIMS], {}), str)
        assert f"LLaDA-MoE {now}, on unseen items {now}" in page and "{" not in page


def test_the_history_is_what_the_versions_of_the_page_say(root: Path) -> None:
    last = max((entry["date"], entry["commit"]) for said in history().values() for entry in said)
    command = ["git", "-C", str(root), "cat-file", "-e", last[1]]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this checkout has no history")
    commits = {entry["commit"] for said in history().values() for entry in said}
    for name, said in claim_history.history().items():
        again = [entry for entry in said if entry["commit"] in commits]
        assert again == history().get(name, []), name


def test_a_page_is_read_by_the_rows_of_its_tables(root: Path) -> None:
    page = "| A (Table 1) | confirmed | × 2 [1, 3] | 60 | why. | `dllm-bench claims a/b --x y` |\n"
    ((name, said),) = claim_history.rows(page)
    assert (name, said["verdict"], said["items"]) == ("a/b", "confirmed", "60")
    found = claim_history.rows((root / claim_history.PAGE).read_text())
    assert sorted(name for name, _ in found) == sorted(one.name for one in CLAIMS)


def test_a_claim_asks_for_the_runs_of_its_table() -> None:
    for table, source in ((c.cells(), source_table(c.table)) for c in CLAIMS if not c.untestable):
        shown = [one for one in table.cells() if not one.metric.is_mean_time]
        ours, theirs = ([EMBEDDED.run_of(t.name, one) for one in shown] for t in (table, source))
        assert ours == theirs, table.name
