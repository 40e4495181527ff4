"""`dllm-bench train temperatures`: fit the temperatures of a confidence head on stored runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dllm_bench.cli.common import (
    add_results_option,
    open_store,
    print_lines,
)
from dllm_bench.store.files import write_json


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `train temperatures`."""
    add_results_option(parser)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="hash of a run of a drafter with a confidence head"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: RESULTS/training/temperatures/…"
    )


def run(arguments: Namespace) -> int:
    """Fit, print and store the temperatures."""
    store = open_store(arguments)
    entries = [store.find(name) for name in arguments.runs]
    from dllm_bench.training import temperatures  # torch takes seconds to import

    fitted, spec = temperatures.fit(entries), entries[0].spec
    folder = store.root.parent / "training" / "temperatures"
    out = arguments.out or folder / f"{spec.model.name}-{spec.label}.json"
    write_json(out, fitted)
    print_lines(temperatures.lines(fitted))
    use = f"use it: decoder.length.temperatures.source={out}"
    return print_lines([f"written: {out}", use])
