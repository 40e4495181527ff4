"""`dllm-bench doctor`: what this machine can run, what is missing, and whether a model works.

Nothing is downloaded. A check that fails gives one line and the others continue. A line is (mark,
topic, text) with the mark "ok", "--" for something optional that is missing, or "no" for something
required. Importing this module must not need torch, since it reports whether torch is installed.
"""

from __future__ import annotations

import os
import platform
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from dllm_bench import __version__
from dllm_bench.benchmarks.sandbox import CONSENT_VARIABLE, isolation
from dllm_bench.cli import common
from dllm_bench.cli.common import OK, OPTIONAL_MISSING, REQUIRED_MISSING, Line
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import show
from dllm_bench.models.sources import SHIPPED_MODELS
from dllm_bench.paths import PACKAGE, assets_dir, read_yaml
from dllm_bench.store.files import results_directory
from dllm_bench.store.groups import Paths
from dllm_bench.store.lock import supports_flock
from dllm_bench.store.provenance import code, cpu_model, installed_version

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "peft", "hydra-core", "lm-eval")
OPTIONAL = read_yaml(Path(__file__).with_name("doctor.yaml"))["optional"]
"""Distribution -> what does not work without it."""
MEBIBYTE = 2**20


def run(arguments: Namespace) -> int:
    """Print the report; 1 if something required is missing, or if a check of --gpu failed or had no
    time."""
    marks = set[str]()
    for mark, topic, text in gpu_lines(arguments) if arguments.gpu else all_lines(arguments):
        show(f"{mark}  {topic:30} {text}")
        marks.add(mark)
    return int(REQUIRED_MISSING in marks)


def all_lines(arguments: Namespace) -> list[Line]:
    """Return the report on this machine, and on a model if one is named."""
    if arguments.fake or arguments.quick or arguments.out:
        raise DllmBenchError(
            "doctor was given --fake, --quick or --out without --gpu, which they belong to; add it."
        )
    named = [common.as_model(arguments.model)] if arguments.model else []
    config = common.compose([*named, *arguments.settings])
    if named:
        from dllm_bench.api.compose import check_folder

        check_folder(config.model)  # before torch is imported: reports mistakes at once
    report = [*python_lines(), *package_lines(), *device_lines(), *asset_lines()]
    report += [*path_lines(common.configured_paths(arguments)), *sandbox_lines()]
    if named:
        # needs torch, and the report above must work where torch is missing
        from dllm_bench.cli.doctor_torch import model_lines

        report += model_lines(config)
    return report


def gpu_lines(arguments: Namespace) -> Iterator[Line]:
    """Run the checks of a CUDA device; yield a line for each."""
    from dllm_bench.cli import doctor_torch

    if arguments.model:
        raise DllmBenchError(
            f"doctor --gpu was given the model {arguments.model!r}, and it checks embedded models; "
            "check the model in a command of its own."
        )
    return doctor_torch.gpu_lines(arguments.fake, arguments.quick, arguments.out)


# --- what needs no model: Python, packages, devices, assets, paths --------------------------------


def python_lines() -> Iterator[Line]:
    """Report on Python, this package and the machine."""
    yield OK, "python", f"{platform.python_version()} ({sys.executable})"
    commit = code(PACKAGE.parent)
    where = f"commit {commit['commit'][:10]}" if commit["commit"] else "no checkout"
    changed = ", with local changes" if commit["dirty"] else ""
    yield OK, "dllm-bench", f"{__version__} ({where}{changed})"
    yield OK, "machine", f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}"


def package_lines() -> Iterator[Line]:
    """Report on required and optional packages."""
    missing = dict.fromkeys(REQUIRED, (REQUIRED_MISSING, "not installed; run make again"))
    for name, loss in OPTIONAL.items():
        missing[name] = OPTIONAL_MISSING, f"not installed: no {loss}"
    for name, (mark, text) in missing.items():
        installed = installed_version(name)
        yield (OK, name, installed) if installed else (mark, name, text)


def device_lines() -> Iterator[Line]:
    """Report on the devices torch can use, and its threads."""
    if find_spec("torch") is None:
        return
    import torch  # `package_lines` states that it is missing; importing it at the top would fail

    threads = f"torch uses {torch.get_num_threads()} thread(s)"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield OK, "device", f"cpu, {threads}; no CUDA device, so paper-size models are out of reach"
    for index in range(count):
        memory = torch.cuda.get_device_properties(index).total_memory // MEBIBYTE
        yield OK, "device", f"cuda:{index} {torch.cuda.get_device_name(index)}, {memory} MiB"
    yield kernel_line(bool(count))


def kernel_line(has_cuda: bool) -> Line:
    """Report whether this package's Triton kernels run, by trying them on two rows of logits."""
    import torch

    from dllm_bench.decoding import fused  # imports torch

    if not has_cuda:
        return OPTIONAL_MISSING, "kernels", "need a CUDA device; torch reads the logits here"
    if fused.works(torch.bfloat16):
        return OK, "kernels", "work: a round reads its logits once"
    return OPTIONAL_MISSING, "kernels", "do not work here: logits are read in several passes"


def asset_lines() -> Iterator[Line]:
    """Report which embedded models are present, and how large they are."""
    for name in sorted(SHIPPED_MODELS):
        files = sorted((assets_dir() / name).glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files) / MEBIBYTE
        missing = f"no weights; in a clone: python -m scripts.embedded {name}"
        there = f"embedded weights, {size:.1f} MiB"
        yield (OK, name, there) if files else (REQUIRED_MISSING, name, missing)


def path_lines(paths: Paths) -> Iterator[Line]:
    """Report on the results directory and the data directory."""
    results = results_directory(paths.results)
    yield OK, "results", str(results.absolute())
    if not supports_flock(results):
        text = "flock does not work there; runs are locked by a file with a heartbeat instead"
        yield OPTIONAL_MISSING, "locks", text
    data = paths.data
    if not data:
        text = "not set: real benchmarks come from the hub; set DLLM_BENCH_DATA"
        yield OPTIONAL_MISSING, "data", text
    elif not Path(data).is_dir():
        text = f"{data} is not a directory; set DLLM_BENCH_DATA or paths.data"
        yield REQUIRED_MISSING, "data", text
    else:
        folders = ", ".join(sorted(p.name for p in Path(data).iterdir() if p.is_dir()))
        yield OK, "data", f"{data} with {folders or 'nothing in it'}"


def sandbox_lines() -> Iterator[Line]:
    """Report how generated code would be isolated from this machine."""
    try:
        yield OK, "sandbox", f"{', '.join(isolation())}; {CONSENT_VARIABLE}=1 allows generated code"
    except DllmBenchError as error:
        yield REQUIRED_MISSING, "sandbox", str(error)
