"""Options of `dllm-bench report`, and the call they ask for.

Light to import: the parser is made for every command.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.tables.options import EMBEDDED

if TYPE_CHECKING:
    from dllm_bench.store.store import Store

TEXT = "a static site of tables, figures and runs, with a trace viewer; needs no server"
Compose = Callable[[Sequence[str]], Mapping[str, Any]]


def add_to(parser: ArgumentParser) -> None:
    """Give the parser its options."""
    parser.add_argument("--profile", default=EMBEDDED, help="embedded (default) or paper")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RESULTS/site")
    parser.add_argument(
        "--runs", nargs="+", metavar="HASH", default=(), help="pages for these runs only"
    )


def make(args: Namespace, compose: Compose, store: Store) -> Iterator[str]:
    """Make the site; sentences of what was made."""
    from dllm_bench.site.site import Site

    for prefix in args.runs:
        store.find(prefix)  # a hash that names no run, or several, is a mistake
    out = args.out or store.root.parent / "site"
    if out.exists() and not out.is_dir():
        raise DllmBenchError(
            f"The report was to be written to {out}, which is a file; name a directory."
        )
    site = Site(store, out, args.profile, compose, track, tuple(args.runs))
    yield from site.make()


def track(items: Sequence[Any], what: str) -> Iterator[Any]:
    """The items one by one, with a bar and the time left."""
    from rich.console import Console
    from rich.progress import track as bar

    yield from bar(items, what, console=Console(stderr=True), transient=True)
