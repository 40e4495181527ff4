"""Calibration of confidences: the authors' recorder, laws of the measures, temperature scaling."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from dllm_bench.metrics import drafts
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.drafts import ObservedDraft, Outcomes
from dllm_bench.metrics.sample_stats import SampleStats
from tests.helpers import golden_dir
from tests.sample_stats import drafted, sample

FILE = golden_dir() / "spec" / "modules.json"
FINE = 1000  # bins of the authors' AUROC


def quantised(found: Outcomes) -> Outcomes:
    bins = (min(int(p * FINE), FINE - 1) for p in found.predicted)
    return replace(found, predicted=tuple(map(float, bins)))


def simulated(count: int, stretch: float, seed: int = 0, length: int = 4) -> list[ObservedDraft]:
    """Rounds whose logits are `stretch` times those the outcomes were drawn from."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        logits = [rng.gauss(1.0, 1.5) for _ in range(length)]
        alive = [rng.random() < 1 / (1 + math.exp(-z)) for z in logits]
        accepted = next((k for k, lives in enumerate(alive) if not lives), length)
        found.append(ObservedDraft(tuple(stretch * z for z in logits), accepted))
    return found


@pytest.mark.skipif(not FILE.exists(), reason=f"no golden data at {FILE}")
def test_the_authors_recorder() -> None:
    stored = json.loads(FILE.read_text())["confidence_metrics"]
    for wanted in stored["per_position"]:
        k = wanted["position"]
        rounds = [o for o in stored["observations"] if len(o["probs"]) > k]
        predicted = tuple(o["probs"][k] for o in rounds)
        found = Outcomes(predicted, tuple(bool(o["targets"][k]) for o in rounds))
        assert len(predicted) == wanted["total_weight"]
        assert drafts.ece(found) == pytest.approx(wanted["ece"], abs=1e-6)
        assert drafts.brier(found) == pytest.approx(wanted["brier"], abs=1e-6)
        assert drafts.auroc(quantised(found)) == pytest.approx(wanted["auc"])
        bars = drafts.reliability_bins(found)
        for bar, recorded in zip(bars, wanted["reliability"], strict=True):
            assert [bar.low, bar.high] == pytest.approx(recorded["range"])
            assert bar.count == recorded["weight"]
            assert bar.predicted == pytest.approx(recorded["avg_pred"], abs=1e-6)
            assert bar.happened == pytest.approx(recorded["avg_target"])


def test_products_of_confidences() -> None:
    assert drafts.survival_probabilities([0.0, 0.0, 0.0]) == [0.5, 0.25, 0.125]
    hot = drafts.survival_probabilities([2.0, 2.0], [2.0])
    assert hot == pytest.approx(
        [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-1)) / (1 + math.exp(-2))]
    )
    assert drafts.survival_probabilities([-800.0, 800.0]) == pytest.approx([0.0, 0.0])
    assert drafts.survival_probabilities([0.0], [1.0, 7.0]) == [0.5]


def test_a_position_is_measured_where_it_was_verified() -> None:
    rounds = [
        ObservedDraft((1.0, 1.0), 2),
        ObservedDraft((1.0,), 1),
        ObservedDraft((), 0),
        ObservedDraft((0.0, 0.0), 1),
    ]
    first, second = drafts.outcomes_by_position(rounds)
    assert first.happened == (True, True, True)
    assert second.happened == (True, False)
    assert drafts.outcomes_by_position([]) == []


def test_auroc_is_the_share_of_ordered_pairs() -> None:
    rng = random.Random(1)
    predicted = tuple(rng.randrange(6) / 5 for _ in range(60))
    found = Outcomes(predicted, tuple(rng.random() < p for p in predicted))
    hits = [p for p, happened in zip(predicted, found.happened, strict=True) if happened]
    misses = [p for p, happened in zip(predicted, found.happened, strict=True) if not happened]
    wins = sum((h > m) + 0.5 * (h == m) for h in hits for m in misses)
    assert drafts.auroc(found) == pytest.approx(wins / (len(hits) * len(misses)))
    assert drafts.auroc(Outcomes((0.1, 0.9), (True, True))) is None


