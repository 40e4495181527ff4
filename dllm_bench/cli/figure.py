"""`dllm-bench figure`: draw figures of the papers from stored runs; `--run` makes missing runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.cli.common import open_store, print_failures, print_lines
from dllm_bench.cli.table import add_options, command_lines, plan_and_fill
from dllm_bench.figures.spec import load_figure
from dllm_bench.store.files import explain_write_errors
from dllm_bench.tables.load import matching_names


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `figure`."""
    add_options(parser, "figure")


def run(arguments: Namespace) -> int:
    """Make missing runs if requested, draw, and print what is still missing. A file is kept if the
    new drawing would lose some of its points.
    """
    store = open_store(arguments)
    figures = [load_figure(name) for name in matching_names("figure", arguments.figure)]
    # torch and matplotlib take seconds to import: only after the names were checked
    from dllm_bench.figures.points import build_figure, make_replays, missing_replays
    from dllm_bench.figures.write import headline, lines, why_kept, write

    tables = [figure.table for figure in figures]
    plans, failed = plan_and_fill(arguments, tables, store)
    if arguments.commands:
        return print_lines(command_lines(plans))
    folder = store.root.parent / "figures"
    for figure, (_, profile, planned) in zip(figures, plans, strict=True):
        missing = list(missing_replays(figure, planned, store))
        failed += make_replays(missing, store) if arguments.run else []
        built = build_figure(figure, profile, planned, store)
        kept = why_kept(built, folder)
        failed += [kept] if kept else []
        with explain_write_errors(folder):
            written = [] if kept else write(built, folder)
        print_lines(lines(built) if len(figures) == 1 else [headline(built)])
        print_lines(f"written: {path}" for path in written)
    return print_failures(failed)
