"""`dllm-bench doctor --gpu`, with the CPU in the device's place: its report, and what it finds."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm_bench.cli import doctor_torch
from dllm_bench.cli.main import main
from dllm_bench.core.request import Generation

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: Patch) -> None:
    """One decoder and short rows."""
    monkeypatch.setattr(doctor_torch, "DECODERS", {"fast_dllm": "tiny-llada"})
    monkeypatch.setattr(doctor_torch, "LENGTHS", (8, 1001))
    monkeypatch.setattr(doctor_torch, "LONG", 4613)
    monkeypatch.setattr(doctor_torch, "BATCH", 3)


def checked(out: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the report's steps by name."""
    code = main(["doctor", "--gpu", "--fake", "--quick", "--out", str(out)])
    return code, {step["name"]: step for step in json.loads(out.read_text())["steps"]}


def test_every_step_passes_or_says_why_it_was_skipped(tmp_path: Path) -> None:
    code, steps = checked(tmp_path / "gpu.json")
    assert (code, list(steps)) == (0, list(doctor_torch.STEPS))
    skipped = {name: step["why"] for name, step in steps.items() if step["state"] != "passed"}
    assert skipped == doctor_torch.NEED_CUDA
    assert steps["bfloat16"]["facts"]["equal texts"].endswith("of 3")


def test_wrong_numbers_and_other_tokens_are_found(tmp_path: Path, monkeypatch: Patch) -> None:
    read, decoded = doctor_torch.read_logits, doctor_torch.decoded

    def wrong_ids(*args: Any, **options: Any) -> Any:
        seen = read(*args, **options)
        return replace(seen, ids_KW=seen.ids_KW + 1)

    def other_token(name: str, device: str, batch: int, **more: str) -> dict[str, Generation]:
        made = decoded(name, device, batch, **more)
        key, ids = min(made), list(made[min(made)].ids)
        ids[4] += batch > 1
        return {**made, key: replace(made[key], ids=tuple(ids))}

    two = {name: doctor_torch.STEPS[name] for name in ("numerics", "decoders")}
    monkeypatch.setattr(doctor_torch, "STEPS", two)
    monkeypatch.setattr(doctor_torch, "read_logits", wrong_ids)
    monkeypatch.setattr(doctor_torch, "decoded", other_token)
    code, steps = checked(tmp_path / "gpu.json")
    assert (code, [step["state"] for step in steps.values()]) == (1, ["failed"] * 2)
    (problem,) = steps["decoders"]["problems"]
    assert problem.startswith("fast_dllm, batch 3") and "margin" in problem


def test_tokens_that_were_close_may_differ(monkeypatch: Patch) -> None:
    """The margin is read where the texts first differ, in the forward that committed it."""
    law = next(iter(doctor_torch.decoded("fast_dllm", "cpu", 1).values()))
    other = replace(law, ids=(law.ids[0] + 1, *law.ids[1:]))
    monkeypatch.setattr(doctor_torch, "margin", lambda logits: torch.zeros(logits.shape[:2]))
    assert doctor_torch.margin_at_difference("fast_dllm", law, other) == 0


@pytest.mark.parametrize("crash", [True, False])
def test_a_crash_is_reported_and_time_ends_the_rest(command, monkeypatch, crash: bool) -> None:
    def first(check: doctor_torch.GpuCheck) -> doctor_torch.Found:
        monkeypatch.setattr(doctor_torch, "time", SimpleNamespace(monotonic=lambda: float("inf")))
        if crash:
            raise RuntimeError("CUDA error: an illegal memory access")
        return {}, []

    monkeypatch.setitem(doctor_torch.STEPS, "machine", first)
    machine, *others, late = command("doctor --gpu --fake --quick", code=1).splitlines()
    assert ("illegal memory access (test_doctor_gpu.py:" in machine) == crash
    assert [" not run: out of time" in line for line in others] == [True] * 9
    assert late.endswith("not checked in 120 s; leave out --quick for 600 s")


def test_a_step_that_hangs_or_ends_its_process_is_reported() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        late: Any = process.submit(time.sleep, 0.5)
        assert "did not end" in doctor_torch.outcome(late, 0.01)["why"]
        assert doctor_torch.outcome(process.submit(os._exit, 1), 60)["state"] == "failed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_one_sentence(command) -> None:
    (line,) = command("doctor --gpu", code=2).splitlines()
    assert "give --fake" in line
