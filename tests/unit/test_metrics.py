"""Metrics by name and the counts they are of, against numbers worked out by hand; calibration of a
drafter's confidences; intervals and paired tests against published values, coverage and symmetry.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.metrics import drafts
from dllm_bench.metrics.accuracy import (
    compare,
    mean_score,
    paired_shares,
    pass_at_k,
    repeated,
    wilson,
    wilson_of_clusters,
)
from dllm_bench.metrics.definitions import (
    DEFINITIONS,
    FAMILIES,
    SECTIONS,
    definition,
    measure,
    measure_all,
)
from dllm_bench.metrics.drafts import DraftRound, ObservedDraft, Outcomes
from dllm_bench.metrics.sample_stats import (
    SampleStats,
    count_sample,
    frame_of,
    from_columns,
    idle_forwards,
)
from tests.sample_stats import drafted, interval, sample

A = SampleStats(
    allocated=32, committed=30, content=12, emitted=10, forwards=5, rows=200, forced=1,
    seconds=2.0, steps_s=1.6, first_step_s=0.5, truncated=False, empty=False,
    first_tokens=6, idle=1, idle_dinfer=3, baseline_s=3.0, baseline_equal=True, remasked=5,
    cache_read=900, cache_kept=300, encoding=2, through_end=12,
)  # fmt: skip
B = SampleStats(
    allocated=16, committed=16, content=16, emitted=16, forwards=4, rows=64, forced=3,
    seconds=1.0, steps_s=0.9, first_step_s=0.2, truncated=True, empty=False,
    first_tokens=4, idle=0, idle_dinfer=1, baseline_s=2.0, baseline_equal=False,
    cache_read=100, cache_kept=60, encoding=1, through_end=15,
)  # fmt: skip
C = SampleStats(
    allocated=16, committed=8, content=0, emitted=0, forwards=1, rows=16, forced=0,
    seconds=0.6, steps_s=0.5, first_step_s=0.5, truncated=False, empty=True,
    first_tokens=8, idle=0, idle_dinfer=0, baseline_s=0.4, baseline_equal=True,
    cache_read=0, cache_kept=0, encoding=0, through_end=1,
)  # fmt: skip
BY_HAND = {
    "tpf/committed": 59 / 10,
    "tpf/net": 54 / 10,
    "tpf/emitted": 26 / 10,
    "tpf/lopa": 64 / 13,
    "tpf/lopa_dist": 54 / 13,
    "tpf/lopa_coder": 28 / 10,
    "tpf/dinfer": (12 / 8 + 16 / 5 + 0 / 1) / 3,
    "tpf/diffusion_gemma": (12 / 3 + 15 / 3 + 1 / 1) / 3,
    "tps/decode": 26 / 3.0,
    "tps/e2e": 26 / 3.6,
    "tps/no_first_step": (30 / 1.5 + 16 / 0.8) / 2,
    "tps/after_first_step": (24 / 1.5 + 12 / 0.8) / 2,
    "tps/max": 20.0,
    "tps/top10": 20.0,
    "latency/mean": 3.6 / 3,
    "latency/p50": 1.0,
    "latency/p95": 1.9,
    "latency/no_first_step": (1.5 + 0.8 + 0.0) / 3,
    "step_ms": 300.0,
    "forwards/mean": 10 / 3,
    "forwards/fast_dllm": 11 / 3,
    "forwards/dinfer": 14 / 3,
    "row_cost": 280 / 26,
    "cache/bytes_read": 1000 / 10,
    "cache/bytes_kept": 360 / 3,
    "forced_steps": 4 / 54,
    "empty_rate": 1 / 3,
    "end_only_rate": 1 / 3,
    "truncated_rate": 1 / 3,
    "speedup/baseline": 5.4 / 3.6,
    "equal/baseline": 2 / 3,
}


@pytest.mark.parametrize("name", SECTIONS["speed"])
def test_by_hand(name: str) -> None:
    assert measure(name, [A, B, C]) == pytest.approx(BY_HAND[name], rel=1e-12)


def test_top_ten_takes_the_ten_fastest() -> None:
    samples = [SampleStats(**{**asdict(A), "committed": 15 * n}) for n in range(1, 21)]
    found = [measure(f"tps/{name}", samples) for name in ("top10", "max", "no_first_step")]
    assert found == pytest.approx([10 * sum(range(11, 21)) / 10, 200, 105])


def test_speed_up_and_equality_have_intervals() -> None:
    many = [A, B, C] * 20
    low, high = interval("speedup/baseline", many) or (0, 0)
    assert 1 < low < 5.4 / 3.6 < high < 2
    low, high = interval("equal/baseline", many) or (0, 0)
    assert 0.5 < low < 2 / 3 < high < 0.8
    low, high = interval("equal/baseline", [A, C]) or (0, 0)
    assert (low < 0.5, high) == (True, 1.0), "two equal texts prove little"
    assert interval("speedup/baseline", [A]) is None


def test_what_gave_nothing_is_in_the_interval_as_in_the_number() -> None:
    """An empty text costs rows and gives no token."""
    empty = replace(C, rows=400)
    many = [A, empty] * 20
    low, high = interval("row_cost", many) or (0, 0)
    assert low < (measure("row_cost", many) or 0) == 600 / 10 < high
    assert interval("row_cost", [A, A]) == (20, 20)
    assert interval("row_cost", [A, A, *[empty] * 20]) is None, "resamples without a token"


def test_a_text_of_one_step_is_not_counted() -> None:
    for name, counted in (("tps/no_first_step", 2), ("tps/after_first_step", 2), ("tps/e2e", 3)):
        assert definition(name).count([A, B, C]) == counted


@pytest.mark.parametrize(
    "name",
    "tpf  tpf/emitted@1  acceptance/conditional  acceptance/conditional@0  acceptance/conditional@ "
    "acceptance/conditional@two  acceptance/conditional@-1  calibration/x@1".split(),
)
def test_an_unknown_name_is_a_sentence_that_lists_the_nearest(name: str) -> None:
    words = r"no metric .*Choose one of: .* \(the nearest of \d+\)"
    with pytest.raises(DllmBenchError, match=words):
        definition(name)


def test_without_samples_there_is_no_number_and_no_interval() -> None:
    every = [*DEFINITIONS, *(f"{name}@{k}" for name in FAMILIES for k in (1, 7))]
    found = {name: (measure(name, []), interval(name, [])) for name in every}
    assert found == dict.fromkeys(every, (None, None))
    assert measure_all([sample()]).keys() == DEFINITIONS.keys()


TIMES = {"draft_s": 0.02, "head_s": 0.01, "verify_s": 0.05, "prefill_s": 9.0}
FIRST = drafted([(3, 3, 4), (3, 0, 1), (1, 1, 2)], **TIMES)
SECOND = drafted([(3, 1, 2), (0, 0, 1)], **TIMES | {"verify_s": 0.07})
OF_ROUNDS = {
    "acceptance/length": 10 / 5,
    "acceptance/length_per_sample": (7 / 3 + 3 / 2) / 2,
    "acceptance/drafts": 5 / 5,
    "acceptance/verify_rate": 10 / (10 + 5),
    "acceptance/proposed": 10 / 5,
    "acceptance/rate": 5 / 10,
    **{f"acceptance/survival@{k}": share for k, share in enumerate([3 / 4, 1 / 3, 1 / 3, None], 1)},
    **{f"acceptance/conditional@{k}": at for k, at in enumerate([3 / 4, 1 / 2, 1.0, None], 1)},
    "round_ms": 180 / 5,
    "round_ms/draft": 40 / 5,
    "round_ms/head": 20 / 5,
    "round_ms/verify": 120 / 5,
}


def test_drafts_by_hand() -> None:
    assert {name: measure(name, [FIRST, SECOND]) for name in OF_ROUNDS} == pytest.approx(OF_ROUNDS)
    names = [*SECTIONS["acceptance"], "round_ms"]
    assert all(measure(name, [drafted([], verify_s=1.0)]) is None for name in names)
    assert interval("acceptance/survival@2", [FIRST, SECOND]) == pytest.approx(wilson(1 / 3, 3))
    assert interval("acceptance/conditional@2", [FIRST, SECOND]) == pytest.approx(wilson(1 / 2, 2))
    assert interval("acceptance/conditional@4", [FIRST, SECOND]) is None


def test_a_tree_reaches_as_far_as_its_longest_path() -> None:
    """Its positions are those of paths, what is verified are all its tokens."""
    tree = {"proposed": 4, "drafted": (7, 8, 7, 5, 6), "parents": (0, 0, 1, 3, 4)}
    rows = [
        Forward(ForwardKind.PREFILL, 1, 5, 0),
        Forward(ForwardKind.VERIFY, 1, 5, 5, accepted=1, **tree),
        Forward(ForwardKind.VERIFY, 1, 5, 7, accepted=2, **tree),
    ]
    born, ids = (0, 1, 1, 2, 2), (3, 8, 9, 7, 7)
    found = drafts.rounds_of(Trace(rows), born)
    assert found == [DraftRound(4, 1, 2, 3), DraftRound(2, 2, 2, 2)]
    columns = drafts.speculative_columns(Trace(rows), born, ids)
    assert (columns["rounds"], columns["right"]) == ([[4, 1, 2, 3], [2, 2, 2, 2]], [1, 2])
    assert measure("acceptance/verified", [drafted(found)]) == (5 + 3) / 2
    shares = [measure(f"acceptance/survival@{k}", [drafted(found)]) for k in (1, 2, 3, 4)]
    assert shares == [1.0, 0.5, 0.0, None]


def test_counting_a_generation() -> None:
    special = SpecialTokens(mask=0, eos=1, pad=2, eot=3)
    ids = (50, 51, 0, 52, 3, 60, 1, 2, 0, 61)
    born = (0, 0, -1, 1, 1, 1, 2, 2, -1, 2)
    forwards = [
        Forward(ForwardKind.PREFILL, 1, 20, 0, ms=1.0),
        Forward(ForwardKind.DENOISE, 4, 10, 8, ms=1.0, winner=2, forced=2, rows=7.5, replayed=True),
        Forward(ForwardKind.DENOISE, 3, 10, 8, ms=1.0, forced=1, read_bytes=64, kept_bytes=16),
    ]
    forwards += [Forward(kind, 1, 8, 0, ms=1.0) for kind in (ForwardKind.DRAFT, ForwardKind.HEAD)]
    forwards[1] = replace(forwards[1], recorded=True, moved=True)
    forwards[2] = replace(forwards[2], moved=True)
    generation = Generation("r", ids, born, {"eos": 4, "length": 10}, Trace(forwards))
    positions = {"allocated": 10, "committed": 8, "content": 5, "first_tokens": 2, "emitted": 3}
    work = {"forwards": 3, "rows": 20 + 4 * 7.5 + 30, "cache_read": 64, "cache_kept": 16}
    marks = {"forced": 3, "replayed": 1, "recorded": 1, "moved": 2}
    none = {"remasked": 0, "idle": 0, "idle_dinfer": 0}
    assert count_sample(generation, special) == positions | work | marks | none


Forwards = list[tuple[ForwardKind, int]]
"""Kind of each forward of a block, and the positions it committed."""


def generation_of(*blocks: Forwards) -> Generation:
    forwards, born = [], []
    for block in blocks:
        masks = sum(commits for _, commits in block)
        for kind, commits in block:
            born += [len(forwards)] * commits
            forwards.append(Forward(kind, 1, 8, 0, masks=masks))
            masks -= commits
    return Generation("r", (5,) * len(born), tuple(born), {}, Trace(forwards))


DENOISE, PREFILL, REFRESH = ForwardKind.DENOISE, ForwardKind.PREFILL, ForwardKind.REFRESH
DINFER = {"unroll": 4, "tokens_per_forward": 8}


@pytest.mark.parametrize(
    ("every", "blocks", "idle", "unrolled"),
    [
        (None, [[(DENOISE, 8)]], 0, 0),  # 8 masks // 8 = 1 round
        (None, [[(DENOISE, 30), (DENOISE, 2)]], 0, 2),  # 32 // 8 = 4 rounds at once
        (None, [[(DENOISE, 8), (DENOISE, 8), (DENOISE, 24)]], 0, 1),  # 4 rounds, not 5
        (None, [[(PREFILL, 16)]], 1, 2),  # two rounds of window after a renewal that filled it
        (None, [[(PREFILL, 4), (DENOISE, 4)], [(REFRESH, 8)]], 1, 1),
        (None, [[(PREFILL, 4), (REFRESH, 4), (REFRESH, 4)]], 1, 1),
        (2, [[(REFRESH, 8)], [(REFRESH, 8), (DENOISE, 8)]], 1, 3),  # round 0; rounds 1 and 2
        (2, [[(REFRESH, 24)], [(REFRESH, 8), (DENOISE, 16)]], 1, 7),  # rounds 0 to 2; 3 to 5
        (3, [[(REFRESH, 24)], [(REFRESH, 32)]], 2, 8),  # rounds 0 to 2; 3 to 6
        (3, [[(REFRESH, 16)], [(REFRESH, 32), (DENOISE, 1)]], 1, 6),  # rounds 0 and 1; 2 to 5
    ],
)
def test_idle_forwards(every, blocks, idle, unrolled) -> None:
    """In dInfer's loop, idle rounds that renew the cache, each `every`-th of the request, count
    twice; the first round of a block renews the cache anyway."""
    generation = replace(generation_of(*blocks), renewal_rounds=every)
    assert (idle_forwards(generation), idle_forwards(generation, **DINFER)) == (idle, unrolled)


def test_a_block_left_with_masks_has_no_idle_forwards() -> None:
    whole = generation_of([(PREFILL, 8), (DENOISE, 24)])
    assert idle_forwards(replace(whole, trace=Trace(whole.trace.forwards[:1])), **DINFER) == 0


PLAIN = sample()
DRAFTED = drafted([(3, 2, 3)], survival=[[0.5, 1.0, -1.0]], right=[2], draft_s=0.1, baseline_s=2.0)


def stored(*samples: SampleStats) -> dict[str, list]:
    return {name: [getattr(one, name) for one in samples] for name in SampleStats.columns()}


def test_columns_and_back() -> None:
    assert from_columns({**stored(PLAIN, DRAFTED), "id": ["a", "b"]}).equals(
        frame_of([PLAIN, DRAFTED])
    )
    without = {name: values for name, values in stored(PLAIN, DRAFTED).items() if name != "rows"}
    with pytest.raises(DllmBenchError, match="no column rows"):
        from_columns(without)


def test_a_number_whose_facts_are_absent_is_none() -> None:
    later = {"rounds", "survival", "right", "baseline_s", "baseline_equal", "idle", "idle_dinfer"}
    older = {name: values for name, values in stored(PLAIN, DRAFTED).items() if name not in later}
    names = [name for name, one in DEFINITIONS.items() if one.requires in later]
    assert len(names) >= 14
    # a column that is not there, a sample without
    for facts in (from_columns(older), [PLAIN, DRAFTED]):
        for name in (*names, "acceptance/conditional@1", "calibration/ece@1"):
            assert measure(name, facts) is None, name
        assert measure("tpf/emitted", facts) is not None


TEXT = (50, 51, 52, 53, 54, 55, 56, 57, 58, 59)


def test_facts_of_drafts() -> None:
    """A round cut to two tokens, whose third would have been right too; a whole one; and one that
    an accepted end token cuts."""
    rows, survival = [Forward(ForwardKind.PREFILL, 1, 5, 0, ms=1.0)], (0.0, 0.5, 1.0, 1.5)
    made = ((51, 52, 53, 99), 2, 2), ((54, 55, 99, 57), 4, 2), ((57, 58, 59, 60), 4, 3)
    for tokens, proposed, accepted in made:
        rows.append(Forward(ForwardKind.DRAFT, 1, 8, 0, ms=2.0))
        rows.append(Forward(ForwardKind.HEAD, 1, 0, 0, ms=3.0, calls=len(tokens)))
        counts: Any = {"proposed": proposed, "accepted": accepted, "drafted": tokens}
        verified = Forward(ForwardKind.VERIFY, 1, proposed + 1, 5, 4.0, survival=survival, **counts)
        rows.append(verified)
    found = drafts.speculative_columns(Trace(rows), (0, 3, 3, 3, 6, 6, 6, 9, 9, 9), TEXT)
    times = {"prefill_s": 0.001, "draft_s": 0.006, "head_s": 0.009, "verify_s": 0.012}
    wanted = {"rounds": [[2, 2, 3], [4, 2, 3], [3, 3, 3]], "right": [3, 2, 3], **times}
    assert found == {**wanted, "survival": [[*survival]] * 3}


def test_drafts_of_a_masked_model_are_rounds_too() -> None:
    """The first forward of a block verifies nothing; the last one fills the block."""
    rows = [
        Forward(ForwardKind.PREFILL, 1, 8, 0, ms=1.0, masks=4),
        Forward(ForwardKind.DENOISE, 3, 4, 4, ms=2.0, masks=3, winner=2, proposed=2),
        Forward(ForwardKind.DENOISE, 3, 4, 4, ms=3.0, masks=2, winner=1, proposed=2, accepted=2),
    ]
    found = drafts.speculative_columns(Trace(rows), (0, 1, 2, 2), TEXT[:4])
    assert found == {"rounds": [[2, 0, 1], [2, 2, 2]], "verify_s": 0.005}


def test_facts_that_a_trace_does_not_have() -> None:
    older = [
        Forward(ForwardKind.PREFILL, 1, 5, 0),
        Forward(ForwardKind.VERIFY, 1, 4, 5, proposed=3, accepted=2),
    ]
    assert drafts.speculative_columns(Trace(older), (0, 1, 1, 1), TEXT) == {"rounds": [[3, 2, 3]]}
    at_once = drafts.speculative_columns(Trace(older[:1]), (0,), TEXT)
    assert at_once["rounds"] == at_once["right"] == [], "the prefill's token was the end"
    for kind in (ForwardKind.DENOISE, ForwardKind.PREFILL):
        row = Forward(kind, 1, 8, 0, masks=4)
        assert drafts.speculative_columns(Trace([row]), (0,), TEXT) == {}
    assert drafts.speculative_columns(Trace(), (), ()) == {}


def simulated(count: int, stretch: float, seed: int = 0, length: int = 4) -> list[ObservedDraft]:
    """Rounds whose logits are `stretch` times those the outcomes were drawn from."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        logits = [rng.gauss(1.0, 1.5) for _ in range(length)]
        alive = [rng.random() < 1 / (1 + math.exp(-z)) for z in logits]
        accepted = next((k for k, lives in enumerate(alive) if not lives), length)
        found.append(ObservedDraft(tuple(stretch * z for z in logits), accepted))
    return found


