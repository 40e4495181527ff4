"""`dllm-bench export`: export runs for other programs, or a decoder for `custom_generate`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

from dllm_bench.cli.common import (
    add_out_option,
    add_results_option,
    compose,
    open_store,
    print_lines,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import require_known
from dllm_bench.store.files import explain_write_errors, make_folder

CUSTOM_GENERATE = "custom-generate"
FORMS = ("parquet", "csv", "hf-dataset", "lm-eval", "aup", "hub", "eee")
"""Formats for runs, listed here because the modules that write them import torch."""
RELATIONSHIPS = ("third_party", "first_party", "collaborative", "other")
"""Every Eval Ever's words for the relation of an evaluator to a model's developer; the first is the
default."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `export`."""
    add_results_option(parser)
    text = f"hashes of runs; or {CUSTOM_GENERATE} DECODER NAME=VALUE …, settings as in `run`"
    parser.add_argument("words", nargs="+", metavar="RUN", help=text)
    text = "parquet, csv, hf-dataset, lm-eval, aup, eee or hub; for a decoder the folder to write"
    parser.add_argument("--to", required=True, metavar="FORM", help=text)
    add_out_option(parser, "for runs; default: ./export")
    text = "the benchmark's name on the hub, for hub and eee"
    parser.add_argument("--dataset", metavar="OWNER/NAME", help=text)
    parser.add_argument("--task", metavar="ID", help="the benchmark's task on the hub, for hub")
    text = "who ran the evaluation, for eee"
    parser.add_argument("--organization", metavar="NAME", help=text)
    text = "of the organization to the model's developer, for eee; default: third_party"
    parser.add_argument(
        "--relationship", choices=RELATIONSHIPS, default=RELATIONSHIPS[0], help=text
    )


def run(arguments: Namespace) -> int:
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
    from dllm_bench.api.custom_generate import export
    from dllm_bench.api.generation import composed_decoder

    decoder = composed_decoder(name, settings)
    with explain_write_errors(folder):
        written = export(name, decoder, folder)
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
    from dllm_bench.api.every_eval_ever import FORM, Publisher, to_eee
    from dllm_bench.api.exports import EXPORTS, HUB, to_hub
    from dllm_bench.site.texts import TextSource

    texts = TextSource(compose)
    publisher = (arguments.organization, arguments.relationship, arguments.dataset)
    with explain_write_errors(out):
        make_folder(out)
        if arguments.to == HUB:
            return listed(to_hub(entries, out, arguments.dataset, arguments.task))
        if arguments.to == FORM:
            return listed(to_eee(entries, texts, out, Publisher(*publisher)))
        return listed(EXPORTS[arguments.to](entries, texts, out))


def listed(paths: Iterable[Path | str]) -> int:
    """Print what was written."""
    return print_lines([f"written: {path}" for path in paths])
