"""`dllm-bench doctor`: what this machine can run, what is missing, and whether a model works."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.cli.common import add_results_option, compose, configured_paths
from dllm_bench.cli.doctor_machine import REQUIRED_MISSING, machine_lines


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `doctor`."""
    add_results_option(parser)
    parser.add_argument("model", nargs="?", help="check this model's weights too")


def run(arguments: Namespace) -> int:
    """Print the report; 1 if something required is missing."""
    config = compose([f"model={arguments.model}"] if arguments.model else [])
    report = list(machine_lines(configured_paths(arguments)))
    if arguments.model:
        # needs torch, and the report above must work where torch is missing
        from dllm_bench.cli.doctor_model import model_lines

        report += model_lines(config)
    for mark, topic, text in report:
        print(f"{mark}  {topic:24}{text}")
    return 1 if any(mark == REQUIRED_MISSING for mark, _, _ in report) else 0