def test_products_of_confidences() -> None:
    assert drafts.survival_probabilities([0.0, 0.0, 0.0]) == [0.5, 0.25, 0.125]
    first, second = (1 / (1 + math.exp(-z)) for z in (1, 2))
    hot = drafts.survival_probabilities([2.0, 2.0], [2.0])
    assert hot == pytest.approx([first, first * second])
    assert drafts.survival_probabilities([-800.0, 800.0]) == pytest.approx([0.0, 0.0])
    assert drafts.survival_probabilities([0.0], [1.0, 7.0]) == [0.5]


def test_a_position_is_measured_where_it_was_verified_and_certainty_has_no_auroc() -> None:
    verified = (((1.0, 1.0), 2), ((1.0,), 1), ((), 0), ((0.0, 0.0), 1))
    first, second = drafts.outcomes_by_position([ObservedDraft(*one) for one in verified])
    assert (first.happened, second.happened) == ((True, True, True), (True, False))
    assert drafts.outcomes_by_position([]) == []
    assert drafts.auroc(Outcomes((0.1, 0.9), (True, True))) is None


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


def run_of(rounds: list[ObservedDraft]) -> list[SampleStats]:
    """Return samples of ten rounds each, of whose proposals two tokens were not verified."""
    samples = []
    for first in range(0, len(rounds), 10):
        own = rounds[first : first + 10]
        made = [(len(r.logits), r.accepted, r.accepted + 1) for r in own]
        samples.append(drafted(made, survival=[[*r.logits, 9.0, 9.0] for r in own]))
    return samples


