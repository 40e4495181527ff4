"""How often the interval of a measured speed covers a second measurement, on this machine.

    .venv/bin/python -m scripts.perf.coverage [--cells 40] [--items 12] [--passes 5] [--dry]

Cells are decoders and embedded models on two tasks. All are measured once, then all again, as
`dllm-bench table --run` measures: one run at a time, runs of a model and task taking turns pass by
pass. Printed are both numbers of each cell with the first one's interval, the highest load of both,
and in how many cells the interval of one measurement covers the other number; once more for the
first pass alone, whose interval has items only. Interrupted runs go on where they stopped; the
machine should do nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

from dllm_bench.api.compose import compose
from dllm_bench.benchmarks.items import repetition_of
from dllm_bench.launch.local import run_all
from dllm_bench.site.texts import align
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store
from dllm_bench.tables.derive import measure_run
from dllm_bench.tables.frame import is_loaded

TASKS = ("minigsm", "minicode")
MODELS = ("tiny-llada", "tiny-llada-moe")
DECODERS = (
    "fast_dllm",
    "fast_dllm_dual",
    "fast_dllm_prefix",
    "credit",
    "klass",
    "eb_sampler",
    "local_leap",
    "dkv_cache",
    "dus",
    "vanilla",
)
SETTINGS = ("benchmark.max_new_tokens=64", "benchmark.allow_code_execution=true", "hardware=cpu")
METRICS = ("tps/e2e", "latency/mean")
Pair = tuple[RunRecord, RunRecord]


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    whole = __doc__ or ""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.perf.coverage", description=whole.partition("\n")[0]
    )
    parser.add_argument("--cells", type=int, default=40, help="how many cells (default: 40)")
    parser.add_argument("--items", type=int, default=12, help="items of a run (default: 12)")
    parser.add_argument("--passes", type=int, default=5, help="passes of a run (default: 5)")
    parser.add_argument("--dry", action="store_true", help="2 cells, 2 items, 2 passes, not kept")
    text = "folder of the runs (default: results/coverage)"
    parser.add_argument("--out", type=Path, default=Path("results/coverage"), help=text)
    args = parser.parse_args(argv)
    if args.dry:
        args.cells, args.items, args.passes = 2, 2, 2
    return args


def specs(args: argparse.Namespace) -> list[RunSpec]:
    """Return the runs of the first `cells` combinations, all tasks and models of a decoder in a
    row."""
    size = (f"limit={args.items}", f"benchmark.repeats={args.passes}")
    cells = islice(product(DECODERS, MODELS, TASKS), args.cells)
    named = ((f"decoder={d}", f"model={m}", f"benchmark={t}") for d, m, t in cells)
    return [RunSpec.from_config(compose([*cell, *SETTINGS, *size])) for cell in named]


def measured(runs: Sequence[RunSpec], out: Path) -> list[Pair]:
    """Return both records of each run; the second measurements begin when all first ones are
    done."""
    stores = [Store(out / name / "runs") for name in ("first", "second")]
    for store in stores:
        for outcome in run_all(runs, store=store):
            if outcome.error:
                raise SystemExit(f"{outcome.spec.folder}: {outcome.error}")
    pairs = [tuple(store.record(spec) for store in stores) for spec in runs]
    return [(first, second) for first, second in pairs if first and second]


def first_pass(record: RunRecord) -> RunRecord:
    """Return the record as if every item had been decoded once."""
    places = [i for i, key in enumerate(record.columns["id"]) if repetition_of(key) == 0]
    columns = {name: [column[i] for i in places] for name, column in record.columns.items()}
    return replace(record, columns=columns)


def covers(metric: str, one: RunRecord, other: RunRecord) -> bool:
    """Return whether the interval of a metric of one run holds the other's number."""
    (low, high), number = measure_run(metric, one)[1] or (0, 0), measure_run(metric, other)[0]
    return number is not None and low <= number <= high


def load(record: RunRecord) -> float:
    """Return the highest load that a pass began at."""
    return max(float(one["load"]) for one in record.environments)


def row(pair: Pair) -> tuple[str, ...]:
    """Return a cell as printed."""
    spec, (first, second) = pair[0].spec, pair
    (value, ends), again = measure_run(METRICS[0], first), measure_run(METRICS[0], second)[0]
    interval = f"[{ends[0]:.1f}, {ends[1]:.1f}]" if ends else "none"
    busy = any(map(is_loaded, (*first.environments, *second.environments)))
    return (
        f"{spec.label} {spec.model.name} {spec.benchmark.name}",
        f"{value:.1f}",
        interval,
        f"{again:.1f}",
        f"{max(map(load, pair)):.2f}{' busy' if busy else ''}",
        "yes" if covers(METRICS[0], *pair) else "no",
    )


def lines(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the cells, then the counts."""
    heads = ("cell", METRICS[0], "interval", "again", "load", "covered")
    yield from align([heads, *map(row, pairs)])
    for metric in METRICS:
        for text, kept in (("all passes", lambda one: one), ("the first pass", first_pass)):
            both = [(kept(first), kept(second)) for first, second in pairs]
            ways = [sum(covers(metric, *pair[::way]) for pair in both) for way in (1, -1)]
            yield (
                f"{metric}, {text}: {ways[0]} of {len(both)} first intervals cover the second "
                f"number, {ways[1]} second ones the first"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = options(argv)
    with tempfile.TemporaryDirectory() as scratch:
        pairs = measured(specs(args), Path(scratch) if args.dry else args.out)
    print("\n".join(lines(pairs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
