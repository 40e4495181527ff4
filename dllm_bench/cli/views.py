"""Stored runs as lines of text: the board, one run, two runs, a table.

Pure functions from what the store holds to strings; printing and finding runs is the command
line's. Numbers come from the record by the name of their definition, nothing is computed anew.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.cli import status_cache as glance
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import accuracy
from dllm_bench.run import progress
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import SHOWN
from dllm_bench.store.store import RunEntry, RunState, Store, read_record
from dllm_bench.tables import view
from dllm_bench.tables.build import BuiltTable
from dllm_bench.tables.cost import cost_in_words

Decode = Callable[[Sequence[int]], str]
BOARD = ("run", "state", "done", "benchmark", "model", "decoder", "score", "tpf", "tps")
SINGLE_COMMANDS = 3  # shown in the terminal, the rendered table lists all
BOARD_DEFINITIONS = ("tpf/emitted", "tps/e2e")


def grid(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def number(value: float | None, digits: int = 2) -> str:
    """A number or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(score: accuracy.MeanScore | None) -> str:
    """A score in percent with its interval."""
    if score is None:
        return "–"
    return f"{100 * score.mean:.1f} [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def board(store: Store, tables: Path) -> Iterator[str]:
    """All runs of the store, then the rendered tables."""
    rows = glance.rows(store, BOARD, board_row)
    if rows:
        yield from grid([BOARD, *rows])
        yield f"tpf = {BOARD_DEFINITIONS[0]}, tps = {BOARD_DEFINITIONS[1]}, score in percent"
    else:
        yield f"No runs below {store.root} yet; start one with `dllm-bench run`."
    yield from table_lines(tables)


def board_row(entry: RunEntry) -> tuple[str, ...]:
    """One run on the board; a run that is not sealed has no numbers."""
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
        *(number(summary.get(name)) for name in BOARD_DEFINITIONS),
    )


