"""`dllm-bench rescore`: grade the stored texts of a run again; the record is not changed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dllm_bench.cli.common import add_results_option, compose, open_store, print_lines
from dllm_bench.runs import rescore
from dllm_bench.store.files import write_atomic


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `rescore`."""
    add_results_option(parser)
    parser.add_argument("run", help="hash of a run, or its beginning (see status)")
    parser.add_argument(
        "settings", nargs="*", metavar="NAME=VALUE", help="grade with these; nothing is saved"
    )
    parser.add_argument("--evalplus", type=Path, metavar="FILE", help="write EvalPlus's samples")


def run(arguments: Namespace) -> int:
    """Print the new scores, or write the texts in EvalPlus's format."""
    entry = open_store(arguments).find(arguments.run)
    settings = rescore.settings(entry, rescore.changes(arguments.settings), compose)
    if arguments.evalplus:
        content = "".join(rescore.evalplus_lines(entry, settings))
        write_atomic(arguments.evalplus, content)
        limit = entry.spec.limit
        print_lines([f"written: {arguments.evalplus}"])
        if limit is None:
            return 0
        return print_lines(
            [
                f"The run has the first {limit} items (limit={limit}), and evalplus.evaluate wants "
                "a line for every problem; decode all of them with limit=null."
            ]
        )
    return print_lines(rescore.report(rescore.rescore(entry, settings)))
