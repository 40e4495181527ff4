"""`dllm-bench export` and `report`: write runs for other programs, a decoder for `custom_generate`,
or a static site of tables, figures and runs that needs no server.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from dllm_bench.cli.common import compose, configured_paths, open_store, print_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import console
from dllm_bench.registry import require_known
from dllm_bench.store.files import explain_write_errors, is_folder, make_folder, results_directory

CUSTOM_GENERATE = "custom-generate"
FORMS = ("parquet", "csv", "hf-dataset", "lm-eval", "aup", "hub", "eee")
"""Formats for runs, listed here because the modules that write them import torch."""


def export(arguments: Namespace) -> int:
    """Write runs in one of the forms, or a decoder, and list the files."""
    kind, *rest = arguments.words
    if kind == CUSTOM_GENERATE:
        return export_decoder(rest, Path(arguments.to))
    require_known("form", arguments.to, FORMS)
    if arguments.to == "eee" and not arguments.organization:
        raise DllmBenchError(
            "--to eee needs the name of who ran the evaluation; add --organization NAME, and "
            "--relationship if it is not a third party."
        )
    store, out = open_store(arguments), arguments.out or Path("export")
    entries = [store.find(name) for name in arguments.words]
    # torch takes seconds to import: only after the names were checked
    from dllm_bench.api.exports import EXPORTS, Export
    from dllm_bench.site.texts import TextSource

    publisher = (arguments.organization, arguments.relationship, arguments.dataset, arguments.task)
    with explain_write_errors(out):
        make_folder(out)
        return listed(EXPORTS[arguments.to](Export(entries, TextSource(compose), out, *publisher)))


def export_decoder(words: list[str], folder: Path) -> int:
    """Write a folder that transformers can load a decoder from, and list its files."""
    if not words:
        raise DllmBenchError(f"export {CUSTOM_GENERATE} needs a decoder: a name of conf/decoder.")
    from dllm_bench.api.compose import compose_decoder

    name, *settings = words
    compose_decoder(name, settings)
    # torch takes seconds to import: only after the names were checked
    from dllm_bench.api import custom_generate
    from dllm_bench.api.generation import composed_decoder

    decoder = composed_decoder(name, settings)
    with explain_write_errors(folder):
        written = custom_generate.export(name, decoder, folder)
    return listed(written)


def listed(paths: Iterable[Path | str]) -> int:
    """Print what was written."""
    return print_lines([f"written: {path}" for path in paths])


def build_report(arguments: Namespace) -> int:
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
