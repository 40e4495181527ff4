"""The scripts of `make perf`: the plain loop decodes what the package decodes, and counts add up.

No time is asserted. Small random models replace the large ones. The modelled time of a round counts
what a forward on the CPU computes, reads and starts; the drawing of where the time of `make table4`
goes shows all of its parts.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dllm_bench.api.random_model import (
    Ceilings,
    RoundShape,
    layer_parameters,
    random_model,
    random_request,
    roofline_ms,
)
from dllm_bench.core.trace import Forward, ForwardKind
from dllm_bench.decoding.masked import LARGE, MaskedDecoder
from dllm_bench.paths import options
from scripts.perf import __main__ as command
from scripts.perf import coverage, device, measures, model, models, table4
from scripts.perf.model import DREAM_ROUND, DeviceConstants, OperationCounter, Round
from scripts.perf.split import split
from tests.sample_stats import record_of, sample
from tests.site import builders

TINY = {"width": 32, "layers": 1, "heads": 2, "mlp": 32}


@pytest.mark.parametrize("loop", measures.LOOPS, ids=lambda loop: loop.name)
def test_the_plain_loop_decodes_the_same(loop: measures.Loop) -> None:
    """Two blocks, tokens above the threshold and below, branches that run into the next block."""
    model, request = random_model(64, TINY), random_request(6, 64, 64)
    own = loop.ours(1000).generate(model, request)
    tokens, rounds = loop.plain(measures.published(model)).generate(request, 1000)
    assert tokens == list(own.ids) and rounds == len(own.trace) < 64
    assert (loop.k > 0) == any(row.branches > 1 for row in own.trace.forwards)
    assert (loop in measures.LOOPS[2:]) == any(row.cached for row in own.trace.forwards)


EVERY = [pytest.param(name, marks=pytest.mark.drill) for name in options("decoder")]  # a minute


@pytest.mark.parametrize("name", ["wino", "dkv_cache_greedy", *EVERY])
def test_a_masked_decoder_is_timed_as_it_is(name: str) -> None:
    """WINO's block is longer than what the others get; dKV-Cache asks its selector for an order."""
    decoder = models.decoder(name)
    if not isinstance(decoder, MaskedDecoder):
        pytest.skip("not timed")
    model, request = measures.first_fitting(decoder, 32)
    assert request.max_new_tokens == max(32, decoder.schedule.block or 0)
    denoiser = models.embedded(model).denoiser
    parts, generation = split(decoder, denoiser, request)
    assert generation.ids == decoder.generate(denoiser, request).ids
    assert min(parts.values()) > 0


def test_a_watch_leaves_rows_as_they_are() -> None:
    """What is measured at a large vocabulary is what runs there: unused rows are left out."""
    model, request = random_model(64, TINY), random_request(6, 32, 64)
    model.vocab_size, asked = LARGE, list[Any]()
    forward = model.forward
    model.forward = lambda *a: asked.append(a[1].only_M) or forward(*a)
    split(measures.Loop("two branches", k=2).ours(100), model, request)
    assert all(rows_M is not None for rows_M in asked)


def test_roofline_counts_bytes_and_operations() -> None:
    """One layer of width 4 and 2 heads with 1 of keys: 2·4·(4+2) + 3·4·8 = 144 weights."""
    shape = {"width": 4, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 8}
    assert layer_parameters(shape) == 144
    one = RoundShape("cpu", device.torch.float32, shape, vocab=10, prefix=100)
    made = Forward(ForwardKind.DENOISE, branches=2, fed=6, cached=100, masks=4)
    moved = 4 * (144 + 40 + 2 * 2 * 100 + (4 + 3) * 10)  # weights, head, K/V, logits of masks
    plain = 2 * (4 + 3) * 40 + 4 * 1 * 4 * 12 * 106
    for s, ceilings in ((moved, Ceilings(1.0, 1e12, 1e12)), (plain, Ceilings(1e12, 1.0, 1e12))):
        assert roofline_ms(one, "none", made, ceilings) == pytest.approx(1000 * s)
    assert device.projected(3, 1.0) is None and device.projected(7, 10.0) == pytest.approx(1555.0)