@pytest.mark.parametrize("k", [1, 3])
def test_numbers_of_a_position_by_name(k: int) -> None:
    first, second = simulated(400, 4.0, seed=4), simulated(400, 3.0, seed=5)
    samples = run_of([*first, *second])
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
    (one,) = run_of(simulated(10, 1.0))
    assert measure("calibration/ece_unscaled@1", [one]) is not None
    assert measure("calibration/ece_scaled@1", [one]) is None, "nothing is left to measure"


# --- intervals and paired tests -------------------------------------------------------------------


def test_wilson_against_published_values() -> None:
    """Newcombe (1998), Statistics in Medicine 17:857, Table I, method 3."""
    published = (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    )
    for right, n, low, high in published:
        score = mean_score([1.0] * right + [0.0] * (n - right))
        assert (score.mean, score.n, score.method) == (right / n, n, "wilson")
        assert (score.low, score.high) == pytest.approx((low, high), abs=5e-5)


def test_events_of_one_sample_alone_are_wilsons() -> None:
    assert wilson_of_clusters([1] * 81 + [0] * 182, [1] * 263) == pytest.approx(
        wilson(81 / 263, 263)
    )
    assert wilson_of_clusters([3, 0], [3, 0]) == pytest.approx(wilson(3 / 3, 3)), "one sample"
    assert wilson_of_clusters([4, 5], [4, 5]) == pytest.approx(wilson(2 / 2, 2)), "no spread"


