"""`dllm-bench prefetch`: download models for machines without network, or verify a download."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dllm_bench.cli.common import add_results_option, as_model, compose, print_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import show
from dllm_bench.store.inputs import model_spec


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `prefetch`."""
    add_results_option(parser)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="as in model=MODEL")
    parser.add_argument("--to", type=Path, metavar="DIR", help="default: the hub's cache")
    parser.add_argument(
        "--verify", action="store_true", help="check the files that are there, without network"
    )


def run(arguments: Namespace) -> int:
    """Download or verify; with --verify, 1 if a file is missing or damaged."""
    named = [compose([as_model(name)])["model"] for name in arguments.models]
    from dllm_bench.models.sources import MANIFEST, hub_cache, prefetch, verify_manifest

    cache = (arguments.to or hub_cache()).expanduser().absolute()
    if arguments.verify:
        results = list(verify_manifest(cache))
        print_lines(
            f"{'no' if bad else 'ok'}  {source}  {'; '.join(bad)}" for source, bad in results
        )
        return 1 if any(problems for _, problems in results) else 0
    if not arguments.models:
        raise DllmBenchError("prefetch needs the names of models, as in model=NAME, or --verify.")
    specs = [model_spec(model) for model in named]
    for source, folder in prefetch(specs, cache):
        show(f"{source}: {folder or 'not on the hub, nothing to fetch'}")
    manifest = cache / MANIFEST
    line = f"manifest: {manifest}; copy it together with its folder"
    return print_lines([line] if manifest.is_file() else [])
