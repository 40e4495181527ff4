"""Damaged checkpoints on the command line: each fault has its own message and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dllm_bench.cli.main import main
from tests.helpers import shard, tiny_checkpoint
from tests.unit.models.common import edit, tensors


def shard_missing(folder: Path) -> None:
    shard(folder)[1].unlink()


def file_cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def tensors_swapped(folder: Path) -> None:
    swapped = tensors(folder)
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    swapped[first], swapped[second] = swapped[second], swapped[first]
    save_file(swapped, folder / "model.safetensors")


def quantised(folder: Path) -> None:
    stored = tensors(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name] = (stored[name] * 100).to(torch.int8)
    save_file(stored, folder / "model.safetensors")


def size_as_text(folder: Path) -> None:
    edit(folder / "config.json", hidden_size="32")


def no_heads(folder: Path) -> None:
    edit(folder / "config.json", num_attention_heads=0)


def index_empty(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def tokenizer_cut_short(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:200])


def tokenizer_emptied(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def mask_wrong(folder: Path) -> None:
    edit(folder / "config.json", mask_token_id=7)


def base_twice(folder: Path) -> None:
    edit(folder / "config.json", rope_theta=1e4, rope_parameters={"rope_theta": 1e6})


def pickled(folder: Path) -> None:
    torch.save(tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (shard_missing, "lacks b.safetensors"),
        (file_cut_short, "is cut short or damaged"),
        (tensors_swapped, "mis-shaped: model.layers.0.mlp.down_proj.weight (48, 32)"),
        (quantised, "integers: model.layers.0.mlp.up_proj.weight (I8)"),
        (size_as_text, "does not describe a dream model (StrictDataclassFieldValidationError"),
        (no_heads, "does not describe a dream model (ZeroDivisionError"),
        (index_empty, "has no weight_map of tensors to files"),
        (tokenizer_cut_short, "cannot be read (JSONDecodeError"),
        (tokenizer_emptied, "cannot be read (KeyError: 'added_tokens')"),
        (mask_wrong, "mask_token_id=7, the tokenizer"),
        (base_twice, "at its top level and 1000000.0 inside of rope_parameters"),
        (pickled, "pickled weights only (pytorch_model.bin)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_fault_has_its_own_message(
    plant: Callable[[Path], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint("dream", tmp_path / "planted", seed=5)
    plant(folder)
    results = f"paths.results={tmp_path}"
    arguments = ["model=tiny-dream-base", f"model.path={folder}", "hardware=cpu", "limit=1"]
    assert main(["run", results, *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0], lines
