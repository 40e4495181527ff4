"""Stored drafts, their temperatures, and the simulation of a load that is served by them.

Texts come from tiny random models, times are put in by hand. Of profiles of steps per second: what
is fed, what is stored, and that it can be read back; no time is asserted, since it depends on the
machine.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dllm_bench.api.compose import compose
from dllm_bench.cli.main import main, parse
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, VerifyLength
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.decoding.speculative import FixedLength, SpeculativeDecoder
from dllm_bench.methods.drafting import (
    ModelDraft,
    NGramDraft,
    StepProfile,
    SurvivalThreshold,
    Temperatures,
    read_step_profile,
    read_temperatures,
)
from dllm_bench.methods.trained_drafts import AsynchronousLength, DSpark, HardwareAwareLength
from dllm_bench.metrics import drafts as draft_metrics
from dllm_bench.metrics.sample_stats import count_sample
from dllm_bench.models.drafters import SmallModelDrafter, TrainedBlockDrafter
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.registry import describe, instantiate
from dllm_bench.serving.load_simulation import (
    DraftedText,
    DraftOutcome,
    ServingSystem,
    StoredDraft,
    StoredDrafts,
    drafts_of_text,
    frontier,
    length_rule,
    simulate,
    under_arrivals,
)
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store
from dllm_bench.training.scheduler import ProfileJob, measure, profile_of
from tests.figures.builders import store_run
from tests.helpers import VOCAB, Watched, load_denoiser, tiny_checkpoint, tiny_denoiser
from tests.sample_stats import stored_sample
from tests.speculative import DRAFTERS, generate_batch, write_drafter
from tests.tiers import covering

FLAT = StepProfile((1, 4096), (100.0, 100.0))
KNEE = StepProfile((1, 2, 8, 256), (100.0, 75.0, 30.0, 1.0))
SCALE = Temperatures((1.5, 0.5, 2.0))
ONE = Request("one", (3, 9, 27, 3, 9), 40)
MORE = ("two", tuple(range(2, 30)), 25), ("three", (7,), 31), ("four", (5, 6), 1)
SEVERAL = [ONE, *(Request(*asked) for asked in MORE)]


class Spoiled(ModelDraft):
    """Drafts what follows, but for every third position; its estimates go by position too."""

    gives = frozenset({"survival estimates"})

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        proposal = super().propose(context, sampler)
        position_D = context.anchor + 1 + torch.arange(len(proposal))
        tokens_D = (proposal.tokens_D + (position_D % 3 == 0)) % VOCAB
        return replace(proposal, tokens_D=tokens_D, survival_D=3.0 - position_D % 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def target(folder: Path) -> TransformerDenoiser:
    return load_denoiser(tiny_checkpoint("qwen3", folder / "target", 10))


def drafter(name: str, folder: Path) -> Draft:
    if name == "ngram":
        return NGramDraft(4, 2)
    if name == "spoiled":
        return Spoiled(SmallModelDrafter(str(folder / "target")), 5)
    return DSpark(TrainedBlockDrafter(write_drafter(folder / name, DRAFTERS[name], 4)))


def sample(generation: Generation) -> tuple[Trace, Sequence[int], Sequence[int]]:
    """Return what is stored, to its limit."""
    trace = Trace.from_columns(json.loads(json.dumps(generation.trace.columns())))
    return trace, generation.born, generation.ids


CASES: list[tuple[str, VerifyLength, dict[str, Any]]] = [
    ("ngram", FixedLength(), {"rule": "fixed"}),
    ("spoiled", FixedLength(2), {"rule": "fixed", "tokens": 2}),
    ("spoiled", SurvivalThreshold(0.6, SCALE), {"rule": "threshold", "tau": 0.6}),
    ("spoiled", HardwareAwareLength(KNEE, SCALE), {"rule": "hardware_aware"}),
    ("spoiled", AsynchronousLength(KNEE, SCALE), {"rule": "asynchronous"}),
    ("dspark", HardwareAwareLength(KNEE, SCALE), {"rule": "hardware_aware"}),
]
WHOLE_DRAFTS = partial(length_rule, {"rule": "fixed"}, FLAT)


@pytest.mark.parametrize("requests", [[ONE], SEVERAL], ids=["alone", "batch"])
@pytest.mark.parametrize(("name", "piece", "rule"), covering(3, CASES))
def test_rounds_are_those_of_the_loop(name, piece, rule, requests, folder, target) -> None:
    decoder = SpeculativeDecoder(drafter(name, folder), length=piece)
    traces = [found.trace.forwards for found in generate_batch(decoder, target, requests)]
    real = [[row for row in rows if row.kind == ForwardKind.VERIFY] for rows in traces]
    unverified, new_rule = replace(decoder, length=FixedLength(0)), partial(length_rule, rule, KNEE)
    texts = StoredDrafts.of(map(sample, generate_batch(unverified, target, requests))).served(SCALE)
    assert len(texts) == sum(request.max_new_tokens > 1 for request in requests)
    steps = simulate(ServingSystem(name, texts, new_rule), FLAT, len(texts)).steps
    going = min(len(rows) for rows in real if rows) - 1  # a last round is cut by its limit
    assert len(steps) >= going
    for k, step in enumerate(steps):
        made = [rows[k] for rows in real if len(rows) > k]
        proposed = sum(row.proposed for row in made)
        assert (step.requests, step.verified) == (len(made), len(made) + proposed)
        assert k >= going or step.committed == sum(row.accepted + 1 for row in made)
    assert len({step.verified / step.requests for step in steps}) > 1 or name == "spoiled"


def test_a_draft_is_held_against_what_follows() -> None:
    rows = [
        Forward(ForwardKind.PREFILL, 1, 3, 0, ms=9.0),
        Forward(ForwardKind.DRAFT, 1, 8, 0, ms=2.0),
        Forward(ForwardKind.HEAD, 1, 0, 0, ms=1.0, calls=3),
        Forward(ForwardKind.VERIFY, 1, 1, 3, ms=5.0, drafted=(5, 6, 0), survival=(2.0, 1.0, -1.0)),
        Forward(ForwardKind.DRAFT, 1, 8, 1, ms=4.0),
        Forward(ForwardKind.VERIFY, 1, 1, 4, ms=5.0, drafted=(6, 7, 8), survival=(0.5, 0.0, 0.0)),
    ]
    trace, born, ids = Trace(rows), (0, 3, 5), (4, 5, 6)
    first, last = drafts_of_text(trace, born, ids)
    assert first == StoredDraft((2.0, 1.0, -1.0), 3, 2, 2)
    assert last == StoredDraft((0.5, 0.0, 0.0), 3, 1, 1)
    tree = [*rows, Forward(ForwardKind.VERIFY, 1, 3, 5, drafted=(6, 7), parents=(0, 0))]
    with pytest.raises(DllmBenchError, match="this run drafted trees"):
        drafts_of_text(Trace(tree), born, ids)
    drafts = StoredDrafts.of([(trace, born, ids), (Trace(rows[:1]), (0,), (4,))])
    assert len(drafts.texts) == 1, "a text that ended with its prefill has no draft"
    known = [draft_metrics.ObservedDraft(*one) for one in (((2.0, 1.0), 2), ((0.5,), 1))]
    assert drafts.observed() == known, "nothing is known of what was drafted past the end"
    assert drafts.steps == pytest.approx((2.0 + 1.0 + 4.0) / (5.0 + 5.0))
    assert (drafts.width, drafts.calls) == (8, 1)
    profile = StepProfile((1, 8, 64), (10.0, 5.0, 2.5))
    assert drafts.drafting(profile)(1) == pytest.approx(0.7 * 0.1)
    assert drafts.drafting(profile)(8) == pytest.approx(0.7 * 0.1 * 2)
    assert drafts.drafting(profile, tokens=1)(8) == drafts.drafting(profile)(8), "a block is whole"
    chain = replace(drafts, calls=7)
    assert chain.drafting(profile, tokens=1)(1) == pytest.approx(0.7 * 0.1 / 7)
    assert chain.drafting(profile, tokens=9)(1) == chain.drafting(profile)(1)
    verified = replace(drafts, texts=((replace(first, left=3), last),))
    with pytest.raises(DllmBenchError, match=r"length\.tokens=0"):
        verified.served()


DRAFT = {"_target_": "nowhere", "drafter": {"sha256": "d" * 64, "source": "a place"}}
FIXED = {"_target_": "length.fixed", "tokens": 0}


@pytest.fixture(scope="module")
def texts(folder: Path, target: TransformerDenoiser) -> list[Generation]:
    """Greedy texts with a draft at every position."""
    requests = [Request(f"r{i}", (3 + i, 9, 27), 12 + i) for i in range(8)]
    decoder = SpeculativeDecoder(drafter("spoiled", folder), length=FixedLength(0))
    return generate_batch(decoder, target, requests)


@pytest.fixture
def stored(texts, target, tmp_path) -> Callable[..., str]:
    """Return a function that stores a sealed run, of these texts or others; gives its hash."""

    def store(generations=texts, temperature=0.0, length=FIXED, draft=DRAFT) -> str:
        decoder = {"draft": draft, "length": length, "temperature": temperature}
        run = RunSpec(
            model={"name": "tiny"},
            decoder={"_target_": "nowhere", **decoder},
            benchmark={"name": "prompts"},
            hardware={"name": "cpu", "device": "cpu"},
            inputs={"weights": "w" * 64},
            label="spoiled",
        )
        samples = []
        for one in generations:
            counts = count_sample(one, target.special)
            more = {"id": one.request_id, "cut": one.cut, "counts": counts, "seconds": 1.0}
            samples.append(stored_sample(one.ids, one.born, one.trace, **more))
        store_run(Store(tmp_path / "runs"), run, samples)
        return run.short

    return store


def test_temperatures_are_fitted_on_one_half_and_measured_on_the_other(
    stored, texts, tmp_path, command
) -> None:
    run, file = stored(), tmp_path / "training" / "temperatures" / "tiny-spoiled.json"
    assert f"length.temperatures.source={file}" in command(f"train temperatures {run}")
    fitted = json.loads(file.read_text())
    first, second = (half.observed() for half in StoredDrafts.of(map(sample, texts)).halves())
    assert tuple(fitted["temperatures"]) == draft_metrics.fit_temperatures(first)
    assert (fitted["fitted_on"], fitted["measured_on"]) == (len(first), len(second))
    raw = draft_metrics.outcomes_by_position(second)
    scaled = draft_metrics.outcomes_by_position(second, fitted["temperatures"])
    for found, before, after in zip(fitted["positions"], raw, scaled, strict=True):
        assert found["rounds"] == len(before.predicted)
        assert found["ece"] == pytest.approx(draft_metrics.ece(before), abs=1e-5)
        assert found["ece_scaled"] == pytest.approx(draft_metrics.ece(after), abs=1e-5)
    assert fitted["runs"][0].startswith(run)
    assert fitted["draft"] == {"_target_": "nowhere", "drafter": {"sha256": "d" * 64}}, "no place"


def test_temperatures_belong_to_one_drafter_and_to_whole_drafts(stored, texts, command) -> None:
    elsewhere = {**DRAFT, "drafter": {"sha256": "d" * 64, "source": "another place"}}
    other = {**DRAFT, "drafter": {"sha256": "e" * 64, "source": "a place"}}
    cut, whole = {"_target_": "length.threshold", "tau": 0.5}, {**FIXED, "tokens": None}
    traces = [[replace(row, survival=()) for row in found.trace.forwards] for found in texts]
    unheaded = [replace(one, trace=Trace(rows)) for one, rows in zip(texts, traces, strict=True)]
    runs = {
        "greedy": stored(),
        "cut": stored(length=cut, draft=elsewhere),
        "other": stored(unheaded, draft=other),
        "sampled": stored(temperature=1.0, length=cut),
        "unheaded": stored(unheaded, temperature=1.0, length=whole),
    }
    for names, refused in (
        ("greedy cut", ""),  # greedy drafts are whole whatever was verified of them
        ("greedy other", "2 drafters"),
        ("other", "confidence head"),
        ("sampled", "its confidences decided"),
        ("unheaded", "confidence head"),
    ):
        asked = " ".join(runs[name] for name in names.split())
        assert refused in command(f"train temperatures {asked}", code=2 if refused else 0)


EQUAL_TIMES = '{"tokens": [1, 512], "steps_per_s": [100.0, 100.0]}'


def test_a_load_is_simulated_from_stored_runs(stored, texts, tmp_path, command) -> None:
    profile, out = tmp_path / "profile.json", tmp_path / "points.csv"
    profile.write_text(EQUAL_TIMES)
    asking = f"simulate {stored()} --profile {profile}"
    shown = command(f"{asking} --requests 1,2 --out {out}").splitlines()
    points = list(csv.DictReader(out.open()))
    systems = ["", " threshold 0.5", " scheduler", " two steps ahead"]
    names = ["autoregressive", *(f"spoiled{rule}" for rule in systems)]
    assert [p["system"] for p in points] == [name for name in names for _ in range(2)]
    assert len(shown) == 1 + len(points)
    assert [float(p["tokens_per_s_user"]) for p in points[:2]] == pytest.approx([100.0, 100.0])
    texts = StoredDrafts.of(map(sample, texts)).halves()[1].served()
    steps = simulate(ServingSystem("", texts, WHOLE_DRAFTS), FLAT, 1).steps
    rate = sum(step.committed for step in steps) / len(steps)
    assert float(points[2]["tokens_per_round"]) == pytest.approx(rate)
    shown = command(f"{asking} --arrivals 5,50 --level 50 --requests 2").splitlines()
    assert len(shown) == 1 + 2 * len(names)


def test_what_is_no_load_is_refused(stored, texts, command) -> None:
    """Drawn or few drafts, and step times of another model: those that are there unasked."""
    for asked, words in (
        (stored(temperature=1.0), "temperature=0"),
        (stored(texts[:1], draft={"_target_": "few"}), "drafts of 1 texts"),
        (stored(), "measured with tiny-qwen3"),
    ):
        assert words in command(f"simulate {asked}", code=2)
    for option in ("--tau 2", "--tau nan", "--level nan", "--seed -1"):
        assert f"has {option[:5]}" in command(f"simulate {asked} {option}", code=2)


def test_what_is_simulated_unasked_is_profiled() -> None:
    options = parse(["simulate", "RUN"])
    drafts = StoredDrafts((), steps=1.0, width=7 + 3, calls=1)  # slots, and committed since
    assert drafts.drafting(read_step_profile(options.profile))(max(options.requests)) > 0


# 10 ms a step up to 64 tokens, then in proportion to them
FILLING = StepProfile((1, 64, 4096), (100.0, 100.0, 100.0 * 64 / 4096))
STEEP = StepProfile((1, 2048), (1000.0, 1000.0 / 2048))  # every token costs a step's time


def drawn(n: int, tokens: int, rates: Sequence[float], seed: int = 0) -> list[DraftedText]:
    """Return texts whose drafts are accepted with exactly the estimated probabilities."""
    right_NTD = np.random.default_rng(seed).random((n, tokens, len(rates))) < np.asarray(rates)
    accepted_NT = right_NTD.cumprod(axis=2).sum(axis=2)
    return [[DraftOutcome(tuple(rates), int(count)) for count in row] for row in accepted_NT]


RULES = {
    "ar": {"rule": "none"},
    "fixed": {"rule": "fixed", "tokens": 3},
    "all": {"rule": "fixed"},
    "threshold": {"rule": "threshold", "tau": 0.5},
    "hardware_aware": {"rule": "hardware_aware"},
    "asynchronous": {"rule": "asynchronous"},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_tokens_and_time_are_conserved_and_seats_are_filled(name, wait_s) -> None:
    rng = np.random.default_rng(3)
    sizes = [(int(n), rng.random(k)) for n, k in rng.integers((1, 0), (60, 6), (30, 2))]
    ragged = [drawn(1, n, rates, seed)[0] for seed, (n, rates) in enumerate(sizes)]
    system = ServingSystem(name, ragged, partial(length_rule, RULES[name], FILLING))
    waits_s = np.random.default_rng(1).exponential(wait_s, len(system.texts))
    load = simulate(system, FILLING, 4, waits_s.cumsum())
    lengths = [len(text) for text in system.texts]
    assert [one.tokens for one in load.served] == lengths, "every request, in order of arrival"
    assert sum(step.committed for step in load.steps) == sum(lengths)
    for before, after in pairwise(load.steps):
        assert after.start_s >= before.start_s + before.step_s - 1e-12, "one step at a time"
    assert all(one.arrival_s <= one.seated_s < one.finished_s for one in load.served)
    seated = [one.seated_s for one in load.served]
    assert seated == sorted(seated), "first come, first served"
    for step in load.steps:
        assert step.step_s == FILLING.step_s(step.verified)
        assert step.requests <= min(4, step.committed) and step.committed <= step.verified
        waiting = any(one.arrival_s <= step.start_s < one.seated_s for one in load.served)
        assert step.requests == 4 or not waiting, "a free seat while someone waits"


def test_an_idle_engine_waits_for_the_next_request() -> None:
    load = simulate(ServingSystem("ar", drawn(3, 2, []), WHOLE_DRAFTS), FLAT, 4, [0.0, 5.0, 5.005])
    assert [step.start_s for step in load.steps] == pytest.approx([0, 0.01, 5, 5.01, 5.02])
    assert [one.seated_s for one in load.served] == pytest.approx([0, 5, 5.01])


def test_impossible_systems_are_refused() -> None:
    for found in ([], [[]], [[DraftOutcome((), 0)], []]):
        with pytest.raises(DllmBenchError, match="at least one token"):
            simulate(ServingSystem("none", found, WHOLE_DRAFTS), FLAT, 1)
    few = ServingSystem("few", drawn(2, 5, [0.5]), WHOLE_DRAFTS)
    with pytest.raises(DllmBenchError, match="more texts than seats"):
        frontier([few], FLAT, [8])


def test_more_arrivals_are_served_later_and_slower() -> None:
    texts = {"ar": drawn(60, 20, []), "d": drawn(60, 20, [0.6] * 7)}
    systems = [ServingSystem(name, each, WHOLE_DRAFTS) for name, each in texts.items()]
    rates = (1.0, 40.0, 4000.0)
    found = under_arrivals(systems, FILLING, seats=8, rates=rates, level=90.0)
    assert [(one.system, one.requests_per_s) for one in found[:3]] == [("ar", r) for r in rates]
    for few, some, many in (found[:3], found[3:]):
        assert few.attained == 1.0 and few.wait_s <= some.wait_s < many.wait_s
        assert few.tokens_per_s_device < many.tokens_per_s_device
    speeds = [one.tokens_per_s_user for one in found[:3]]
    assert speeds == pytest.approx([100.0] * 3), "one token a step of 10 ms, waiting left out"
    busy = under_arrivals(systems[:1], STEEP, 8, (4000.0,), level=300.0)[0]
    assert busy.attained < 0.2, "a step of 8 tokens takes 8 ms"
    repeated = [under_arrivals(systems, FILLING, 8, (40.0,), 0.0, seed=s) for s in (1, 1, 2)]
    assert repeated[0] == repeated[1] != repeated[2]


# --- profiles of steps per second, and temperatures -----------------------------------------------


SMALL = ProfileJob((1, 3, 8), context=16, repeats=2, warmup=1)


def test_every_step_feeds_its_tokens_after_the_same_context(tmp_path: Path) -> None:
    model = Watched(load_denoiser(tiny_checkpoint("qwen3", tmp_path, 0)))
    spent = measure(model, SMALL)  # type: ignore[arg-type]
    turn = [(ForwardKind.VERIFY, (16, 16 + n), n) for n in SMALL.batches]
    seen = [(plan.kind, plan.feed, plan.rows[1] - plan.rows[0]) for plan in model.plans]
    assert seen == [(ForwardKind.PREFILL, (0, 16), 1), *turn * 3]
    assert [len(found) for found in spent] == [2, 2, 2], "warm-up turns are not kept"


def test_medians_are_kept() -> None:
    found = profile_of(SMALL, [[0.5, 0.1, 9.0], [1.0, 1.0, 1.0], [2.0, 4.0, 3.0]])
    assert found == StepProfile((1, 3, 8), (2.0, 1.0, 1 / 3))


def test_a_diffusion_model_has_no_such_steps() -> None:
    with pytest.raises(DllmBenchError, match="autoregressive target"):
        measure(tiny_denoiser("dream", 0), SMALL)


def test_the_command_stores_the_table_with_its_device(tmp_path, command) -> None:
    source = tiny_checkpoint("qwen3", tmp_path / "model", 0)
    threads, small = torch.get_num_threads(), "--batches 1,2,5 --context 8 --repeats 1"
    said = command(f"train sps qwen3-4b model.path={source} hardware=cpu {small}")
    torch.set_num_threads(threads)
    path = tmp_path / "training" / "sps" / "qwen3-4b-cpu.json"
    assert str(path) in said
    stored = json.loads(path.read_text())
    assert read_step_profile(str(path)).tokens == (1, 2, 5)
    assert (stored["context"], stored["repeats"]) == (8, 1)
    assert stored["model"]["dtype"] == "float32" and len(stored["model"]["weights_sha256"]) == 64
    assert stored["machine"]["device"] and stored["hardware"]["name"] == "cpu"


@pytest.mark.parametrize("sizes", ["1,x", "0,1", ""])
def test_unreadable_sizes_are_refused(sizes: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["train", "sps", "qwen3-4b", "--batches", sizes])
    assert "not a whole number above zero" in capsys.readouterr().err


def test_a_profile_is_part_of_a_run_by_its_numbers(tmp_path: Path) -> None:
    """Two files with equal tables are one decoder; the place does not matter, the numbers do."""
    table, found = {"tokens": [1, 4], "steps_per_s": [3.0, 2.0]}, []
    for name, extra in (("a", {}), ("b", {"device": "another"}), ("c", {"steps_per_s": [3, 1]})):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**table, **extra}))
        override = f"decoder.length.profile.source={path}"
        config = compose(["decoder=dspark", "decoder/length=hardware_aware", override])
        found.append(instantiate(config["decoder"]["length"], "length"))
    described = list(map(describe, found))
    assert described[0] == described[1] != described[2]
    assert instantiate(described[0], "length") == found[0]


def test_step_times_are_interpolated_between_measured_sizes() -> None:
    profile = StepProfile((1, 3, 11), (1.0, 0.5, 0.1))
    assert [profile.step_s(n) for n in (1, 2, 3, 7, 11)] == pytest.approx([1, 1.5, 2, 6, 10])
    assert profile.rate(2) == pytest.approx(1 / 1.5)


NO_SPEEDS = [((1, 2), (1.0,)), ((1,), (0.0,)), ((1,), (float("nan"),))]
SIZES = [((), ()), ((2, 3), (1.0, 1.0)), ((1, 1), (1.0, 1.0))]


@pytest.mark.parametrize(("tokens", "rates"), [*SIZES, *NO_SPEEDS])
def test_impossible_tables_are_refused(tokens: tuple[int, ...], rates: tuple[float, ...]) -> None:
    for make in (lambda: StepProfile(tokens, rates), lambda: ProfileJob((4, 8))):
        with pytest.raises(DllmBenchError, match="rising sizes from 1"):
            make()


DEEP = pytest.param("[" * 100_000, id="deep")
NO_PROFILES = [DEEP, "{", "[]", '{"tokens": [1]}', '{"tokens": "12", "steps_per_s": "12"}']
INFINITE = '{"tokens": [1, Infinity], "steps_per_s": [1, 1]}'


@pytest.mark.parametrize("text", [*NO_PROFILES, INFINITE, None])
def test_what_is_no_profile_is_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    for read, command in (
        (read_step_profile, "train sps"),
        (read_temperatures, "temperatures RUN"),
    ):
        with pytest.raises(DllmBenchError, match=command if text else "FileNotFoundError"):
            read(str(path))


def test_temperatures_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"temperatures": [2, 0.5]}')
    assert read_temperatures(str(tmp_path / "t.json")) == Temperatures((2.0, 0.5))
    assert read_temperatures(None) == Temperatures()
    with pytest.raises(DllmBenchError, match="above 0"):
        Temperatures((1.0, 0.0))
