"""What open runs will cost: forwards, seconds, bytes; checked against sealed runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from dllm_bench.core.decoder import DecoderSummary
from dllm_bench.paths import options
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.groups import RunConfig
from dllm_bench.tables import cost
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun
from dllm_bench.tables.spec import Cell, TableMetric
from tests.tables.builders import record_of, spec_of

LOOKAHEAD = {"_target_": "explore.lookahead"}
CACHED = {"cache": {"_target_": "cache.dual"}}
SCORE = TableMetric("score", "Score", "score")
SUMMARY = DecoderSummary(branches=3, block=8)
TPF = TableMetric("tpf", "TPF", "tpf/committed")


def config(**changes: Any) -> RunConfig:
    """Return a composed run: 20 items of GSM8K, 64 tokens, LLaDA on an H200."""
    groups: dict[str, Any] = {
        "model": {"name": "llada-instruct"},
        "decoder": {
            "name": "fast_dllm",
            "_target_": "decoder.masked",
            "score": {"_target_": "score.confidence"},
            "select": {"_target_": "select.threshold", "tau": 0.9},
            "schedule": {"_target_": "schedule.blocks", "block": 32},
            "cache": {"_target_": "cache.none"},
        },
        "benchmark": {"name": "gsm8k", "max_new_tokens": 64, "shots": 0},
        "hardware": {"name": "h200"},
        "limit": 20,
    }
    for group, change in changes.items():
        groups[group] = {**groups[group], **change} if isinstance(change, Mapping) else change
    return RunConfig(groups)


def ms_of(config: RunConfig) -> float:
    """Milliseconds of one forward."""
    return cost.forward_ms(config, cost.summary_of(config["decoder"])) or 0.0


def model_of(*runs: PlannedRun, tpf: str = "") -> cost.CostModel:
    """Return the cost model of these runs; the first one's cell reports `tpf`."""
    cells = [planned(run) for run in runs]
    cells += [planned(runs[0], TPF, tpf)] if tpf else []
    return cost.CostModel(cells, cost.MeasuredRuns.of(run.record for run in runs if run.record))


def planned(run: PlannedRun, metric: TableMetric = SCORE, reported: str = "") -> PlannedCell:
    return PlannedCell(Cell({}, metric, (), reported, ()), run)


def missing(**changes: Any) -> PlannedRun:
    return PlannedRun((str(changes),), CellState.MISSING, config=config(**changes))


def sealed(forwards: int, seconds: float, n: int = 20, **changes: Any) -> PlannedRun:
    """Return a sealed run of `n` samples with the same forwards and seconds each."""
    plain = config(**changes)
    record = record_of(spec_of({**plain, "seed": 0, "limit": n}), n=n)
    record.columns["forwards"][:] = [forwards] * n
    record.columns["seconds"][:] = [seconds] * n
    run = PlannedRun((str(changes),), CellState.SEALED, spec=record.spec, record=record)
    return replace(run, folder="x", done=n, total=n, config=plain)


def test_a_decoder_takes_its_own_forwards_else_what_is_reported_else_one_a_token() -> None:
    run = missing()
    found = model_of(run).estimate(run)
    assert found.forwards == 20 * 64
    assert found.seconds == pytest.approx(20 * 64 * ms_of(run.config) / 1000)
    assert model_of(run, tpf="4.0").estimate(run).forwards == 20 * 64 / 4
    other = sealed(16, 1.0, decoder={"name": "fast_dllm"}, benchmark={"max_new_tokens": 128})
    assert model_of(run, other, tpf="4.0").estimate(run).forwards == 20 * 64 * 16 / 128


def test_without_a_sealed_run_of_the_decoder_the_others_speak_for_it() -> None:
    """But not for a decoder that commits one token per forward, and it not for them."""
    single = {"select": {"_target_": "select.topk"}}
    quick = sealed(16, 1.0, decoder={"name": "credit"})
    model = model_of(quick, sealed(64, 1.0, decoder={"name": "vanilla", **single}))
    assert model.estimate(missing()).forwards == 20 * 16
    assert model.estimate(missing(decoder={"name": "dream", **single})).forwards == 20 * 64


def test_seconds_are_scaled_by_what_was_measured() -> None:
    run = missing()
    each = ms_of(run.config) / 1000
    found = model_of(run, sealed(10, 3 * 10 * each, decoder={"name": "credit"})).estimate(run)
    assert found.seconds == pytest.approx(3 * found.forwards * each)


