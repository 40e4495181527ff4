"""Damaged and hostile checkpoints: each is refused in one sentence, before a sample is decoded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dllm_bench.cli import doctor_torch
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import sources
from dllm_bench.models.filters import LearnedFilter
from dllm_bench.models.load import inspect_checkpoint
from dllm_bench.models.text import library_errors_named
from dllm_bench.store.groups import RunConfig
from tests.helpers import CONFIGS, shard, tiny_checkpoint
from tests.tiers import covering
from tests.unit.models.common import edit, spec, tensors

NAME = "model.layers.1.mlp.up_proj.weight"
DEEP = '{"a":' * 100_000
HARDWARE = {"name": "cpu", "device": "cpu", "dtype": "float32", "attention": "sdpa", "threads": 1}
INDEX, SHARD = "model.safetensors.index.json", "model-00001.safetensors"
Plant = Callable[[Path], object]


def weights(change: Callable[[dict[str, Tensor]], object]) -> Plant:
    def plant(folder: Path) -> None:
        stored = tensors(folder)
        change(stored)
        save_file(stored, folder / "model.safetensors")

    return plant


def number(value: float, name: str = NAME) -> Plant:
    return weights(lambda stored: stored[name].view(-1)[7:8].fill_(value))


def overflow(stored: dict[str, Tensor]) -> None:
    """Finite weights whose products are not."""
    for name in (NAME, NAME.replace("up", "gate"), NAME.replace("up", "down")):
        stored[name] = torch.full_like(stored[name], 1e38)


def swap(other: str) -> Plant:
    return weights(lambda stored: stored.update({NAME: stored[other], other: stored[NAME]}))


def pickled(folder: Path) -> None:
    torch.save(tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def sharded(plant: Plant) -> Plant:
    return lambda folder: (shard(folder), plant(folder))


def index(file: object) -> Plant:
    """Return a plant that names another file for a tensor."""

    def plant(folder: Path) -> None:
        names = json.loads((folder / INDEX).read_text())["weight_map"]
        edit(folder / INDEX, weight_map={**names, NAME: file})

    return sharded(plant)


def config(**entries: object) -> Plant:
    return lambda folder: edit(folder / "config.json", **entries)


def text(name: str, content: str) -> Plant:
    return lambda folder: (folder / name).write_text(content)


def instead(name: str, make: Callable[[Path], object]) -> Plant:
    def plant(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return plant


def device(name: str) -> Plant:
    return instead(name, lambda path: path.symlink_to("/dev/zero"))


def sparse(path: Path) -> None:
    """Make a file of 10 GB that takes no space."""
    path.touch()
    os.truncate(path, 10**10)


def many_tokens(folder: Path) -> None:
    like = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": f"<{i}>", "special": True, **like} for i in range(10**5)]
    edit(folder / "tokenizer.json", added_tokens=added)


def many_names(folder: Path) -> None:
    index(SHARD)(folder)
    edit(folder / INDEX, weight_map={f"{i}": SHARD for i in range(10**6)})


NO_DREAM = "does not describe a dream model"
DAMAGE: dict[str, tuple[Plant, str]] = {
    "no shard": (lambda f: shard(f)[1].unlink(), "lacks b.safetensors"),
    "a cut file": (lambda f: os.truncate(f / "model.safetensors", 10_000), "is cut short or damag"),
    "a swap": (swap(NAME.replace("up", "down")), f"mis-shaped: {NAME.replace('up', 'down')} (48, "),
    "integers": (
        weights(lambda stored: stored.update({NAME: stored[NAME].to(torch.int8)})),
        f"integers: {NAME} (I8)",
    ),
    "size as text": (config(hidden_size="32"), f"{NO_DREAM} (StrictDataclassFieldValidationError"),
    "no heads": (config(num_attention_heads=0), f"{NO_DREAM} (ZeroDivisionError"),
    "empty index": (sharded(text(INDEX, "{}")), "has no weight_map of tensors"),
    "cut tokenizer": (text("tokenizer.json", '{"version"'), "cannot be read (JSONDecodeError"),
    "empty tokenizer": (text("tokenizer.json", "{}"), "cannot be read (KeyError: 'added_tok"),
    "length as text": (text("tokenizer_config.json", '{"model_max_length": "x"}'), "encode a text"),
    "overflow": (weights(overflow), "gives logits that are NaN or infinite in float32"),
    "wrong mask": (config(mask_token_id=7), "mask_token_id=7, the tok"),
    "pickle": (pickled, "pickled weights only (pytorch_model.bin)"),
}
INDEXED = [5, ["a"], None, "../a.safetensors", "/etc/passwd", "x/a.safetensors", "a.bin"]
FAULTS: dict[str, tuple[Plant, str]] = {
    "nan": (number(float("nan")), f"{NAME} holds numbers that are NaN"),
    "inf": (number(float("inf")), f"{NAME} holds numbers that are NaN"),
    "nan in the head": (number(float("nan"), "lm_head.weight"), "NaN"),
    **{f"index of {file}": (index(file), f"{str(file)!r}, which is no") for file in INDEXED},
    "deep index": (sharded(text(INDEX, DEEP)), "is not valid JSON"),
    "deep config": (text("config.json", DEEP), "config.json is not valid JSON"),
    "config as a list": (text("config.json", "[1]"), "config.json is not a JSON object"),
    "empty config": (text("config.json", "{}"), "model_type None"),
    "deep tokenizer": (text("tokenizer.json", DEEP), "tokenizer in"),
    "deep generation config": (text("generation_config.json", DEEP), "is not valid JSON"),
    "config of a device": (device("config.json"), "no regular file"),
    "config of a pipe": (instead("config.json", os.mkfifo), "no regular file"),
    "config without end": (instead("config.json", sparse), "has 10,000,000,000 bytes"),
    "tokenizer of a device": (device("tokenizer.json"), "lacks a tokenizer"),
    "tokenizer of a pipe": (instead("tokenizer_config.json", os.mkfifo), "no regular file"),
    "index of a device": (sharded(device(INDEX)), "no regular file"),
    "many tokens": (many_tokens, "lists 100,000 added tokens"),
    "many names": (many_names, "names 1,000,000 tensors"),
    **{f"{n} layers": (config(num_hidden_layers=n), "have 2 layers") for n in (10**7, 0, -1)},
}


@pytest.mark.parametrize("name", [*DAMAGE, *covering(4, FAULTS)])
def test_a_hostile_checkpoint_decodes_nothing(name, tmp_path, command) -> None:
    plant, words = {**DAMAGE, **FAULTS}[name]
    folder = tiny_checkpoint("dream", tmp_path / "planted", seed=5)
    plant(folder)
    started = time.process_time()
    model = f"model=tiny-dream-base model.path={folder} benchmark.max_new_tokens=32"
    (line,) = command(f"run {model} hardware=cpu limit=1", code=2).splitlines()
    assert words in line
    assert time.process_time() - started < 10
    assert not [*tmp_path.rglob("record.json")]
    assert not [path for path in tmp_path.rglob("samples.jsonl") if path.read_text()]


def test_a_pattern_that_the_tokenizers_library_gives_up_on_is_named() -> None:
    from tokenizers import Regex, pre_tokenizers

    slow = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    named = library_errors_named("The prompt cannot be read", "fetch the files again")
    with pytest.raises(DllmBenchError, match=r"prompt cannot be read \(PanicException: "), named:
        slow.pre_tokenize_str("x" * 60)


VALUES: tuple[Any, ...] = ("32", -1, 0, 2**70, 1e400, [1], {"a": 1}, None, True, "\ud800")


@pytest.mark.parametrize(
    ("layout", "name"), covering(8, [(k, n) for k in ("dream", "llada") for n in CONFIGS[k]])
)
def test_a_wrong_value_in_a_config_is_a_sentence_or_has_no_effect(layout, name, tmp_path) -> None:
    folder = tiny_checkpoint(layout, tmp_path, seed=5)
    config = (folder / "config.json").read_text()
    for value in VALUES:
        (folder / "config.json").write_text(config)
        edit(folder / "config.json", **{name: value})
        try:
            inspect_checkpoint(spec(folder))
        except DllmBenchError as error:
            assert str(error)


def test_a_filter_of_no_numbers_is_refused(tmp_path: Path) -> None:
    stored = {"0.weight": torch.ones(4, 4), "0.bias": torch.full((4,), torch.nan)}
    save_file(stored, tmp_path / "filter.safetensors")
    with pytest.raises(DllmBenchError, match=r"0.bias holds numbers that are NaN"):
        assert LearnedFilter(str(tmp_path)).block


def test_doctor_compares_files_with_the_manifest(tmp_path, monkeypatch) -> None:
    """A swap of two tensors of one shape leaves every name and size as it was."""
    folder = tiny_checkpoint("dream", tmp_path / "snapshot", seed=5)
    monkeypatch.setattr(doctor_torch, "hub_cache", lambda: tmp_path)

    def line() -> tuple[str, str, str]:
        model = {"name": "tiny", "path": str(folder)}
        found = doctor_torch.model_lines(RunConfig({"model": model, "hardware": HARDWARE}))
        return next(one for one in found if one[1] == "manifest")

    assert line()[2].startswith(f"none lists {folder}")
    manifest = {str(folder): sources.manifest_entry(folder, tmp_path)}
    (tmp_path / sources.MANIFEST).write_text(json.dumps(manifest))
    mark, _, text = line()
    assert mark == doctor_torch.OK and "files are as they were downloaded" in text
    swap(NAME.replace("layers.1", "layers.0"))(folder)
    mark, _, text = line()
    assert mark == doctor_torch.REQUIRED_MISSING and "model.safetensors has other content" in text
    again = "remove it, and run dllm-bench prefetch"
    wrong = '{"tiny": {"files": [5]}}'
    for content, words in ((wrong, "no list of files"), ("{", "not valid JSON")):
        (tmp_path / sources.MANIFEST).write_text(content)
        with pytest.raises(DllmBenchError, match=f"{words}.*{again}"):
            sources.read_manifest(tmp_path)
