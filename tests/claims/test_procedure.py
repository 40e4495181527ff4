"""The whole procedure of the claims, simulated: how often it errs, how often it finds an effect.

A draw is a family of claims on three texts, judged together as `dllm-bench claims` does. Texts and
items are fixed before the draw, as `conf/claim` fixes them, so nothing is chosen by its outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dllm_bench.claims.spec import Claim
from dllm_bench.claims.verdict import ClaimVerdict, judge_claims
from dllm_bench.tables.plan import PlannedCell
from dllm_bench.tables.spec import SCORE
from tests.claims.test_claims import EMBEDDED, TPF, cells, claim, scores

pytestmark = pytest.mark.exhaustive
DRAWS, TEXTS = 500, 3
SHOWN = {ClaimVerdict.CONFIRMED, ClaimVerdict.LARGER, ClaimVerdict.SMALLER}


def score_cells(rng: np.random.Generator, n: int, effect: float) -> list[PlannedCell]:
    """Return two decoders that disagree on a tenth of n items, with a true difference in points."""
    shares = (0.05 + effect / 200, 0.05 - effect / 200, 0.9)
    return cells(SCORE, scores(*rng.multinomial(n, shares)), [[10] * n] * 2)


def speed_cells(rng: np.random.Generator, n: int, ratio: float) -> list[PlannedCell]:
    """Forwards of two decoders that share the difficulty of n items, with a true ratio."""
    hard = 200 * rng.lognormal(0, 0.3, n)
    counts = [(hard * rng.lognormal(0, 0.15, n) * times).astype(int) for times in (1.0, ratio)]
    return cells(TPF, [[1.0] * n] * 2, [values.tolist() for values in counts])


def verdicts(claims: Sequence[Claim], planned: Sequence[list[PlannedCell]]) -> list[ClaimVerdict]:
    return [one.verdict for one in judge_claims(claims, planned, EMBEDDED)]


def test_no_verdict_for_or_against_is_false_in_more_than_a_twentieth_of_the_families() -> None:
    """Nothing differs: no gain may be confirmed, and no loss be found. At the margin's edge, no
    equality may be confirmed, and no effect worth seeing be denied.
    """
    rng, n, edge = np.random.default_rng(2026), 120, 2.0
    gain, equal = [claim(SCORE)] * TEXTS, [claim(SCORE, "equal")] * TEXTS
    false = {"gain": 0, "loss": 0, "equality": 0, "denial": 0}
    for _ in range(DRAWS):
        none = [score_cells(rng, n, 0.0) for _ in range(TEXTS)]
        found = verdicts([*gain, *equal], [*none, *none])
        false["gain"] += bool(SHOWN & set(found[:TEXTS]))
        false["loss"] += ClaimVerdict.CONTRADICTED in found[TEXTS:]
        lost = [score_cells(rng, n, -edge) for _ in range(TEXTS)]
        gained = [score_cells(rng, n, edge) for _ in range(TEXTS)]
        found = verdicts([*gain, *equal], [*gained, *lost])
        false["denial"] += ClaimVerdict.CONTRADICTED in found[:TEXTS]
        false["equality"] += ClaimVerdict.CONFIRMED in found[TEXTS:]
    assert all(times <= 0.05 * DRAWS for times in false.values()), false


def test_equal_speed_is_rarely_called_faster_and_a_gain_worth_seeing_rarely_denied() -> None:
    rng, false = np.random.default_rng(2027), {"gain": 0, "denial": 0}
    claims = [claim(TPF)] * TEXTS
    for _ in range(DRAWS):
        none = verdicts(claims, [speed_cells(rng, 60, 1.0) for _ in claims])
        worth = verdicts(claims, [speed_cells(rng, 60, 1.05) for _ in claims])
        false["gain"] += bool(SHOWN & set(none))
        false["denial"] += ClaimVerdict.CONTRADICTED in worth
    assert all(times <= 0.05 * DRAWS for times in false.values()), false


def test_a_true_printed_size_is_mostly_confirmed_and_half_of_it_never() -> None:
    """Sizes are compared by each claim's own 95 % interval. Power: at least 80 %."""
    rng, printed = np.random.default_rng(2028), (1.5, 1.0)
    one, met, half = claim(TPF, printed=printed), 0, 0
    for _ in range(DRAWS):
        met += verdicts([one], [speed_cells(rng, 60, 1.5)]) == [ClaimVerdict.CONFIRMED]
        half += verdicts([one], [speed_cells(rng, 60, 1.5**0.5)]) == [ClaimVerdict.CONFIRMED]
    assert met >= 0.8 * DRAWS
    assert half <= 0.05 * DRAWS


def test_a_loss_of_ten_points_and_equality_are_found_with_a_thousand_items() -> None:
    rng, found = np.random.default_rng(2029), {"loss": 0, "equality": 0}
    one = claim(SCORE, "equal", printed=(80.0, 90.0))  # margin 5
    for _ in range(DRAWS // 5):
        lost, same = score_cells(rng, 1000, -10.0), score_cells(rng, 1000, 0.0)
        found["loss"] += verdicts([one], [lost]) == [ClaimVerdict.CONTRADICTED]
        found["equality"] += verdicts([one], [same]) == [ClaimVerdict.CONFIRMED]
    assert all(times >= 0.8 * DRAWS / 5 for times in found.values()), found