def test_an_interval_of_clusters_holds_as_often_as_it_says() -> None:
    """Shares of samples drawn from Beta(3, 1), 20 events each: 0.75 on average."""
    rng, held = random.Random(5), {"clusters": 0, "rounds": 0}
    for _ in range(400):
        shares = [rng.betavariate(3, 1) for _ in range(40)]
        right = [sum(rng.random() < share for _ in range(20)) for share in shares]
        ends = {
            "clusters": wilson_of_clusters(right, [20] * 40),
            "rounds": wilson(sum(right) / 800, 800),
        }
        for name, (low, high) in ends.items():
            held[name] += low < 0.75 < high
    assert 0.92 < held["clusters"] / 400 < 0.98 and held["rounds"] / 400 < 0.8


def test_fractional_scores_get_a_seeded_bootstrap() -> None:
    rng = random.Random(1)
    values = [rng.random() for _ in range(200)]
    score = mean_score(values, seed=3)
    assert score == mean_score(values, seed=3) != mean_score(values, seed=4)
    assert score.method == "bootstrap"
    error = (sum((v - score.mean) ** 2 for v in values) / 200) ** 0.5 / 200**0.5
    assert score.high - score.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert score.low < score.mean < score.high
    assert mean_score([]) is None
    alike = mean_score([0.25] * 9)
    assert alike.low == alike.mean == alike.high == 0.25


