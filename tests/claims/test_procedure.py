"""The whole procedure of the claims, simulated: how often it errs, how often it finds an effect.

A draw is a family of claims on three texts, judged together as `dllm-bench claims` does. Texts and
items are fixed before the draw, as `conf/claim` fixes them, so nothing is chosen by its outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from dllm_bench.claims import verdict
from dllm_bench.claims.spec import Claim
from dllm_bench.claims.verdict import ClaimVerdict, Judgement, judge_claims
from dllm_bench.tables.plan import PlannedCell
from dllm_bench.tables.spec import SCORE
from tests.claims.test_claims import EMBEDDED, TPF, cells, claim, scores

pytestmark = pytest.mark.exhaustive
TEXTS = 3
SHOWN = {ClaimVerdict.CONFIRMED, ClaimVerdict.LARGER, ClaimVerdict.SMALLER}
SPEED_DRAWS = [100, pytest.param(500, marks=pytest.mark.drill)]  # a draw of speeds takes 40 ms


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the same cells once: families of scores often draw the same table of pairs."""
    known: dict[tuple[int, int], tuple[object, Judgement]] = {}
    measure = verdict._measured

    def measured(one: Claim, planned: Sequence[PlannedCell], *rest: object) -> Judgement:
        key = id(one), id(planned)
        if key not in known:
            known[key] = (one, planned), measure(one, planned, *rest)
        return known[key][1]

    monkeypatch.setattr(verdict, "_measured", measured)


def score_cells(rng: np.random.Generator, n: int, effect: float) -> list[PlannedCell]:
    """Return two decoders that disagree on a tenth of n items, with a true difference in points."""
    shares = (0.05 + effect / 200, 0.05 - effect / 200, 0.9)
    return cells_of_pairs(*map(int, rng.multinomial(n, shares)))


@cache
def cells_of_pairs(*pairs: int) -> list[PlannedCell]:
    """Return the runs of a table of pairs: right in ours alone, in theirs alone, in both."""
    return cells(SCORE, scores(*pairs), [[10] * sum(pairs)] * 2)


def speed_cells(rng: np.random.Generator, n: int, ratio: float) -> list[PlannedCell]:
    """Forwards of two decoders that share the difficulty of n items, with a true ratio."""
    hard = 200 * rng.lognormal(0, 0.3, n)
    counts = [(hard * rng.lognormal(0, 0.15, n) * times).astype(int) for times in (1.0, ratio)]
    return cells(TPF, [[1.0] * n] * 2, [values.tolist() for values in counts])


def verdicts(claims: Sequence[Claim], planned: Sequence[list[PlannedCell]]) -> list[ClaimVerdict]:
    return [one.verdict for one in judge_claims(claims, planned, EMBEDDED)]


def test_no_verdict_for_or_against_is_false_in_more_than_a_twentieth_of_the_families() -> None:
    """Nothing differs: no gain may be confirmed, and no loss be found. At the margin's edge, no
    equality may be confirmed, and no effect worth seeing be denied."""
    rng, draws, n, edge = np.random.default_rng(2026), 500, 120, 2.0
    gain, equal = [claim(SCORE)] * TEXTS, [claim(SCORE, "equal")] * TEXTS
    false = {"gain": 0, "loss": 0, "equality": 0, "denial": 0}
    for _ in range(draws):
        none = [score_cells(rng, n, 0.0) for _ in range(TEXTS)]
        found = verdicts([*gain, *equal], [*none, *none])
        false["gain"] += bool(SHOWN & set(found[:TEXTS]))
        false["loss"] += ClaimVerdict.CONTRADICTED in found[TEXTS:]
        lost = [score_cells(rng, n, -edge) for _ in range(TEXTS)]
        gained = [score_cells(rng, n, edge) for _ in range(TEXTS)]
        found = verdicts([*gain, *equal], [*gained, *lost])
        false["denial"] += ClaimVerdict.CONTRADICTED in found[:TEXTS]
        false["equality"] += ClaimVerdict.CONFIRMED in found[TEXTS:]
    assert all(times <= 0.05 * draws for times in false.values()), false


@pytest.mark.parametrize(("n", "margin"), [(60, 5.0), (150, 2.0)])
def test_few_items_that_differ_in_one_direction_hide_no_loss(n: int, margin: float) -> None:
    rng, draws, false = np.random.default_rng(2030), 500, 0
    claims = [claim(SCORE, "equal", printed=(90.0, 90.0 - 2 * margin))] * TEXTS
    for _ in range(draws):
        lost = (rng.binomial(n, margin / 100) for _ in claims)
        found = verdicts(claims, [cells_of_pairs(0, int(k), n - int(k)) for k in lost])
        false += ClaimVerdict.CONFIRMED in found
    assert false <= 0.05 * draws, false


@pytest.mark.parametrize("draws", SPEED_DRAWS)
def test_equal_speed_is_rarely_called_faster_and_a_gain_worth_seeing_rarely_denied(draws) -> None:
    rng, false = np.random.default_rng(2027), {"gain": 0, "denial": 0}
    claims = [claim(TPF)] * TEXTS
    for _ in range(draws):
        none = verdicts(claims, [speed_cells(rng, 60, 1.0) for _ in claims])
        worth = verdicts(claims, [speed_cells(rng, 60, 1.05) for _ in claims])
        false["gain"] += bool(SHOWN & set(none))
        false["denial"] += ClaimVerdict.CONTRADICTED in worth
    assert all(times <= 0.05 * draws for times in false.values()), false


@pytest.mark.parametrize("draws", SPEED_DRAWS)
def test_a_true_printed_size_is_mostly_confirmed_and_half_of_it_never(draws: int) -> None:
    """Sizes are compared by each claim's own 95 % interval. Power: at least 80 %."""
    rng, printed = np.random.default_rng(2028), (1.5, 1.0)
    one, met, half = claim(TPF, printed=printed), 0, 0
    for _ in range(draws):
        met += verdicts([one], [speed_cells(rng, 60, 1.5)]) == [ClaimVerdict.CONFIRMED]
        half += verdicts([one], [speed_cells(rng, 60, 1.5**0.5)]) == [ClaimVerdict.CONFIRMED]
    assert met >= 0.8 * draws and half <= 0.05 * draws


@pytest.mark.parametrize("draws", [40, pytest.param(100, marks=pytest.mark.drill)])
def test_a_loss_of_ten_points_and_equality_are_found_with_a_thousand_items(draws: int) -> None:
    rng, found = np.random.default_rng(2029), {"loss": 0, "equality": 0}
    one = claim(SCORE, "equal", printed=(80.0, 90.0))  # margin 5
    for _ in range(draws):
        lost, same = score_cells(rng, 1000, -10.0), score_cells(rng, 1000, 0.0)
        found["loss"] += verdicts([one], [lost]) == [ClaimVerdict.CONTRADICTED]
        found["equality"] += verdicts([one], [same]) == [ClaimVerdict.CONFIRMED]
    assert all(times >= 0.8 * draws for times in found.values()), found
