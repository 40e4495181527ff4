"""`dllm-bench runs unlock`: free the folder of a run whose process is gone."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.cli.common import add_results_option, open_store, print_lines
from dllm_bench.store.lock import unlock
from dllm_bench.store.store import LOCK


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `runs unlock`."""
    add_results_option(parser)
    parser.add_argument("run", help="hash of a run, or its beginning (see status)")


def run(arguments: Namespace) -> int:
    """Free the run's folder; refused if the process that has it is alive on this machine."""
    folder = open_store(arguments).folder_of(arguments.run)
    owner = unlock(folder / LOCK)
    return print_lines(
        [f"{folder} is free; it was held by {owner}, which stops writing if it is still alive."]
    )
