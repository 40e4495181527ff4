"""`dllm-bench status`: the runs in the results directory, then its tables, SLURM jobs and figures.

Numbers come from the records by the name of their metric; nothing is computed again.
"""

from __future__ import annotations

import csv
import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dllm_bench.cli.common import add_results_option, align, open_store, print_lines
from dllm_bench.cli.status_cache import cached_rows
from dllm_bench.launch import slurm
from dllm_bench.site.format import LISTED_METRICS, number, percent
from dllm_bench.store.store import RunEntry, RunState, Store, read_record

COLUMNS = ("run", "state", "done", "benchmark", "model", "decoder", "score", "tpf", "tps")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `status`."""
    add_results_option(parser)


def run(arguments: Namespace) -> int:
    """Print the status of everything below the results directory."""
    store = open_store(arguments)
    results = store.root.parent
    print_lines(run_lines(store))
    print_lines(table_lines(results / "tables"))
    print_lines(slurm.job_lines(store))
    return print_lines(figure_lines(results / "figures"))


def run_lines(store: Store) -> Iterator[str]:
    """All runs of the store as an aligned list."""
    rows = cached_rows(store, COLUMNS, status_row)
    if rows:
        yield from align([COLUMNS, *rows])
        yield f"tpf = {LISTED_METRICS[0]}, tps = {LISTED_METRICS[1]}, score in percent"
    else:
        yield f"No runs below {store.root} yet; start one with `dllm-bench run`."


def status_row(entry: RunEntry) -> tuple[str, ...]:
    """The row of one run; a run that is not sealed has no numbers."""
    record = read_record(entry.path) if entry.state is RunState.SEALED else None
    summary = record.summary if record else {}
    spec = entry.spec
    return (
        spec.short,
        entry.state.value,
        f"{entry.done}/{entry.total if entry.total is not None else '?'}",
        str(spec.benchmark["name"]),
        str(spec.model["name"]),
        spec.label,
        percent(record.score if record else None),
        *(number(summary.get(name)) for name in LISTED_METRICS),
    )


def table_lines(tables: Path) -> Iterator[str]:
    """A line per rendered table: how many of its cells are in which state."""
    for path in sorted(tables.glob("*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        try:
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            states = [cell["state"] for cell in cells]
        except (ValueError, LookupError, TypeError):
            yield f"table {name}: {path} cannot be read; `dllm-bench table {name}` writes it again"
            continue
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        yield f"table {name}: {len(states)} cells, {counts}"


def figure_lines(figures: Path) -> Iterator[str]:
    """A line per drawn figure and profile: how many of its points have a number."""
    for path in sorted(figures.glob("*/*/*.csv")):
        name = path.relative_to(figures).with_suffix("").as_posix()
        try:
            with path.open(encoding="utf-8", newline="") as file:
                ours = [row for row in csv.DictReader(file) if row["kind"] == "measured"]
            states = Counter("measured" if row["y"] else row["state"] for row in ours)
        except (ValueError, LookupError, csv.Error):
            again = f"dllm-bench figure {path.parent.name}/{path.stem}"
            yield f"figure {name}: {path} cannot be read; `{again}` draws it again"
            continue
        counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
        yield f"figure {name}: {len(ours)} points, {counts}"