def test_a_dry_run_of_the_parts_for_a_device_is_stored(tmp_path: Path, capsys: Any) -> None:
    command.main(["--quick", "--dry", "--parts", "device,kernel", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("2*.json")
    rows, (kernel,) = (json.loads(path.read_text())["parts"][n] for n in ("device", "kernel"))
    assert kernel["same ids"] and kernel["rows"] == 2 and kernel["of bandwidth, %"] > 0
    seen = [(row["compile"], row["lookaheads"], row["window"]) for row in rows]
    assert seen == [("none", 0, 32), ("none", 7, 96), ("max", 0, 32), ("max", 7, 96)]
    assert all(row["projected tokens/s"] is None for row in rows)
    history = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in history] == [json.loads(path.read_text())]
    assert "roofline" in capsys.readouterr().out


def test_a_batch_decodes_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "BATCHED", {"fast_dllm_dual": "tiny-llada"})
    (row,) = measures.batches(measures.Size(rounds=1, new=32, items=3))
    assert row["same texts"] and row["ratio"] > 0


def test_an_unknown_part_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command.options(["--parts", "split,nothing"])
    assert "no part is called nothing" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_coverage_measures_each_cell_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage.main(["--dry"]) == 0
    heads, *cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert heads == ["cell", "tps/e2e", "interval", "again", "load", "covered"]
    first = [["fast_dllm", "tiny-llada", task] for task in coverage.TASKS]
    assert [cell[:3] for cell in cells[:2]] == first
    assert len(cells) == 2 + 2 * len(coverage.METRICS)
    assert {(s.limit, s.repeats) for s in coverage.specs(coverage.options(["--dry"]))} == {(2, 2)}


def test_an_interval_covers_what_lies_in_it() -> None:
    """Passes of 1 to 1.4 s cover a second run at 1.3 s, the first pass does not; none covers 3."""
    runs = []
    for seconds in ((1.0, 1.4, 1.2), (1.3, 1.3), (3.0, 3.0)):
        ids = [f"item-{i}#{k}" for k in range(len(seconds)) for i in range(2)]
        runs.append(record_of([sample(seconds=s) for s in seconds for _ in range(2)], ids))
    covered = [coverage.covers("latency/mean", runs[0], other) for other in runs]
    assert covered == [True, True, False]
    assert not coverage.covers("latency/mean", coverage.first_pass(runs[0]), runs[1])


SMALL = Round({**model.PROBE, "layers": 3}, vocab=64, prefix=8, branches=3, window=16)


def test_operations_are_those_of_a_forward() -> None:
    """torch counts the attention only where it is written as matrix products."""
    forward = model.probe(SMALL, own=False)  # torch counts no product in place
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        forward()
    assert counted.get_total_flops() == replace(SMALL, own_layers=False).operations


def test_weights_are_those_that_rows_are_multiplied_with() -> None:
    module = random_model(SMALL.vocab, SMALL.shape).module
    matrices = {name: p.numel() for name, p in module.named_parameters() if p.dim() == 2}
    assert SMALL.weights == sum(matrices.values()) - matrices["model.embed_tokens.weight"]


@pytest.mark.parametrize("own", [False, True], ids=["modules", "own layers"])
def test_launches_grow_by_the_layer(own: bool) -> None:
    forward, counter = model.probe(SMALL, own), OperationCounter()
    forward()
    with counter, counter.kernels():
        forward()
    assert counter.count == replace(SMALL, own_layers=own).launches


