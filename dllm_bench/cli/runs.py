"""`dllm-bench status`, `compare`, `rescore`, `runs` and `simulate`, which work on stored runs: list
what is in the results directory (runs, tables, SLURM jobs, figures), compare runs on the samples
they share, grade their texts again, check the files of all runs, remove runs, free a folder.

`simulate` simulates many concurrent requests on one device from stored drafts. It compares
autoregressive decoding with each drafter, first verifying whole drafts. For a drafter with a
confidence head, also the threshold rule and the hardware-aware scheduler, which chooses lengths for
the current step or two steps ahead. The simulation itself is in `serving/`; it runs no model.
"""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.cli.common import compose, open_store, print_failures, print_lines
from dllm_bench.core.declared import Amount, Count, Probability, fits, refusal
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import slurm
from dllm_bench.metrics.accuracy import percent_of
from dllm_bench.paths import read_settings
from dllm_bench.registry import require_known
from dllm_bench.runs import rescore
from dllm_bench.site.texts import align, number
from dllm_bench.store.files import csv_rows, csv_text, matching, parse, stored_bytes, write_atomic
from dllm_bench.store.index import IndexedRun, RecordIndex
from dllm_bench.store.lock import unlock
from dllm_bench.store.record import SHOWN_METRICS
from dllm_bench.store.spec import Settings, differing, flat_settings
from dllm_bench.store.store import LOCK, RunEntry, RunState, Store, remove, sealed_record, verify

if TYPE_CHECKING:
    from dllm_bench.serving.load_simulation import ServingSystem, StoredDrafts

WORDS = ("run", "state", "benchmark", "model", "decoder", "settings")  # --where searches these
NUMBERS = ("score", "tpf", "tps")
StatusRow = dict[str, Any]
"""Column -> value, plain data."""
COLUMNS = ("run", "state", "done", "benchmark", "model", "decoder", *NUMBERS, "settings")


# --- status: numbers are read from the records, nothing is computed again ------------------------


def show_status(arguments: Namespace) -> int:
    """Print the status of everything below the results directory."""
    store = open_store(arguments)
    if arguments.json:
        rows, _ = status_rows(store, arguments.where, arguments.sort)
        return print_lines([json.dumps(rows, indent=1)])
    results = store.root.parent
    print_lines(run_lines(store, arguments.where, arguments.sort))
    if arguments.where:
        return 0
    print_lines(table_lines(results / "tables"))
    print_lines(slurm.job_lines(store))
    return print_lines(figure_lines(results / "figures"))


def status_rows(
    store: Store, words: Sequence[str] = (), column: str | None = None
) -> tuple[list[StatusRow], list[str]]:
    """Return (rows that contain all words, by path or sorted by a column; a message per damaged
    run).

    A row shows the settings in which its run differs from others of the same name.
    """
    if column:
        require_known("column", column, COLUMNS)
    rows, damages = list[StatusRow](), list[str]()
    settings = list[tuple[str, Hashable, Settings]]()  # as `differing` takes them
    for folder, run in RecordIndex(store).runs():
        if isinstance(run, IndexedRun):
            row, own = row_of_sealed(run), run.settings
        elif isinstance(run, RunEntry):
            row, own = row_of_unfinished(run), flat_settings(run.spec)
            damages += [run.error] if run.state is RunState.DAMAGED else []
        else:
            rows.append(row_of_unreadable(folder))
            damages.append(str(run))
            continue  # its settings are unknown
        rows.append(row)
        settings.append((row["run"], (row["decoder"], row["model"], row["benchmark"]), own))
    apart = differing(settings)
    rows = [{**row, "settings": apart.get(row["run"], "")} for row in rows]
    rows = [row for row in rows if all(any(w in row[name] for name in WORDS) for w in words)]
    if column in NUMBERS:
        rows.sort(key=lambda row: -(row.get(column) or 0))
    elif column == "done":
        rows.sort(key=lambda row: -int(row.get("done", "0/?").partition("/")[0]))
    elif column:
        rows.sort(key=lambda row: row[column])
    return rows, damages


