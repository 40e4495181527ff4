"""`dllm-bench export` and `report`: write runs for other programs, a decoder for `custom_generate`,
or a static site of tables, figures and runs that needs no server.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from dllm_bench.cli import common
from dllm_bench.cli.common import Command, compose, open_store, print_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import console
from dllm_bench.registry import require_known
from dllm_bench.store.files import explain_write_errors, is_folder, make_folder, results_directory

CUSTOM_GENERATE = "custom-generate"
MOST_PAGES = 200  # number of runs with a page in the report, by default
FORMS = ("parquet", "csv", "hf-dataset", "lm-eval", "aup", "hub", "eee")
"""Formats for runs, listed here because the modules that write them import torch."""
RELATIONSHIPS = ("third_party", "first_party", "collaborative", "other")
"""Every Eval Ever's words for the relation of an evaluator to a model's developer; the first is the
default."""


def add_export_arguments(parser: ArgumentParser) -> None:
    """Add the options of `export`."""
    common.add_results_option(parser)
    text = f"hashes of runs; or {CUSTOM_GENERATE} DECODER NAME=VALUE …, settings as in `run`"
    parser.add_argument("words", nargs="+", metavar="RUN", help=text)
    text = "parquet, csv, hf-dataset, lm-eval, aup, eee or hub; for a decoder the folder to write"
    parser.add_argument("--to", required=True, metavar="FORM", help=text)
    common.add_out_option(parser, "for runs; default: ./export")
    text = "the benchmark's name on the hub, for hub and eee"
    parser.add_argument("--dataset", metavar="OWNER/NAME", help=text)
    parser.add_argument("--task", metavar="ID", help="the benchmark's task on the hub, for hub")
    text = "who ran the evaluation, for eee"
    parser.add_argument("--organization", metavar="NAME", help=text)
    text = "of the organization to the model's developer, for eee; default: third_party"
    parser.add_argument(
        "--relationship", choices=RELATIONSHIPS, default=RELATIONSHIPS[0], help=text
    )


def export(arguments: Namespace) -> int:
    """Write the files and list them."""
    kind, *rest = arguments.words
    if kind == CUSTOM_GENERATE:
        return export_decoder(rest, Path(arguments.to))
    return export_runs(arguments)


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


def export_runs(arguments: Namespace) -> int:
    """Write runs in one of the forms."""
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


def listed(paths: Iterable[Path | str]) -> int:
    """Print what was written."""
    return print_lines([f"written: {path}" for path in paths])


def add_report_arguments(parser: ArgumentParser) -> None:
    """Add the options of `report`."""
    common.add_results_option(parser)
    common.add_profile_option(parser)
    common.add_out_option(parser, "default: RESULTS/site; ./results/site of an archive")
    text = "make pages for these runs only"
    parser.add_argument("--runs", nargs="+", metavar="HASH", default=(), help=text)
    text = f"make pages for the N runs sealed last (default {MOST_PAGES})"
    number = partial(parser.add_argument, type=common.positive_int, metavar="N")
    number("--pages", default=MOST_PAGES, help=text)
    text = "also include tables and claims without any stored run, which takes minutes"
    parser.add_argument("--tables", action="store_true", help=text)


def build_report(arguments: Namespace) -> int:
    """Build the site and print what was built."""
    store = open_store(arguments)
    for prefix in arguments.runs:
        store.find(prefix)  # raises if the hash names no run, or several
    # an archive of runs is read-only: nothing is written next to it
    own = store.root.parent if is_folder(store.root) else None
    results = own or common.configured_paths(Namespace(results=None)).results
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


KINDS = {
    "export": Command(add_export_arguments, export),
    "report": Command(add_report_arguments, build_report),
}
