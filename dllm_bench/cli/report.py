"""`dllm-bench report`: build a static site of tables, figures and runs that needs no server."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from rich.progress import track

from dllm_bench.cli.common import (
    add_out_option,
    add_profile_option,
    add_results_option,
    compose,
    configured_paths,
    open_store,
    positive_int,
    print_lines,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import console
from dllm_bench.store.files import is_folder, results_directory

MOST_PAGES = 200  # number of runs with a page, by default


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `report`."""
    add_results_option(parser)
    add_profile_option(parser)
    add_out_option(parser, "default: RESULTS/site; ./results/site of an archive")
    parser.add_argument(
        "--runs", nargs="+", metavar="HASH", default=(), help="make pages for these runs only"
    )
    parser.add_argument(
        "--pages",
        type=positive_int,
        default=MOST_PAGES,
        metavar="N",
        help=f"make pages for the N runs sealed last (default {MOST_PAGES})",
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="also include tables and claims without any stored run, which takes minutes",
    )


def run(arguments: Namespace) -> int:
    """Build the site and print what was built."""
    store = open_store(arguments)
    for prefix in arguments.runs:
        store.find(prefix)  # raises if the hash names no run, or several
    # an archive of runs is read-only: nothing is written next to it
    own = store.root.parent if is_folder(store.root) else None
    results = own or configured_paths(Namespace(results=None)).results
    out = arguments.out or results_directory(str(results)) / "site"
    if out.exists() and not out.is_dir():
        raise DllmBenchError(
            f"The report was to be written to {out}, which is a file; name a directory."
        )
    from dllm_bench.site.build import SiteBuilder  # takes half a second to import

    builder = SiteBuilder(
        store=store,
        out=out,
        profile=arguments.profile,
        compose=compose,
        track=with_progress,
        only=tuple(arguments.runs),
        most_pages=arguments.pages,
        all_tables=arguments.tables,
    )
    return print_lines(builder.build())


def with_progress(items: Sequence[Any], what: str) -> Iterator[Any]:
    """Yield the items one by one, with a progress bar on stderr."""
    yield from track(items, what, console=console(stderr=True), transient=True)
