"""`dllm-bench doctor`: what this machine can run, what is absent, and what that costs.

Facts only, nothing is downloaded; a check that fails costs one line, never the report.
A line is (mark, topic, text): "ok", "--" for something optional that is absent, "no" for a need.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dllm_bench import __version__
from dllm_bench.cli import doctor_model
from dllm_bench.cli.doctor_model import ABSENT, NEED, OK, Line
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import assets_dir

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "peft", "hydra-core", "lm-eval")
OPTIONAL = {  # distribution -> what is missing without it
    "evalplus": "code benchmarks; pip install 'dllm-bench[code]'",
    "wandb": "logger=wandb; pip install 'dllm-bench[wandb]'",
    "submitit": "table --submit; pip install 'dllm-bench[slurm]'",
    "torchao": "hardware.quantization; pip install 'dllm-bench[quant]'",
    "hydra-submitit-launcher": "hydra/launcher=slurm; pip install 'dllm-bench[slurm]'",
}
MEBIBYTE = 2**20


def lines(config: Mapping[str, Any], model_asked: bool) -> Iterator[Line]:
    """The whole report for a composed configuration; the model is checked when it was asked for."""
    yield from python_lines()
    yield from package_lines()
    yield from device_lines()
    yield from asset_lines()
    yield from path_lines(config["paths"])
    yield from sandbox_lines()
    if model_asked:
        yield from doctor_model.lines(config)


def python_lines() -> Iterator[Line]:
    """Interpreter and machine."""
    from dllm_bench.paths import PACKAGE
    from dllm_bench.store.provenance import code, cpu_model

    python = f"{platform.python_version()} ({sys.executable})"
    yield (OK if sys.version_info >= (3, 11) else NEED), "python", python
    commit = code(PACKAGE.parent)
    where = f"commit {commit['commit'][:10]}" if commit["commit"] else "no checkout"
    changed = ", with local changes" if commit["dirty"] else ""
    yield OK, "dllm-bench", f"{__version__} ({where}{changed})"
    yield OK, "machine", f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}"


def package_lines() -> Iterator[Line]:
    """Required and optional packages."""
    for name in REQUIRED:
        found = installed(name)
        yield (OK, name, found) if found else (NEED, name, "not installed; run make again")
    for name, loss in OPTIONAL.items():
        found = installed(name)
        yield (OK, name, found) if found else (ABSENT, name, f"not installed: no {loss}")


def installed(name: str) -> str | None:
    """Version of a distribution, None where it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_lines() -> Iterator[Line]:
    """Devices torch sees, and its threads."""
    if find_spec("torch") is None:
        return
    import torch

    threads = f"torch uses {torch.get_num_threads()} threads"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield OK, "device", f"cpu, {threads}; no CUDA device, so paper-size models are out of reach"
    for index in range(count):
        memory = torch.cuda.get_device_properties(index).total_memory // MEBIBYTE
        yield OK, "device", f"cuda:{index} {torch.cuda.get_device_name(index)}, {memory} MiB"


def asset_lines() -> Iterator[Line]:
    """Embedded models: present, and how large."""
    from dllm_bench.models.sources import SHIPPED_MODELS

    for name in sorted(SHIPPED_MODELS):
        files = sorted((assets_dir() / name).glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files) / MEBIBYTE
        if files:
            yield OK, name, f"embedded weights, {size:.1f} MiB"
        else:
            yield NEED, name, f"no weights; in a clone: python -m scripts.embedded {name}"


def path_lines(paths: Mapping[str, Any]) -> Iterator[Line]:
    """Results and data directories."""
    yield OK, "results", str(Path(paths["results"]).absolute())
    data = paths.get("data")
    if not data:
        yield ABSENT, "data", "not set: real benchmarks come from the hub; set DLLM_BENCH_DATA"
    elif not Path(data).is_dir():
        yield NEED, "data", f"{data} is no directory; set DLLM_BENCH_DATA or paths.data"
    else:
        found = ", ".join(sorted(p.name for p in Path(data).iterdir() if p.is_dir()))
        yield OK, "data", f"{data} with {found or 'nothing in it'}"


def sandbox_lines() -> Iterator[Line]:
    """How generated code would be fenced in."""
    from dllm_bench.benchmarks.sandbox.execution import CONSENT, isolation

    try:
        yield OK, "sandbox", ", ".join(isolation()) + f"; {CONSENT}=1 allows generated code"
    except DllmBenchError as error:
        yield NEED, "sandbox", str(error)