def test_a_recorded_forward_is_started_at_once() -> None:
    """What the host starts does not grow with the layers; what the device computes does."""
    one = replace(DREAM_ROUND, branches=8, replayed=True)
    half = replace(one, shape={**one.shape, "layers": one.shape["layers"] // 2})
    assert one.started == half.started <= 16 and 350 >= one.launches > half.launches > 100


def test_the_slowest_part_decides() -> None:
    one, launches = DREAM_ROUND, DREAM_ROUND.launches
    fast = {"bytes_per_s": 1e30, "flop_per_s": 1e30, "gap_s": 0.0, "launch_s": 0.0}
    for slow, part, ms in (
        ({"bytes_per_s": 1e12}, "round ms", one.bytes / 1e9),
        ({"flop_per_s": 1e12}, "device ms", one.operations / 1e9),
        ({"gap_s": 1e-3}, "device ms", launches),
        ({"gap_s": 1e-3, "launch_s": 2e-3}, "round ms", 2 * launches),
    ):
        found = model.modelled_ms(one, DeviceConstants(**{**fast, **slow}))
        assert found[part] == pytest.approx(ms)


SECONDS = re.compile(r"<!-- (\d+\.\d) s, \d+ % -->")  # of a bar; texts are drawn as paths


@pytest.mark.parametrize("redrawn", [False, True], ids=["committed", "drawn from the JSON"])
def test_the_numbers_of_the_drawing_add_up_and_none_is_blank(redrawn: bool) -> None:
    measured = json.loads(table4.MEASURED.read_text(encoding="utf-8"))
    picture = (table4.drawing(measured) if redrawn else table4.DRAWING.read_bytes()).decode()
    shown = [float(seconds) for seconds in SECONDS.findall(picture)]
    parts = measured["parts"]
    assert shown == [round(seconds, 1) for _, _, seconds in parts] and min(shown) > 0
    assert sum(shown) == pytest.approx(measured["total_s"], abs=0.05 * len(shown) + 0.1)
    assert all(f"<!-- {stage}: {part} -->" in picture for stage, part, _ in parts)
    assert f": {table4.in_minutes(measured['total_s'])} from a clone -->" in picture
    assert measured["cpu"] in picture and f"load {measured['load']} before" in picture


def test_parts_of_two_workers_are_the_time_that_passed() -> None:
    """Ten items: one worker has two runs, the other one and waits; then one run of 30 items."""
    times = ((24.0, 28.0, 29.0, 3.0), (26.0, 30.0, 32.0, 4.0), (31.0, 37.0, 38.0, 5.0))
    first = table4.Stage(10, 20.0, 40.0, [table4.Session(*one) for one in times])
    second = table4.Stage(30, 40.0, 60.0, [table4.Session(42.0, 52.0, 55.0, 8.0)])
    made = table4.Made(0.0, 15.0, 20.0, [], Path())
    parts = table4.parts_of(made, [first, second], workers=2, forwards=0.75)
    by_stage = {stage: {p: s for at, p, s in parts if at == stage} for stage, *_ in parts}
    names = ["models, warm-up", "forwards", "rounds outside forwards", "texts, files", "grading",
             "one worker waits", "table"]  # fmt: skip
    assert {*names, "imports, first models"} <= set(table4.COLOURS)
    assert by_stage.pop("clone") == {"install": 15.0, "imports, planning": 5.0}
    assert by_stage["10 items"].pop("imports, first models") == 5.0
    assert by_stage == {
        "10 items": dict(zip(names, (1.0, 4.5, 1.5, 1.0, 2.0, 3.0, 2.0), strict=True)),
        "30 items": dict(zip(names, (1.0, 3.0, 1.0, 1.0, 1.5, 7.5, 5.0), strict=True)),
    }


def test_times_of_a_run_are_read_from_its_samples(tmp_path: Path) -> None:
    """The made-up run has 45 samples of 10 ms, all at time 0 of its one session."""
    records = builders.fill(tmp_path)
    folder = next(tmp_path.glob(f"runs/*/*/*{records['lookahead'].spec.short}"))
    made = table4.Made(-1.0, -1.0, 0.0, [(45, 9.0, {folder.name: 2.0})], tmp_path)
    [stage] = table4.stages_of(made)
    assert stage.sessions == [table4.Session(0.0, 0.01, 2.0, pytest.approx(0.45))]
