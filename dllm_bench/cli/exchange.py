"""`dllm-bench prefetch`, `import`, `export` and `lm-eval`: models from elsewhere, runs and decoders
for other programs.

Models are downloaded for machines without network, downloads are verified, and GGUF files become
checkpoint folders. Runs are written in forms that other programs read, a decoder for transformers'
`custom_generate`. lm-eval's own command line runs with this project's models and decoders.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dllm_bench.cli.common import as_model, compose, open_store, print_lines, print_written
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import show
from dllm_bench.paths import IMPORTED, expanded, hub_cache, place_of
from dllm_bench.registry import require_known
from dllm_bench.store.files import explain_write_errors, make_folder
from dllm_bench.store.inputs import decoder_of, model_spec

CUSTOM_GENERATE = "custom-generate"
FORMS = ("parquet", "csv", "hf-dataset", "lm-eval", "aup", "hub", "eee")
"""Formats for runs, each written by a function of `api.exports`, which imports Hydra."""


# --- models ---------------------------------------------------------------------------------------


def prefetch_models(arguments: Namespace) -> int:
    """Download or verify; with --verify, 1 if a model or a file is missing or damaged."""
    specs = [model_spec(compose([as_model(name)])["model"]) for name in arguments.models]
    from dllm_bench.models.sources import MANIFEST, prefetch, verify_manifest

    cache = (arguments.to or hub_cache()).expanduser().absolute()
    if arguments.verify:
        checked = list(verify_manifest(cache, specs))
        print_lines(f"{'no' if bad else 'ok'}  {one}  {'; '.join(bad)}" for one, bad in checked)
        return int(any(problems for _, problems in checked))
    if not arguments.models:
        raise DllmBenchError("prefetch needs the names of models, as in model=NAME, or --verify.")
    for source, folder in prefetch(specs, cache):
        show(f"{source}: {folder or 'not on the hub, nothing to fetch'}")
    if (manifest := cache / MANIFEST).is_file():
        show(f"manifest: {manifest}; copy it together with its folder")
    return 0


def import_file(arguments: Namespace) -> int:
    """Write the folder and say how to use it."""
    file = expanded(arguments.file)
    if find_spec("gguf") is None:
        raise DllmBenchError(
            "Reading a GGUF file needs the package gguf, which is not installed; install it: "
            "pip install 'dllm-bench[real]'"
        )
    source = arguments.to or f"{IMPORTED}{file.stem}"
    folder = place_of(source)
    with explain_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        from dllm_bench.models.gguf_import import import_gguf  # torch takes seconds to import

        import_gguf(Path(file), folder)
    question = f'dllm-bench generate {source} ar --chat "What is a prime number?"'
    return print_written(folder, question)


# --- export ---------------------------------------------------------------------------------------


def export(arguments: Namespace) -> int:
    """Write runs in one of the forms, or a decoder, and list the files."""
    kind, *rest = arguments.words
    if kind == CUSTOM_GENERATE:
        for option in ("out", "dataset", "task", "organization"):
            if getattr(arguments, option):
                raise DllmBenchError(f"--{option} is for runs; leave it out: --to is the folder.")
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
    from dllm_bench.api import exports
    from dllm_bench.site.texts import TextSource

    publisher = (arguments.organization, arguments.relationship, arguments.dataset, arguments.task)
    with explain_write_errors(out):
        make_folder(out)
        chosen = exports.Export(entries, TextSource(compose), out, *publisher)
        paths = getattr(exports, f"to_{arguments.to.replace('-', '_')}")(chosen)
        return print_lines(f"written: {path}" for path in paths)


def export_decoder(words: list[str], folder: Path) -> int:
    """Write a folder that transformers can load a decoder from, and list its files."""
    if not words:
        raise DllmBenchError(f"export {CUSTOM_GENERATE} needs a decoder: a name of conf/decoder.")
    from dllm_bench.api.compose import compose_decoder

    plain = compose_decoder(words[0], words[1:])
    # torch takes seconds to import: only after the names were checked
    from dllm_bench.api import custom_generate

    with explain_write_errors(folder):
        paths = custom_generate.export(words[0], decoder_of(plain), folder)
        return print_lines(f"written: {path}" for path in paths)


# --- lm-eval --------------------------------------------------------------------------------------


def run_lm_eval(arguments: Sequence[str]) -> int:
    """Check the names of this project in the arguments, then pass all arguments to lm-eval. Exits
    on --help and on mistakes."""
    # importing lm-eval takes a second, importing its arguments alone less
    from lm_eval._cli import HarnessCLI

    sys.argv = ["dllm-bench lm-eval", *arguments]
    parsed = HarnessCLI().parse_args()
    if getattr(parsed, "model", None) == "dllm_bench":
        compose([f"{name}={value}" for name, value in (parsed.model_args or {}).items()])
    from dllm_bench.api.lm_eval_model import execute

    execute(parsed)
    return 0
