"""`dllm-bench doctor MODEL`: its report on a good checkpoint, and on each bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dllm_bench.cli import doctor, doctor_torch
from dllm_bench.decoding import fused
from dllm_bench.store.groups import RunConfig
from tests.helpers import IDS, shard, tiny_checkpoint
from tests.unit.models.common import edit

HARDWARE = {"name": "cpu", "device": "cpu", "dtype": "float32", "attention": "sdpa", "threads": 1}


def report(folder: Path, **changes: Any) -> list[tuple[str, str, str]]:
    model = {"name": "tiny", "path": str(folder)} | changes
    return list(doctor_torch.model_lines(RunConfig({"model": model, "hardware": HARDWARE})))


def texts(found: list[tuple[str, str, str]]) -> dict[str, str]:
    return {topic: text for _, topic, text in found}


@pytest.mark.parametrize("layout", ["llada", "dream", "llada_moe", "llada2", "sdar", "qwen3"])
def test_a_good_checkpoint(layout: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(layout, tmp_path / "good", seed=5)
    shard(folder)
    found = report(folder, chat=True)
    assert {mark for mark, _, _ in found} == {doctor_torch.OK}
    said = texts(found)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / doctor_torch.GIBIBYTE
    assert said["files"] == f"2 with weights, {size:.3f} GiB, in {folder}"
    assert said["architecture"].startswith(f"{layout}, ")
    parameters = sum(t.numel() for f in folder.glob("*.safetensors") for t in load_file(f).values())
    if layout != "llada2":  # the selection bias is stored, but no parameter
        assert f"{parameters:,} parameters, run in float32" in said["tensors"]
    assert f"mask {IDS['<|mask|>']} <|mask|>" in said["special ids"]
    assert said["chat template"].startswith("sha256 ")
    assert "GiB of K/V per 2048 positions" in said["memory"]
    assert "it predicts 'w" in said["forward"] or "it predicts '<|" in said["forward"]


def test_a_snapshot_names_its_commit_and_how_to_pin_it(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tiny_checkpoint("dream", tmp_path / commit, seed=5)
    assert texts(report(folder))["revision"].endswith(f"pin it with model.revision={commit}")
    assert texts(report(folder, revision=commit))["revision"].endswith(f"{commit}, pinned")


def test_base_and_adapter_are_both_named_where_both_are_missing() -> None:
    found = report(Path("nobody/base"), lora="nobody/adapter")
    assert [(mark, topic) for mark, topic, _ in found] == [("no", "tiny"), ("no", "tiny lora")]
    assert "'nobody/base' is not" in found[0][2] and "'nobody/adapter' is not" in found[1][2]


def test_the_kernels_have_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, works, mark in ((False, True, "--"), (True, True, "ok"), (True, False, "--")):
        monkeypatch.setattr(fused, "works", lambda *dtypes, works=works: works)
        assert doctor.kernel_line(here)[:2] == (mark, "kernels")
    assert "kernels" in {topic for _, topic, _ in doctor.device_lines()}


def test_a_model_that_does_not_fit_is_not_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(doctor_torch, "memory_of", lambda spec: ("a small device", 1000))
    found = report(tiny_checkpoint("dream", tmp_path, seed=5))
    assert found[-1][:2] == (doctor_torch.REQUIRED_MISSING, "memory")
    assert "a small device has 0.0 GiB" in found[-1][2]


def test_the_first_error_ends_the_report(tmp_path: Path) -> None:
    folder = tiny_checkpoint("dream", tmp_path, seed=5)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    found = report(folder)
    assert (doctor_torch.REQUIRED_MISSING, "tokenizer") in [line[:2] for line in found]
    assert "no tokenizer files" in found[-1][2]
    edit(folder / "config.json", mask_token_id=None)
    assert [line[0] for line in report(folder)] == [doctor_torch.REQUIRED_MISSING]
