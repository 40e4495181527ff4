"""`dllm-bench compare`: two sealed runs, pairwise on the samples both have."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from dllm_bench.cli.common import (
    add_results_option,
    align,
    open_store,
    print_lines,
    sealed_record,
)
from dllm_bench.metrics import accuracy
from dllm_bench.site.format import number, percent
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import SHOWN


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `compare`."""
    add_results_option(parser)
    parser.add_argument("a", help="hash of a run")
    parser.add_argument("b", help="hash of another run")


def run(arguments: Namespace) -> int:
    """Print the comparison of two runs."""
    store = open_store(arguments)
    first, second = (sealed_record(store.find(name)) for name in (arguments.a, arguments.b))
    return print_lines(comparison_lines(first, second))


def comparison_lines(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """The score difference on shared samples with its test, then all metrics of both runs."""
    result = accuracy.compare(first.values, second.values)
    verdict = "the runs differ" if result.differs else "no difference is shown"
    p_value = "" if result.p_value is None else f", p = {result.p_value:.3g}"
    difference, low, high = (
        f"{100 * x:+.1f}" for x in (result.difference, result.low, result.high)
    )
    yield f"score {percent(first.score)} and {percent(second.score)} %"
    yield (
        f"difference {difference} [{low}, {high}] points on {result.n} shared samples "
        f"({result.method}{p_value}): {verdict}"
    )
    rows = [("metric", first.identity_hash[:SHOWN], second.identity_hash[:SHOWN], "ratio")]
    for name, value in first.summary.items():
        other = second.summary.get(name)
        if value is None and other is None:
            continue
        ratio = value / other if value is not None and other else None
        rows.append((name, number(value, 3), number(other, 3), number(ratio)))
    yield from align(rows)