def test_shares_of_pairs_have_a_width_where_no_pair_differs() -> None:
    equal = paired_shares([([1.0] * 58 + [0.0] * 2, [1.0] * 58 + [0.0] * 2)])
    assert (equal.low, equal.value, equal.high) == pytest.approx((-1.96 / 62, 0, 1.96 / 62), 1e-4)
    assert paired_shares([([1.0, 1.0] + [0.0] * 18, [0.0] * 20)]).pairs == [(20, 2, 0)]


@pytest.mark.parametrize("n", [150, 360, 1000])
def test_a_loss_is_not_excluded_more_often_than_chance_hides_it(n: int) -> None:
    """If two items of a hundred are lost and none is won, none differs with chance 0.98 ** n."""
    found = paired_shares([([1.0] * n, [1.0] * n)])
    assert 0.98**n < 2 * found.p_above(-0.02) == pytest.approx(2 * found.p_below(0.02))
    assert found.p_same == 1.0


def test_runs_are_compared_on_shared_samples_only() -> None:
    ours = {f"{i}": 1.0 for i in range(20)} | {"only-ours": 0.0}
    theirs = {f"{i}": float(i >= 10) for i in range(20)} | {"only-theirs": 1.0}
    found = compare(ours, theirs)
    assert (found.n, found.value, found.p_value) == (20, 0.5, pytest.approx(2 / 2**10))
    assert found.differs
    swapped = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, {"a": 0.0, "b": 0.0, "c": 0.0, "d": 1.0}
    assert compare(*swapped).p_value == pytest.approx(2 * (1 + 4) / 2**4), "McNemar's exact test"
    assert compare({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}).p_value == 1.0
    back = compare(theirs, ours)
    assert (back.value, back.p_value) == (-0.5, found.p_value)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))


