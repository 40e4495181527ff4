"""`dllm-bench runs rm`: remove runs from the results directory for good."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.cli.common import add_results_option, open_store, print_lines
from dllm_bench.store.store import remove


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `runs rm`."""
    add_results_option(parser)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="hashes, or their beginnings")


def run(arguments: Namespace) -> int:
    """Remove the folders of the runs; refused, for all, if a hash is unknown or a run is going on.

    Folders of a benchmark or model stay, also where they are empty now.
    """
    store = open_store(arguments)
    folders = [store.folder_of(name) for name in arguments.runs]
    remove(folders)
    return print_lines(f"removed: {folder}" for folder in folders)
