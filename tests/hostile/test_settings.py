"""Settings, paths and configuration folders that cannot work: one sentence each, at once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import get_args

import pytest

from dllm_bench import paths
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import CONFIG_DIR, expanded
from dllm_bench.store.files import results_directory
from dllm_bench.store.groups import KINDS, RunConfig, declarations, role_of

RUN = ["run", "model=tiny-llada", "hardware=cpu", "limit=1", "benchmark.max_new_tokens=32"]
LONG = "a" * 300
TOO_LONG = (
    f"paths.results={LONG}",
    f"paths.results={'a/' * 3000}",
    f"model={LONG}/b",
    f"model.path={LONG}",
    f"benchmark=gsm8k paths.data={LONG}",
)


@pytest.mark.parametrize("setting", TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_path_that_is_too_long_is_one_sentence(setting, tmp_path, command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = command(" ".join([*RUN, setting]), code=2, here=False).splitlines()
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
    """Return a home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_a_tilde_is_the_home_folder_wherever_results_are_named(home, monkeypatch, capsys) -> None:
    assert results_directory("~/a") == expanded("~/a") == home / "a"
    monkeypatch.setenv("DLLM_BENCH_RESULTS", "~")
    assert main(["status"]) == main(["status", "--results", "~/b"]) == 0
    assert main([*RUN, "paths.results='~/c'"]) == 0
    assert main(["run", "-m", *RUN[1:], "seed=1,2", "paths.results='~/c'"]) == 0
    assert (home / "c" / "runs").is_dir()
    assert not (home.parent / "~").exists()


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
FILES = {
    "a tab": (b"a:\n\tb: 1\n", "cannot start any token"),
    "aliases": (BOMB.encode(), "more than 20 aliases"),
    "brackets": (b"[" * 5000, "nested more than"),
    "blocks": (b"- " * 5000, "nested more than"),
    "latin-1": (b"a: \xe9\n", "codec can't decode"),
    "null": (b"a: \0\n", "special characters are not allowed"),
    "size": (b"# " + b"a" * 2**19, "no regular file of at most"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("group", ["decoder", "model"])
def test_a_configuration_file_that_cannot_be_read_is_named(
    name, group, tmp_path, command, monkeypatch
) -> None:
    content, words = FILES[name]
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_bytes(content)
    monkeypatch.setenv(CONFIG_DIR, "")
    paths.check_yaml_files.cache_clear()
    started = time.process_time()
    (line,) = command("--config-dir", str(tmp_path), *RUN, f"{group}=mine", code=2).splitlines()
    assert time.process_time() - started < 10
    assert f"{group}/mine.yaml" in line and words in line


def test_a_pipe_among_the_configuration_files_is_named(tmp_path, command, monkeypatch) -> None:
    (tmp_path / "decoder").mkdir()
    os.mkfifo(tmp_path / "decoder" / "mine.yaml")
    monkeypatch.setenv(CONFIG_DIR, str(tmp_path))
    (line,) = command(" ".join(RUN), code=2).splitlines()
    assert "mine.yaml" in line


def test_a_configuration_folder_that_does_not_exist_is_named(command, monkeypatch) -> None:
    monkeypatch.setenv(CONFIG_DIR, "/no/such/folder")
    (line,) = command(" ".join(RUN), code=2).splitlines()
    assert f"{CONFIG_DIR}=/no/such/folder is not a folder" in line


def test_a_configuration_folder_may_be_below_the_home_folder(home, monkeypatch) -> None:
    (home / "mine").mkdir()
    monkeypatch.setenv(CONFIG_DIR, "~/mine")
    assert paths.further_conf_dirs()[-1] == (home / "mine").resolve()
