"""Shared by all tests: one thread per process, no network, where shared data lie.

Sockets are closed for every test: connecting anywhere but to this machine raises.
"""

from __future__ import annotations

import gc
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_SILENT"] = "true"
usual = Path.home() / ".cache"
os.environ.setdefault("HF_HOME", str(usual / "huggingface"))
os.environ.setdefault("MPLCONFIGDIR", str(usual / "matplotlib"))
caches = tempfile.TemporaryDirectory()  # of values that dllm-bench derives; removed at exit
os.environ["XDG_CACHE_HOME"] = caches.name
gc.disable()  # until all tests are collected

ROOT = Path(__file__).resolve().parents[1]
LOCAL = ("127.0.0.1", "localhost", "::1", "")


def pytest_collection_finish() -> None:
    """Never look for garbage in what was imported and collected: each pass would take 0.3 s."""
    gc.freeze()
    gc.enable()


def is_local(address: Any) -> bool:
    """True for unix sockets (a path) and for this machine's own addresses."""
    return not isinstance(address, tuple) or address[0] in LOCAL


@pytest.fixture(scope="session", autouse=True)
def machine() -> Iterator[None]:
    """Connecting to another machine raises; so does asking for its address. Torch uses one thread,
    since tests run beside each other. Files are not forced to the disk, whose power does not fail.
    Git reads this repository, and TLS its certificates, once a process."""
    import torch

    from dllm_bench.store import provenance

    def guarded(call: Callable[..., Any], place: int) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            address = args[place] if place else (args[0] or "",)
            if not is_local(address):
                raise PermissionError(f"A test reached for {address!r}; tests run without network.")
            return call(*args, **kwargs)

        return checked

    torch.set_num_threads(1)
    own, git, kept = provenance.PACKAGE.parent, provenance._git, cache(provenance._git)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded(socket.socket.connect, 1))
        patch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex, 1))
        patch.setattr(socket, "getaddrinfo", guarded(socket.getaddrinfo, 0))
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(provenance, "_git", lambda at, *to: (kept if at == own else git)(at, *to))
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the repository."""
    return ROOT


def shared(variable: str, name: str, what: str) -> Path:
    """Return a folder of data: $VARIABLE, else ../shared/NAME; skip the test if it is not there."""
    path = Path(os.environ.get(variable, ROOT.parent / "shared" / name))
    if not path.is_dir():
        pytest.skip(f"{what} not found at {path}; set {variable}")
    return path


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Directory of original benchmark files."""
    return shared("DLLM_BENCH_DATA", "data", "benchmark data")


@pytest.fixture(scope="session")
def paper_tables() -> Path:
    """Directory of transcribed tables."""
    return shared("DLLM_BENCH_PAPER_TABLES", "paper_tables", "transcribed tables")


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Every test judges its programs itself, and knows no results folder of another test."""
    if sandbox := sys.modules.get("dllm_bench.benchmarks.sandbox"):
        sandbox._JUDGED.clear()
    if files := sys.modules.get("dllm_bench.store.files"):
        files._results.clear()


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `dllm-bench FIRST WORDS` in this process, checks the exit code,
    and returns what was printed; `here`: with the test's own results directory.
    """
    from dllm_bench.cli.main import main

    def run(first: str, *words: str, code: int = 0, here: bool = True) -> str:
        assert main([*first.split(), *words, *(["--results", str(tmp_path)] * here)]) == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run