def test_what_is_done_costs_nothing_more() -> None:
    run = replace(missing(), done=15, total=20)
    whole, part = (model_of().estimate(each) for each in (missing(), run))
    for field in ("forwards", "seconds", "size"):
        assert getattr(part, field) == pytest.approx(getattr(whole, field) / 4)


def test_all_items_where_there_is_no_limit() -> None:
    assert model_of().estimate(missing(limit=None)).forwards == 1319 * 64
    assert model_of().estimate(missing(limit=9999)).forwards == 1319 * 64
    assert model_of().estimate(missing(benchmark={"repeats": 4})).forwards == 4 * 20 * 64


def test_nothing_is_guessed_of_an_unknown_model_or_task() -> None:
    assert model_of().estimate(missing(model={"name": "omega"})) is None
    assert model_of().estimate(missing(benchmark={"name": "riddles"})) is None
    assert cost.cost_in_words([None]) == "unknown"
    assert cost.cost_in_words([cost.Cost(10, 30, 1e6), None]).endswith("and 1 runs of unknown cost")


def test_every_model_has_its_parameters_and_every_benchmark_its_items() -> None:
    lacking = [name for name in options("model") if not cost._entry("parameters", name)]
    named = (name.replace("deepspec_", "acceptance-") for name in options("benchmark"))
    lacking += [name for name in named if not cost._entry("items", name)]
    assert lacking == ["served", "acceptance"]


@pytest.mark.parametrize(
    ("changes", "fed"),
    [
        ({}, 90 + 64),
        ({"decoder": {"explore": LOOKAHEAD | {"k": 3}}}, 4 * (90 + 64)),
        ({"decoder": {"explore": LOOKAHEAD | {"k": 4, "counts_base": True}}}, 4 * (90 + 64)),
        ({"benchmark": {"shots": 4}}, 90 + 64 + 4 * 150),
        ({"decoder": CACHED}, 64),
    ],
)
def test_branches_canvas_and_cache_make_the_positions(changes, fed) -> None:
    run = config(**changes)
    assert cost.positions(run, cost.summary_of(run["decoder"])) == fed


def test_a_small_forward_is_overhead_and_reading_weights_a_large_one_arithmetic() -> None:
    assert ms_of(config(decoder=CACHED)) == pytest.approx(15 + 1000 * 16e9 / 3400e9)
    large = ms_of(config(decoder={"explore": {**LOOKAHEAD, "k": 31}}))
    assert large == pytest.approx(15 + 1000 * 2 * 8e9 * 32 * 154 / 690e12)


def test_estimates_are_checked_on_each_run_from_the_others() -> None:
    each = ms_of(config()) / 1000
    speeds = enumerate((2.0, 2.0, 2.0, 4.0))
    runs = [sealed(10, 10 * each * s, decoder={"name": f"d{i}", "k": i}) for i, s in speeds]
    # all but one are alike; the last took twice as long as the others let expect
    *alike, last = model_of(*runs).measured.errors
    assert alike == pytest.approx([1.0] * 3)
    assert 1 < last <= 2


def test_a_decoder_that_cannot_be_made_here_is_estimated_by_its_settings() -> None:
    """The run is unavailable here, but its cost elsewhere is shown."""
    absent = {"_target_": "filter.learned", "source": "results/training/filters/absent"}
    select = {"_target_": "select.filter", "head": absent}
    plain = config(decoder={"select": select, "schedule": {"block": 16}})["decoder"]
    assert cost.summary_of(plain) == DecoderSummary(block=16)
    assert cost.summary_of({"draft": {}}) == DecoderSummary(drafts=True)
    assert cost.summary_of(config()["decoder"]).caches is False


def test_a_decoders_summary_is_kept_until_its_file_changes(tmp_path, monkeypatch) -> None:
    make = Mock(return_value=SUMMARY)
    monkeypatch.setattr(cost, "summary_of", make)
    file = tmp_path / "filter"
    file.write_text("one")
    settings = SettingsCache(tmp_path, dict)
    for decoder in ({"name": "plain"}, {"filter": {"source": str(file)}}):
        for _ in range(2):
            assert cost.MeasuredRuns([], settings=settings).summary(decoder) == SUMMARY
    assert make.call_count == 2
    file.write_text("another")
    cost.MeasuredRuns([], settings=settings).summary(decoder)
    assert make.call_count == 3
    for _ in range(2):
        cost.MeasuredRuns([], settings=settings).summary({"_target_": "mine.Decoder"})
    assert make.call_count == 5
