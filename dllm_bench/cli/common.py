"""What the commands share: the results directory, checked option values, printed lines."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.files import check_results_directory
from dllm_bench.store.record import RunRecord
from dllm_bench.store.settings import default_paths
from dllm_bench.store.store import RunEntry, Store, read_record

Plain = dict[str, Any]


# --- options -------------------------------------------------------------------------------------


def add_results_option(parser: ArgumentParser) -> None:
    """Add `--results`, which nearly all commands have."""
    parser.add_argument("--results", metavar="DIR", help="results directory (default: ./results)")


def positive_int(text: str) -> int:
    """The whole number above zero that an option was given."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def positive_ints(text: str) -> tuple[int, ...]:
    """Whole numbers above zero, separated by commas."""
    return tuple(positive_int(part) for part in text.split(","))


def positive_float(text: str) -> float:
    """The number above zero that an option was given."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number above zero")
    return number


def positive_floats(text: str) -> tuple[float, ...]:
    """Numbers above zero, separated by commas."""
    return tuple(positive_float(part) for part in text.split(","))


# --- configuration and results -------------------------------------------------------------------


def compose(overrides: Sequence[str]) -> Plain:
    """The run configuration for `overrides`, see `cli.compose`."""
    # Hydra takes a quarter of a second to import, and most commands find all settings in a cache.
    from dllm_bench.cli.compose import compose as compose_with_hydra

    return compose_with_hydra(overrides)


def configured_paths(arguments: Namespace) -> Plain:
    """The `paths` group of the configuration; `--results` replaces its results directory."""
    paths = default_paths() or dict(compose([])["paths"])
    return {**paths, **({"results": arguments.results} if arguments.results else {})}


def training_folder(arguments: Namespace) -> Path:
    """Where the results of `train` go unless --out names another place."""
    return Path(configured_paths(arguments)["results"]) / "training"


def open_store(arguments: Namespace) -> Store:
    """The store in the results directory."""
    results = configured_paths(arguments)["results"]
    check_results_directory(results)
    return Store(Path(results) / "runs")


def sealed_record(entry: RunEntry) -> RunRecord:
    """The record of a run that must be complete."""
    record = read_record(entry.path)
    if record is None:
        raise DllmBenchError(
            f"Run {entry.spec.short} is {entry.state.value} ({entry.done} samples); complete it "
            "with the command that started it, then compare."
        )
    return record


# --- output --------------------------------------------------------------------------------------


def print_lines(lines: Iterable[str]) -> int:
    """Print lines to stdout; returns the exit code of success."""
    for line in lines:
        print(line)
    return 0


def print_failures(sentences: Sequence[str]) -> int:
    """Print what failed to stderr; returns 1 if anything did, else 0."""
    for sentence in sentences:
        print(f"dllm-bench: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