def table_lines(tables: Path) -> Iterator[str]:
    """How many cells of each rendered table stand in which state."""
    for path in sorted(tables.glob("*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        try:
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            states = [cell["state"] for cell in cells]
        except (ValueError, LookupError, TypeError):
            yield f"table {name}: {path} cannot be read; `dllm-bench table {name}` writes it anew"
            continue
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        yield f"table {name}: {len(states)} cells, {counts}"


def figure_lines(figures: Path) -> Iterator[str]:
    """How many points of each drawn figure have a number, by profile."""
    for path in sorted(figures.glob("*/*/*.csv")):
        name = path.relative_to(figures).with_suffix("").as_posix()
        try:
            with path.open(encoding="utf-8", newline="") as file:
                ours = [row for row in csv.DictReader(file) if row["kind"] == "measured"]
            states = Counter("measured" if row["y"] else row["state"] for row in ours)
        except (ValueError, LookupError, csv.Error):
            again = f"dllm-bench figure {path.parent.name}/{path.stem}"
            yield f"figure {name}: {path} cannot be read; `{again}` draws it anew"
            continue
        counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
        yield f"figure {name}: {len(ours)} points, {counts}"


def summary(record: RunRecord) -> Iterator[str]:
    """What a sealed run measured, and on what."""
    environment = record.environment
    yield from progress.summary(record)
    yield f"machine: {record.devices}, {environment.get('threads')} threads"
    yield f"commit: {commit(environment)}"
    yield f"run: {record.identity_hash}"


def commit(environment: dict) -> str:
    """The commit of a run, and whether the code differed from it."""
    if not environment.get("commit"):
        return "unknown (not run from a checkout)"
    changed = " with local changes" if environment.get("dirty") else ""
    return f"{environment['commit'][:SHOWN]}{changed}"


def unfinished(entry: RunEntry) -> Iterator[str]:
    """What is known of a run that is not sealed."""
    total = entry.total if entry.total is not None else "?"
    yield f"{entry.spec.short} is {entry.state}: {entry.done} of {total} done"
    if entry.error:
        yield entry.error
    yield "The command that started it goes on from there."


def decoder_of(model: Mapping[str, Any]) -> Decode:
    """Token ids to text with a model's own tokenizer; special tokens stay visible."""
    from dllm_bench.models.sources import checkpoint_folder
    from dllm_bench.models.text import read_tokenizer
    from dllm_bench.store.inputs import model_spec

    spec = model_spec(model)
    tokenizer = read_tokenizer(checkpoint_folder(spec.path, spec.revision))
    return lambda ids: str(tokenizer.decode(list(ids))) if tokenizer else str(list(ids))


def sealed(entry: RunEntry) -> RunRecord:
    """The record of a run that has to be complete."""
    record = read_record(entry.path)
    if record is None:
        raise DllmBenchError(
            f"Run {entry.spec.short} is {entry.state.value} ({entry.done} samples); complete it "
            "with the command that started it, then compare."
        )
    return record


def pick_sample(samples: dict[str, SampleRecord], name: str, run: str) -> SampleRecord:
    """The sample called `name`; a sentence with examples when there is none."""
    if name not in samples:
        known = ", ".join(list(samples)[:3]) or "none"
        raise DllmBenchError(
            f"Run {run} has no stored sample {name!r} among {len(samples)}; the first are: {known}."
        )
    return samples[name]


def comparison(one: RunRecord, other: RunRecord) -> Iterator[str]:
    """Score difference on shared samples with its test, and the speeds beside each other."""
    result = accuracy.compare(one.values, other.values)
    verdict = "the runs differ" if result.differs else "no difference is shown"
    p_value = "" if result.p_value is None else f", p = {result.p_value:.3g}"
    difference, low, high = (
        f"{100 * x:+.1f}" for x in (result.difference, result.low, result.high)
    )
    yield f"score {percent(one.score)} and {percent(other.score)} %"
    yield (
        f"difference {difference} [{low}, {high}] points on {result.n} shared samples "
        f"({result.method}{p_value}): {verdict}"
    )
    rows = [("definition", one.identity_hash[:SHOWN], other.identity_hash[:SHOWN], "ratio")]
    for name, mine in one.summary.items():
        theirs = other.summary.get(name)
        if mine is None and theirs is None:
            continue
        ratio = mine / theirs if mine is not None and theirs else None
        rows.append((name, number(mine, 3), number(theirs, 3), number(ratio)))
    yield from grid(rows)


def table(built: BuiltTable) -> Iterator[str]:
    """A built table: measured beside any reported numbers, then what is missing."""
    yield built.table.title
    yield view.profile_text(built)
    for block in view.blocks(built):
        yield ""
        yield " · ".join(filter(None, (block.title, f"measured: {block.measured_on}")))
        beside = ("reported",) if block.reported_labels else ()
        titles = [title for name in block.metrics for title in (name, *beside)]
        yield from grid([(*block.heads, *titles), *(table_row(row) for row in block.rows)])
    yield ""
    yield view.progress(built)
    yield from (f"cannot run here: {reason}" for reason in built.impossible)
    yield from open_lines(built)


def listing(tables: Sequence[BuiltTable], folder: Path) -> Iterator[str]:
    """Several tables: where the cells of each stand, and why some are empty."""
    standings = [built.standings() for built in tables]
    words = list(dict.fromkeys(word for found in standings for word in found))
    rows = [
        (built.table.name, str(len(built.cells)), *(str(found.get(word, 0)) for word in words))
        for built, found in zip(tables, standings, strict=True)
    ]
    yield from grid([("table", "cells", *words), *rows])
    for built in tables:
        for reason, cells in reasons(built).items():
            yield f"{built.table.name}: {cells} cells {reason}"
        yield from (f"{built.table.name}: {line}" for line in view.cost_lines(built))
    together = {run.command: run.cost for built in tables for run in built.open}
    if together:
        cost = cost_in_words(list(together.values()))
        yield f"together: {len(together)} different runs to make, {cost}"
    yield f"written: md, html, tex, csv and json of each below {folder}"


def reasons(built: BuiltTable) -> dict[str, int]:
    """Why cells are empty, and how many; what can still be run is told by its cost."""
    told = [
        f"{cell.standing}: {cell.why}"
        for cell in built.cells
        if view.is_empty(cell) and not cell.run.open
    ]
    return dict(Counter(told).most_common())


def open_lines(built: BuiltTable) -> Iterator[str]:
    """What is missing: its cost, the command that fills everything, then single ones."""
    yield from view.cost_lines(built)
    if not built.open:
        return
    yield f"all of them: dllm-bench table {built.table.name} {built.profile.flags} --run"
    for run in built.open[:SINGLE_COMMANDS]:
        yield f"one of them ({run.state}: {run.reason}): {run.command}"
    if len(built.open) > SINGLE_COMMANDS:
        yield f"the other {len(built.open) - SINGLE_COMMANDS} commands are in the written table"


def table_row(row: view.TableRow) -> tuple[str, ...]:
    """Leading entries, then for every metric measured and, if the block has it, reported."""
    measured = map(view.measured_text, row.cells)
    if not row.reported:
        return (*row.heads, *measured)
    reported = (cell.cell.reported.text if cell.cell.reported else "–" for cell in row.reported)
    pairs = zip(measured, reported, strict=True)
    return (*row.heads, *(text for pair in pairs for text in pair))
