"""Profiles of steps per second: what is fed, what is stored, and that it can be read back.

No time is asserted, since times depend on the machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dllm_bench.api.compose import compose
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind
from dllm_bench.methods.drafting import (
    StepProfile,
    Temperatures,
    read_step_profile,
    read_temperatures,
)
from dllm_bench.registry import describe, instantiate
from dllm_bench.training.scheduler import ProfileJob, measure, profile_of
from tests.helpers import Watched, load_denoiser, tiny_checkpoint, tiny_denoiser

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


NO_PROFILES = ["{", "[]", '{"tokens": [1]}', '{"tokens": "12", "steps_per_s": "12"}']
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
