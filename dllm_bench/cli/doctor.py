"""`dllm-bench doctor`: what this machine can run, what is missing, and whether a model works."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from dllm_bench.cli.common import add_results_option, as_model, compose, configured_paths
from dllm_bench.cli.doctor_machine import REQUIRED_MISSING, Line, machine_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import show


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `doctor`."""
    add_results_option(parser)
    parser.add_argument(
        "model", nargs="?", help="check this model's weights too: a name, a folder, a hub id"
    )
    text = "of the model, as in `run`: model.mask_token=TEXT"
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help=text)
    text = "compare a CUDA device with the CPU instead, up to ten minutes"
    parser.add_argument("--gpu", action="store_true", help=text)
    text = "with --gpu: let the CPU take the device's place"
    parser.add_argument("--fake", action="store_true", help=text)
    parser.add_argument("--quick", action="store_true", help="with --gpu: up to two minutes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --gpu: a report in JSON")


def run(arguments: Namespace) -> int:
    """Print the report; 1 if something required is missing or a check of --gpu failed."""
    failed = False
    for mark, topic, text in gpu_lines(arguments) if arguments.gpu else all_lines(arguments):
        show(f"{mark}  {topic:24}{text}")
        failed = failed or mark == REQUIRED_MISSING
    return 1 if failed else 0


def all_lines(arguments: Namespace) -> list[Line]:
    """The report on this machine, and on a model if one is named."""
    if arguments.fake or arguments.quick or arguments.out:
        raise DllmBenchError(
            "doctor was given --fake, --quick or --out without --gpu, which they belong to; add it."
        )
    named = [as_model(arguments.model)] if arguments.model else []
    config = compose([*named, *arguments.settings])
    if named:
        from dllm_bench.api.preflight import check_folder

        check_folder(config.model)  # at once: what follows imports torch
    report = list(machine_lines(configured_paths(arguments)))
    if named:
        # needs torch, and the report above must work where torch is missing
        from dllm_bench.cli.doctor_model import model_lines

        report += model_lines(config)
    return report


def gpu_lines(arguments: Namespace) -> Iterator[Line]:
    """The checks of a CUDA device."""
    from dllm_bench.cli import doctor_gpu  # imports torch

    if arguments.model:
        raise DllmBenchError(
            f"doctor --gpu was given the model {arguments.model!r}, and it checks embedded models; "
            "check the model in a command of its own."
        )
    return doctor_gpu.gpu_lines(arguments.fake, arguments.quick, arguments.out)
