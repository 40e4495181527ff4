"""Data files, settings, paths, folders and checkpoints that cannot work: one sentence each, and no
sample is decoded.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dllm_bench import paths
from dllm_bench.benchmarks.items import read_jsonl
from dllm_bench.cli import doctor_torch
from dllm_bench.cli.main import main
from dllm_bench.core.declared import Seconds, fits
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import sources
from dllm_bench.models.filters import LearnedFilter
from dllm_bench.models.load import inspect_checkpoint
from dllm_bench.models.text import library_errors_named
from dllm_bench.paths import CONFIG_DIR, assets_dir, cache_file, expanded, read_yaml
from dllm_bench.runs import runner
from dllm_bench.store import inputs
from dllm_bench.store.files import results_directory
from dllm_bench.store.groups import KINDS, RunConfig, declarations, require_numbers, role_of
from tests.benchmark_helpers import evalplus_benchmark, lm_eval_benchmark
from tests.helpers import CONFIGS, shard, tiny_checkpoint
from tests.tiers import covering
from tests.unit.models.common import edit, spec, tensors

GOOD = b'{"question": "1+1?", "answer": "#### 2"}\n'
LINES: dict[str, tuple[bytes, str]] = {
    "cut": (b'{"question": "1+', "Line 2 of .*test.jsonl is not JSON"),
    "latin-1": (b'{"question": "caf\xe9"}', "Line 2 of .*test.jsonl is not JSON in UTF-8"),
    "utf-16": (GOOD.decode().encode("utf-16"), "Line 2 of .*test.jsonl is not JSON in UTF-8"),
    "null bytes": (b"\0\0\0\0", "Line 2 of .*test.jsonl is not JSON"),
    "deep": (b'{"question":' * 50_000, "Line 2 of .*test.jsonl is not JSON"),
    "a long integer": (b"9" * 5000, "Line 2 of .*test.jsonl is not JSON"),
    "a list": (b'["1+1?"]', "Line 2 of .*test.jsonl is a JSON list"),
    "a number": (b"5", "Line 2 of .*test.jsonl is a JSON int"),
    "null": (b"null", "Line 2 of .*test.jsonl is a JSON NoneType"),
    "no answer": (b'{"question": "1+1?"}', "Row 2 of .*test.jsonl has no answer"),
    "null as an answer": (b'{"question": "?", "answer": null}', "Row 2 of .* has no answer"),
    "a number as an answer": (b'{"question": "?", "answer": 5}', "Row 2 of .* has no answer"),
    "half a character": (rb'{"question": "\ud800", "answer": "1"}', "has a row of another form"),
    "an empty object": (b"{}", "Row 2 of .*test.jsonl has no question, answer"),
}


@pytest.mark.parametrize("name", covering(2, LINES))
def test_a_wrong_line_is_named(name: str, tmp_path: Path) -> None:
    line, words = LINES[name]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_bytes(GOOD + line + b"\n" + GOOD)
    benchmark = lm_eval_benchmark("gsm8k", data_dir=str(tmp_path))
    with pytest.raises(DllmBenchError, match=words):
        benchmark.prompt(benchmark.items[0])


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert read_jsonl(tmp_path / "rows.jsonl") == [json.loads(GOOD)]


FORMS, HUGE = read_yaml(Path(__file__).with_name("inputs.yaml")).values()


@pytest.mark.parametrize("name", FORMS)
def test_a_file_of_another_form_is_named(name: str, tmp_path: Path) -> None:
    from dllm_bench.benchmarks.tasks import sources

    file, content, words = FORMS[name]
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(content)
    source = name.split()[0]
    split = {"squad_v2": "dev", "drop": "dev", "livecodebench": "v6"}.get(source, "test")
    with pytest.raises(DllmBenchError, match=f"{Path(file).name} has .*{words}"):
        sources.rows(source, split, str(tmp_path))


def test_a_problem_without_inputs_is_named(tmp_path: Path) -> None:
    file = tmp_path / "humanevalplus" / "HumanEvalPlus.jsonl"
    file.parent.mkdir()
    file.write_text('{"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}\n')
    with pytest.raises(DllmBenchError, match="Row 1 of .*has no canonical_solution, base_input"):
        evalplus_benchmark("humaneval_plus", data_dir=str(tmp_path)).dataset_hash()


RUN = "run model=tiny-llada hardware=cpu limit=1"
SHORT = f"{RUN} benchmark.max_new_tokens=32"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A small run, which imports all that a run takes."""
    assert main([*SHORT.split(), f"paths.results={tmp_path_factory.mktemp('imported')}"]) == 0


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("overrides", covering(4, HUGE))
def test_a_setting_beyond_the_memory_is_refused_at_once(overrides, command, monkeypatch) -> None:
    """The bound follows from the memory; here the same 16 GiB on every machine."""
    monkeypatch.setattr(runner, "memory_bytes", lambda device: 16 * 2**30)
    started = time.process_time()
    (line,) = command(RUN, *overrides.split(), code=2).splitlines()
    assert time.process_time() - started < 2
    assert HUGE[overrides] in line


