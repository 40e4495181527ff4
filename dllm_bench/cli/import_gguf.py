"""`dllm-bench import gguf`: turn a GGUF file into a checkpoint folder."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

from dllm_bench.cli.common import Command, print_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import IMPORTED, expanded, place_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `import gguf`."""
    parser.add_argument("file", metavar="FILE", help="a .gguf file, quantised or not")
    parser.add_argument(
        "--to", metavar="DIR", help=f"new folder (default: {IMPORTED}NAME, in your cache folder)"
    )


def run(arguments: Namespace) -> int:
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


KINDS = {"gguf": Command(add_arguments, run)}
