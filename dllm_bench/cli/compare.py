"""`dllm-bench compare`: sealed runs, pairwise on the samples they share."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.api.comparison import RunComparison, require_two, sealed_record
from dllm_bench.cli.common import add_results_option, open_store, print_lines


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `compare`."""
    add_results_option(parser)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="hashes of runs; each is compared with the first"
    )


def run(arguments: Namespace) -> int:
    """Print the comparison of two or more runs."""
    require_two(arguments.runs)
    store = open_store(arguments)
    found = tuple(sealed_record(store.find(name)) for name in arguments.runs)
    return print_lines(RunComparison(found).lines())
