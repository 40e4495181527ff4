"""Data files, settings, paths and folders that cannot work: one sentence each, before decoding."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import get_args

import pytest

from dllm_bench import paths
from dllm_bench.benchmarks.items import read_jsonl
from dllm_bench.cli.main import main
from dllm_bench.core.declared import Seconds, fits
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import CONFIG_DIR, assets_dir, cache_file, expanded, read_yaml
from dllm_bench.runs import runner
from dllm_bench.store import inputs
from dllm_bench.store.files import results_directory
from dllm_bench.store.groups import KINDS, RunConfig, declarations, require_numbers, role_of
from tests.benchmark_helpers import evalplus_benchmark, lm_eval_benchmark
from tests.tiers import covering

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
    assert main(["run", "-m", *SHORT.split()[1:], "seed=1", "paths.results='~/c'"]) == 0
    assert (home / "c" / "runs").is_dir() and not (home.parent / "~").exists()


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