def run_lines(store: Store, words: Sequence[str] = (), column: str | None = None) -> Iterator[str]:
    """Yield the runs as an aligned list, see `status_rows`."""
    rows, damages = status_rows(store, words, column)
    if rows:
        yield from align([COLUMNS, *map(row_texts, rows)])
        yield f"tpf = {SHOWN_METRICS[0]}, tps = {SHOWN_METRICS[1]}, score in percent"
        yield "settings: those in which runs of one decoder, model and benchmark differ"
        yield from damages
    else:
        wanted = f" with {' and '.join(map(repr, words))}" if words else " yet"
        advice = "`dllm-bench status` lists all" if words else "start one with `dllm-bench run`"
        yield f"No runs{wanted} below {store.root}; {advice}."


def row_texts(row: StatusRow) -> tuple[str, ...]:
    """Return the row as text, in the order of `COLUMNS`."""
    speeds = {name: number(row.get(name)) for name in NUMBERS[1:]}
    score = row.get("score")
    shown = "–" if score is None else percent_of(score, *row["interval"])
    shown = f"{shown} {row.get('ungraded', '')}".strip()
    texts = {**row, **speeds, "score": shown}
    return tuple(texts.get(column, "–") for column in COLUMNS)


def row_of_sealed(run: IndexedRun) -> StatusRow:
    """Return the row of a sealed run."""
    own = ("run", "benchmark", "model", "decoder", "score", "interval", "ungraded")
    return {
        **{name: getattr(run, name) for name in own},
        "state": RunState.SEALED.value,
        "done": f"{run.samples}/{run.samples}",
        **dict(zip(NUMBERS[1:], map(run.metrics.get, SHOWN_METRICS), strict=True)),
    }


def row_of_unfinished(entry: RunEntry) -> StatusRow:
    """Return the row of a run that is not sealed, which has no numbers."""
    spec = entry.spec
    return {
        "run": spec.short,
        "state": entry.state.value,
        "done": f"{entry.done}/{entry.total if entry.total is not None else '?'}",
        "benchmark": spec.benchmark.name,
        "model": spec.model.name,
        "decoder": spec.label,
        **dict.fromkeys(("score", "interval", "tpf", "tps")),
        "ungraded": "",
    }


def row_of_unreadable(folder: Path) -> StatusRow:
    """Return the row of a run that is known by its folder's name alone."""
    label, _, short = folder.name.rpartition("-")
    return {
        "run": short,
        "state": RunState.DAMAGED.value,
        "benchmark": folder.parts[-3],
        "model": folder.parts[-2],
        "decoder": label,
    }


def table_lines(tables: Path) -> Iterator[str]:
    """Yield a line per rendered table: how many of its cells are in which state."""
    for path in matching(tables, "*/*.json"):
        name = f"{path.parent.name}/{path.stem}"
        try:
            states = [cell["state"] for cell in parse(stored_bytes(path) or b"")["cells"]]
        except (ValueError, LookupError, TypeError, DllmBenchError):
            yield f"table {name}: {path} cannot be read; `dllm-bench table {name}` writes it again"
            continue
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        yield f"table {name}: {len(states)} cells, {counts}"


def figure_lines(figures: Path) -> Iterator[str]:
    """Yield a line per drawn figure and profile: how many of its points have a number."""
    for path in matching(figures, "*/*/*.csv"):
        name = path.relative_to(figures).with_suffix("").as_posix()
        try:
            ours = [row for row in csv_rows(path) if row["kind"] == "measured"]
            states = Counter("measured" if row["y"] else row["state"] for row in ours)
        except (ValueError, LookupError, csv.Error, DllmBenchError):
            again = f"dllm-bench figure {path.parent.name}/{path.stem}"
            yield f"figure {name}: {path} cannot be read; `{again}` draws it again"
            continue
        counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
        yield f"figure {name}: {len(ours)} points, {counts}"


# --- compare, rescore, verify, remove, unlock ----------------------------------------------------


def compare(arguments: Namespace) -> int:
    """Print the comparison of two or more runs."""
    from dllm_bench.api import runs  # imports Hydra

    results = open_store(arguments).root.parent
    return print_lines(runs.compare(*arguments.runs, results=results).lines())


def rescore_texts(arguments: Namespace) -> int:
    """Print the new scores, or write the texts in EvalPlus's format."""
    entry = open_store(arguments).find(arguments.run)
    settings = rescore.settings(entry, read_settings(arguments.settings, "rescore"), compose)
    if arguments.evalplus:
        write_atomic(arguments.evalplus, "".join(rescore.evalplus_lines(entry, settings)))
        limit = entry.spec.limit
        too_few = (
            f"The run has the first {limit} items (limit={limit}), and evalplus.evaluate wants "
            "a line for every problem; decode all of them with limit=null."
        )
        return print_lines([f"written: {arguments.evalplus}", *([too_few] if limit else [])])
    return print_lines(rescore.report(rescore.rescore(entry, settings)))