def test_equal_runs_do_not_differ_and_slightly_better_ones_by_paired_bootstrap_do() -> None:
    for a, b, noise in ((1.0, 0.0, 0.0), (0.1, 0.6, 0.0), (0.1, 0.6, 1e-16)):
        assert not compare({"a": a, "b": b}, {"a": a + noise, "b": b + noise}).differs
    ours = {str(i): random.Random(i).random() for i in range(100)}
    found = compare(ours, {key: value - 0.02 for key, value in ours.items()})
    assert found.differs and found.p_value is None
    assert not compare({"a": 0.5}, {"a": 0.2}).differs, "one item is no evidence"
    with pytest.raises(DllmBenchError, match="share no sample"):
        compare({"a": 1.0}, {"b": 1.0})


def test_the_bootstrap_covers_no_difference() -> None:
    """About 5 % of 95 % intervals miss; 13 or more of 100 has a chance below 1 in 400."""
    rng, keys = random.Random(5), [str(i) for i in range(60)]
    pairs = [({k: rng.random() for k in keys}, {k: rng.random() for k in keys}) for _ in range(100)]
    assert 0 < sum(compare(ours, theirs).differs for ours, theirs in pairs) < 13


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    """Against all draws without replacement, which the estimator stands for."""
    for n in range(1, 7):
        for correct in range(n + 1):
            samples = [i < correct for i in range(n)]
            for k in range(1, n + 1):
                draws = [any(draw) for draw in combinations(samples, k)]
                assert pass_at_k(n, correct, k) == pytest.approx(sum(draws) / len(draws))
    with pytest.raises(DllmBenchError, match="pass@5 needs at least 5 samples per item, found 4"):
        pass_at_k(4, 1, 5)


def test_repeated_items() -> None:
    found = repeated([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    third = pytest.approx(1 / 3)
    assert found == {"avg@3": third, "pass@1": third, "pass@2": 0.5, "pass@3": 0.5}
    assert repeated([[0.2, 0.4], [0.6, 0.8]]) == {"avg@2": pytest.approx(0.5)}
    assert repeated([[1.0], [0.0]]) == repeated([[1.0, 0.0], [0.0]]) == repeated([]) == {}