FITS = {1.5: "set hardware.dtype=bfloat16", 0.5: "choose a smaller model"}
"""Memory in sizes of the weights in bfloat16."""


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("share", FITS)
def test_weights_beyond_the_memory_are_refused(share, tmp_path, command, monkeypatch) -> None:
    weights = (assets_dir() / "tiny-llada" / "model.safetensors").stat().st_size
    monkeypatch.setattr(inputs, "memory_bytes", lambda device: int(share * weights))
    started = time.process_time()
    (line,) = command(RUN, code=2).splitlines()
    assert time.process_time() - started < 2
    assert "in float32" in line and FITS[share] in line
    assert not list(tmp_path.iterdir()), "a run exists"


def test_a_nan_is_found_at_every_depth() -> None:
    nan = float("nan")
    for plain, name in (({"a": {"b": [1, nan]}}, "a.b"), ({"seed": nan}, "seed")):
        with pytest.raises(DllmBenchError, match=f"^{name} is nan"):
            require_numbers(plain)
    require_numbers({"tau": float("inf"), "name": "nan"})
    assert not fits([0.5, nan], list[Seconds])


# --- paths and configuration folders --------------------------------------------------------------

LONG = "a" * 300
TOO_LONG = [f"paths.results={LONG}", f"paths.results={'a/' * 3000}", f"model={LONG}/b"]
TOO_LONG += [f"model.path={LONG}", f"benchmark=gsm8k paths.data={LONG}"]


@pytest.mark.parametrize("setting", TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_path_that_is_too_long_is_one_sentence(setting, tmp_path, command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = command(SHORT, *setting.split(), code=2, here=False).splitlines()
    assert "cannot be used (File name too long)" in line
    assert not list(tmp_path.iterdir())


def test_every_bounded_setting_exists() -> None:
    bounded = 0
    for group, kind in {"": RunConfig, **KINDS}.items():
        for name, (_, declared) in declarations(kind).items():
            key = f"{group}.{name}".lstrip(".")
            for part in (declared, *get_args(declared)):
                for one in getattr(part, "__metadata__", ()):
                    bounded += 1
                    assert role_of(key)
                    with pytest.raises(DllmBenchError, match=f"^{key} is"):
                        kind({name: one.low - 1})
    assert bounded > 15


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_a_tilde_is_the_home_folder_wherever_results_are_named(home, monkeypatch, capsys) -> None:
    (home / "loop").symlink_to(home / "loop")
    assert cache_file(home / "loop", "a").name == "a"
    assert results_directory("~/a") == expanded("~/a") == home / "a"
    monkeypatch.setenv("DLLM_BENCH_RESULTS", "~")
    assert main(["status"]) == main(["status", "--results", "~/b"]) == 0
    assert main([*SHORT.split(), "paths.results='~/c'"]) == 0
    assert main(["run", "-m", *SHORT.split()[1:], "seed=1", "--results", "~/d's (1), 2"]) == 0
    assert {"c", "d's (1), 2"} <= {*os.listdir(home)} and not (home.parent / "~").exists()


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
FILES: dict[str, tuple[bytes | None, str]] = {  # None: a pipe
    "a tab": (b"a:\n\tb: 1\n", "cannot start any token"),
    "aliases": (BOMB.encode(), "more than 20 aliases"),
    "brackets": (b"[" * 5000, "nested more than"),
    "blocks": (b"- " * 5000, "nested more than"),
    "latin-1": (b"a: \xe9\n", "codec can't decode"),
    "null": (b"a: \0\n", "special characters are not allowed"),
    "size": (b"# " + b"a" * 2**19, "no regular file of at most"),
    "a pipe": (None, "no regular file of at most"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("group", ["decoder", "model"])
def test_an_unreadable_yaml_is_named(name, group, tmp_path, command, monkeypatch) -> None:
    content, words = FILES[name]
    file = tmp_path / group / "mine.yaml"
    file.parent.mkdir()
    os.mkfifo(file) if content is None else file.write_bytes(content)
    monkeypatch.setenv(CONFIG_DIR, "")
    paths.check_yaml_files.cache_clear()
    started = time.process_time()
    (line,) = command(f"--config-dir {tmp_path} {SHORT} {group}=mine", code=2).splitlines()
    assert time.process_time() - started < 10
    assert f"{group}/mine.yaml" in line and words in line


def test_a_configuration_folder_may_be_below_the_home_folder(home, command, monkeypatch) -> None:
    monkeypatch.setenv(CONFIG_DIR, "~/mine")
    (line,) = command(SHORT, code=2).splitlines()
    assert f"{CONFIG_DIR}=~/mine is not a folder" in line
    (home / "mine").mkdir()
    assert paths.further_conf_dirs()[-1] == (home / "mine").resolve()


# --- checkpoints ----------------------------------------------------------------------------------

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
