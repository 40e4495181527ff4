"""`dllm-bench figure`: figures of the papers, drawn from stored runs; missing ones can be run."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

from dllm_bench.cli.common import open_store, print_failures, print_lines
from dllm_bench.cli.table import add_options, command_lines, plan_and_fill
from dllm_bench.figures.spec import PaperFigure, load_figure
from dllm_bench.store.files import explain_write_errors
from dllm_bench.store.store import Store, remove
from dllm_bench.tables.load import matching_names
from dllm_bench.tables.plan import PlannedCell


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `figure`."""
    add_options(parser, "figure")


def run(arguments: Namespace) -> int:
    """Run what is missing if asked to, draw, print what is still missing. Written files with points
    that the new drawing would lose are kept.
    """
    store = open_store(arguments)
    figures = [load_figure(name) for name in matching_names("figure", arguments.figure)]
    # torch and matplotlib take seconds to import: only after the names were checked
    from dllm_bench.figures.points import build_figure, make_replays, missing_replays
    from dllm_bench.figures.write import headline, lines, why_kept, write

    tables = [figure.table for figure in figures]
    plans, failed = plan_and_fill(
        arguments, tables, store, partial(remove_without_samples, figures, store)
    )
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


def remove_without_samples(
    figures: Sequence[PaperFigure], store: Store, planned: Sequence[Sequence[PlannedCell]]
) -> int:
    """Remove the sealed runs whose samples the figures read and the store does not have, so that
    they are made again; gives their number.
    """
    from dllm_bench.figures.points import runs_without_samples

    folders = {
        store.root / run.folder: None
        for figure, cells in zip(figures, planned, strict=True)
        for run in runs_without_samples(figure, cells, store)
    }
    remove(list(folders))
    if folders:
        text = "sealed runs without samples, which the figure reads, are made again"
        print(f"{len(folders)} {text}", file=sys.stderr)
    return len(folders)
