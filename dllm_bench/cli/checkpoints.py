"""`dllm-bench prefetch` and `import`: download models for machines without network, or verify a
download; turn a GGUF file into a checkpoint folder.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from dllm_bench.cli.common import as_model, compose, print_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import show
from dllm_bench.paths import IMPORTED, expanded, place_of
from dllm_bench.store.inputs import model_spec


def prefetch_models(arguments: Namespace) -> int:
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


def import_file(arguments: Namespace) -> int:
    """Write the folder and say how to use it."""
    file = expanded(arguments.file)
    if find_spec("gguf") is None:
        raise DllmBenchError(
            "Reading a GGUF file needs the package gguf, which is not installed; install it: "
            "pip install 'dllm-bench[real]'"
        )
    source = arguments.to or f"{IMPORTED}{file.stem}"
    from dllm_bench.models.gguf_import import import_gguf  # torch takes seconds to import

    import_gguf(Path(file), place_of(source))
    return print_lines(
        [
            f"written: {place_of(source)}",
            f'use it: dllm-bench generate {source} ar --chat "What is a prime number?"',
        ]
    )