def test_a_forecast_that_is_right_has_no_error() -> None:
    certain = Outcomes((1.0, 0.0, 1.0), (True, False, True))
    assert drafts.ece(certain) == drafts.brier(certain) == 0
    (last,) = drafts.reliability_bins(Outcomes((1.0, 0.97), (True, False)))
    assert (last.low, last.high, last.count, last.happened) == (0.95, 1.0, 2, 0.5)
    wrong = Outcomes((1.0, 0.0), (False, True))
    assert drafts.ece(wrong) == drafts.brier(wrong) == 1


@pytest.mark.parametrize("stretch", [0.5, 1.0, 2.0, 4.0])
def test_temperatures_undo_a_stretch(stretch: float) -> None:
    fitted = drafts.fit_temperatures(simulated(2000, stretch))
    assert len(fitted) == 4
    for temperature in fitted[:2]:
        assert temperature == pytest.approx(stretch, rel=0.25)


def test_temperatures_calibrate_rounds_they_have_not_seen() -> None:
    fitted = drafts.fit_temperatures(simulated(2000, 3.0, seed=1))
    unseen = simulated(2000, 3.0, seed=2)
    before, after = (drafts.outcomes_by_position(unseen, by) for by in ((), fitted))
    for old, new in zip(before, after, strict=True):
        assert drafts.ece(new) < drafts.ece(old)
    # order within a position is kept
    assert drafts.auroc(before[0]) == pytest.approx(drafts.auroc(after[0]))


def test_each_temperature_is_the_best_given_those_before() -> None:
    rounds = simulated(300, 2.0, seed=3)
    fitted = drafts.fit_temperatures(rounds)
    for k in range(len(fitted)):
        errors = {
            t: drafts.ece(drafts.outcomes_by_position(rounds, (*fitted[:k], t))[k])
            for t in drafts.GRID
        }
        assert errors[fitted[k]] == pytest.approx(min(errors.values()))
    assert 1.0 in drafts.GRID


# --- by name, over samples ----------------------------------------------------------


def sample_of(rounds: list[ObservedDraft], more: int = 2) -> SampleStats:
    """Return a sample with these rounds, of whose proposals `more` tokens were not verified."""
    made = [(len(r.logits), r.accepted, r.accepted + 1) for r in rounds]
    return drafted(made, survival=[[*r.logits, *[9.0] * more] for r in rounds])


def halves() -> tuple[list[ObservedDraft], list[ObservedDraft]]:
    return simulated(800, 4.0, seed=4), simulated(800, 3.0, seed=5)


def run_of(*parts: list[ObservedDraft]) -> list[SampleStats]:
    """Return samples of ten rounds each."""
    return [sample_of(part[i : i + 10]) for part in parts for i in range(0, len(part), 10)]


@pytest.mark.parametrize("k", [1, 3])
def test_numbers_of_a_position_by_name(k: int) -> None:
    first, second = halves()
    samples = run_of(first, second)
    for covered, rounds, temperatures in (
        ("", [*first, *second], ()),
        ("_unscaled", second, ()),
        ("_scaled", second, drafts.fit_temperatures(first)),
    ):
        outcomes = drafts.outcomes_by_position(rounds, temperatures)[k - 1]
        for wanted in (drafts.ece, drafts.auroc, drafts.brier):
            name = f"calibration/{wanted.__name__}{covered}@{k}"
            assert measure(name, samples) == pytest.approx(wanted(outcomes)), name
    assert measure("calibration/ece@5", samples) is None, "drafted and never verified"


def test_a_drafter_without_confidences_has_no_calibration() -> None:
    for samples in ([drafted([(3, 1, 2)])], [sample()], []):
        for name in ("ece", "ece_scaled", "auroc_unscaled", "brier"):
            assert measure(f"calibration/{name}@1", samples) is None


def test_one_sample_is_not_enough_to_fit_and_measure() -> None:
    samples = run_of(simulated(10, 1.0))
    assert len(samples) == 1
    assert measure("calibration/ece@1", samples) is not None
    assert measure("calibration/ece_unscaled@1", samples) is not None
    assert measure("calibration/ece_scaled@1", samples) is None
