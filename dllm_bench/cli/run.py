"""`dllm-bench run`: one decoder on one benchmark with one model; with -m, several such runs.

Hydra composes the settings (`cli.compose`), `preflight` refuses what cannot work before anything
heavy is imported, then the run is made, or looked up if it is complete already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.cli.common import print_failures, print_lines
from dllm_bench.cli.compose import (
    GROUPS,
    MULTIRUN,
    composed_job,
    hydra_app,
    runs_in_this_process,
)
from dllm_bench.cli.preflight import check
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import options
from dllm_bench.registry import instantiate
from dllm_bench.run.progress import RunProgress, summary
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store

FLAGS = (*MULTIRUN, "-c", "--cfg", "-p", "--package", "-r", "--resolve", "-i", "--info")
HELP = """\
usage: dllm-bench run [-m] [--cfg job] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Run one decoder on one benchmark with one model. A finished run is not repeated, an interrupted one
continues where it stopped.

  dllm-bench run model=tiny-llada benchmark=minigsm decoder=fast_dllm limit=50
  dllm-bench run -m decoder=vanilla,fast_dllm seed=0,1       every combination
  dllm-bench run decoder=fast_dllm decoder.select.tau=0.7
  dllm-bench run decoder=dspark decoder@baseline=ar_speculative
                                    both on every request: speed-up, and whether the texts are equal
  dllm-bench run --cfg job decoder=lopa                      print the settings, run nothing

settings: seed, limit, batch (requests in one forward), and everything `--cfg job` prints
choices:
"""

_failed: list[str] = []  # sentences about the failed jobs of a multirun in this process


def run(arguments: Sequence[str]) -> int:
    """Run what the overrides describe; 2 if any of the runs failed."""
    if {"-h", "--help"} & set(arguments):
        print(HELP + "\n".join(choices_lines()))
        return 0
    check_flags(arguments)
    _failed.clear()
    hydra_app(arguments, run_job)
    return 2 if print_failures(_failed) else 0


def run_job(cfg: Any) -> None:
    """Run one configuration of Hydra; in a local multirun a failure does not stop the others."""
    local = runs_in_this_process()
    try:
        job = composed_job(cfg)
        check(job.config, job.reads_data)
        measure(job.config)
    except DllmBenchError as error:
        if not local:
            raise
        _failed.append(str(error))


def measure(config: Mapping[str, Any]) -> None:
    """Make (or look up) the run of a composed configuration and print what it measured."""
    # torch takes seconds to import: only after `check`, so that a mistake is reported at once
    from dllm_bench.launch.run_one import run as run_spec

    spec = RunSpec.from_config(config)
    store = Store(Path(config["paths"]["results"]) / "runs")
    logger = instantiate(config["logger"])
    record = run_spec(spec, store=store, logger=logger, progress=RunProgress())
    print_lines([*summary(record), f"stored in {store.path(spec)}"])


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse flags that `run` does not have; Hydra's `--hydra-…` flags are among them."""
    for argument in arguments:
        if argument.startswith("-") and argument not in FLAGS:
            raise DllmBenchError(
                f"run has no flag {argument!r}; settings are written name=value, "
                "see `dllm-bench run --help`."
            )


def choices_lines() -> Iterator[str]:
    """One line per configuration group."""
    for group in GROUPS:
        yield f"  {group + '=':17}{' · '.join(options(group))}"
