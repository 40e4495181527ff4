"""`dllm-bench runs verify`: read every file of every run and name what is damaged."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.cli.common import add_results_option, open_store, print_failures, print_lines
from dllm_bench.store.verify import verify


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `runs verify`."""
    add_results_option(parser)


def run(arguments: Namespace) -> int:
    """Print how many runs are whole; 1 if any is damaged."""
    store = open_store(arguments)
    runs = [verified for folder in store.folders() if (verified := verify(folder))]
    damaged = [verified for verified in runs if verified.damages]
    print_lines([f"{len(runs)} runs below {store.root}: {len(runs) - len(damaged)} whole"])
    return print_failures([sentence for verified in damaged for sentence in verified.damages])