def verify_all(arguments: Namespace) -> int:
    """Read every file of every run and print how many runs are whole; 1 if any is damaged."""
    store = open_store(arguments)
    runs = [damages for folder in store.folders() if (damages := verify(folder)) is not None]
    print_lines([f"{len(runs)} runs below {store.root}: {runs.count([])} whole"])
    return print_failures([sentence for damages in runs for sentence in damages])


def remove_named(arguments: Namespace) -> int:
    """Remove the folders of the runs for good; refused, for all, if a hash is unknown or a run is
    going on. Folders of a benchmark or model stay, also where they are empty now.
    """
    folders = list(dict.fromkeys(map(open_store(arguments).folder_of, arguments.runs)))
    remove(folders)
    return print_lines(f"removed: {folder}" for folder in folders)


def unlock_named(arguments: Namespace) -> int:
    """Free the run's folder; refused if the process that has it is alive on this machine."""
    folder = open_store(arguments).folder_of(arguments.run)
    owner = unlock(folder / LOCK)
    text = f"it was held by {owner}, which stops writing if it is still alive."
    return print_lines([f"{folder} is free; {text}"])


# --- simulate ------------------------------------------------------------------------------------

HEADINGS = {"attained": "at the level", "wait_s": "wait s"}  # others follow from the names


def simulate(arguments: Namespace) -> int:
    """Simulate, print the points, and write them in full precision if requested."""
    if arguments.raw and arguments.temperatures:
        raise DllmBenchError("--raw leaves out what --temperatures names; give one of them.")
    entries = list(map(open_store(arguments).find, arguments.runs))
    rows = list(map(asdict, simulated(arguments, entries)))
    if arguments.out:
        write_atomic(arguments.out, csv_text(list(rows[0]), rows))
    heads = [HEADINGS.get(n) or n.replace("_per_", "/").replace("_", "/") for n in rows[0]]
    shown = [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in rows]
    return print_lines(align([heads, *shown]))


def simulated(arguments: Namespace, entries: Sequence[RunEntry]) -> Sequence[Any]:
    """Return the points that the options describe, of the same dataclass: autoregressive decoding
    once, then each drafter under every rule."""
    # torch takes seconds to import
    from dllm_bench.figures import run_series
    from dllm_bench.methods.drafting import read_temperatures
    from dllm_bench.serving.load_simulation import frontier, under_arrivals

    for name, kind in (("tau", Probability), ("level", Amount), ("seed", Count)):
        if not fits(value := getattr(arguments, name), kind):
            raise refusal("simulate", f"--{name}", kind, value)
    is_given = arguments.raw or arguments.temperatures
    given = read_temperatures(arguments.temperatures) if is_given else None
    runs = [run_series.StoredRun(sealed_record(entry), entry.path) for entry in entries]
    recorded = list(map(run_series.drafts_of, runs))
    profile = run_series.profile_of(arguments.profile, (entry.spec.model.name for entry in entries))
    systems: list[ServingSystem] = []
    labels = Counter(entry.spec.label for entry in entries)
    for entry, drafts in zip(entries, recorded, strict=True):
        label = entry.spec.label
        name = label if labels[label] == 1 else f"{label}-{entry.spec.short}"
        rules = compared_rules(name, drafts, arguments.tau)
        plain, *drafted = run_series.systems_of(drafts, profile, rules, given)
        systems += drafted if systems else [plain, *drafted]
    if not arguments.arrivals:
        return frontier(systems, profile, arguments.requests)
    most, level = max(arguments.requests), arguments.level
    return under_arrivals(systems, profile, most, arguments.arrivals, level, arguments.seed)


def compared_rules(name: str, drafts: StoredDrafts, tau: float) -> dict[str, dict[str, Any]]:
    """Return the rules that `simulate` compares: none, whole drafts and, with a confidence head,
    those that cut them."""
    rules = {"autoregressive": {"rule": "none"}, name: {"rule": "fixed"}}
    if not drafts.halves()[0].observed():
        return rules
    return rules | {
        f"{name} threshold {tau}": {"rule": "threshold", "tau": tau},
        f"{name} scheduler": {"rule": "hardware_aware"},
        f"{name} two steps ahead": {"rule": "asynchronous"},
    }
