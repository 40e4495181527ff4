"""The first page of the report: tables, figures, comparisons, runs, each with a link to its page.

A bar shows how many cells of a table are in which state. Runs of one decoder, model and benchmark
are distinguished by the settings in which they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath

from dllm_bench.site.compare_page import ComparedRuns
from dllm_bench.site.format import LISTED_METRICS, significant
from dllm_bench.site.pages import FIRST_PAGE, Page, Plain, RunPages, state_class
from dllm_bench.site.tradeoff_plot import tradeoff_plots
from dllm_bench.store.differences import differing_settings
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import RunEntry
from dllm_bench.tables.frame import MEASURED, UNDEFINED, BuiltTable
from dllm_bench.tables.plan import CellState
from dllm_bench.tables.spec import EMBEDDED

BAR_WIDTH = 240
PLOTTED = 3  # comparisons whose plots the first page shows; the others are links
CELL_STATES = (  # in the order of a table's bar
    MEASURED,
    *map(str, (CellState.SETTING, CellState.PARTIAL, CellState.MISSING, CellState.FAILED)),
    *map(str, (CellState.REPORTED_ONLY, CellState.UNAVAILABLE)),
    UNDEFINED,
)
AddressedPage = tuple[str, str]  # (address, text)


@dataclass(frozen=True)
class SiteContents:
    """Everything the first page lists.

    profile: name of the profile that the tables were built for.
    tables: (address, table).
    without_runs: (name, title) of tables without any stored run, which have no page.
    figures: (address, title).
    comparisons: groups of compared runs, the largest first.
    entries: all runs of the store.
    records: records of the sealed runs, by short hash.
    run_pages: the runs that have a page.
    """

    profile: str
    tables: Sequence[tuple[str, BuiltTable]]
    without_runs: Sequence[tuple[str, str]]
    figures: Sequence[AddressedPage]
    comparisons: Sequence[ComparedRuns]
    entries: Sequence[RunEntry]
    records: Mapping[str, RunRecord]
    run_pages: RunPages


def index_page(contents: SiteContents) -> str:
    """The whole page."""
    return Page(FIRST_PAGE, "Report").render("index.html", index_view(contents))


def index_view(contents: SiteContents) -> Plain:
    """Return what `templates/index.html` lays out."""
    run_states = Counter(str(entry.state) for entry in contents.entries)
    cells = Counter(status for _, built in contents.tables for status in built.cells.status)
    shown = [{"name": name, "css": state_class(name)} for name in CELL_STATES if cells[name]]
    differing = differing_settings([entry.spec for entry in contents.entries])
    by_state = ", ".join(f"{count} {state}" for state, count in sorted(run_states.items()))
    return {
        "runs_by_state": by_state or "none",
        "profile": contents.profile,
        "measured_cells": cells[MEASURED],
        "cells": cells.total(),
        "states": shown,
        "state_columns": [(state["name"].capitalize(), "number") for state in shown],
        "tables": [table_entry(address, built, shown) for address, built in contents.tables],
        "without_runs": [folded_table(*one, contents.profile) for one in contents.without_runs],
        "figures": link_groups(contents.figures, "figures"),
        "plots": [plotted(one, contents.run_pages) for one in contents.comparisons[:PLOTTED]],
        "comparisons": [(one.address, one.heading) for one in contents.comparisons[PLOTTED:]],
        "runs": [run_list_entry(entry, contents, differing) for entry in contents.entries],
        "run_states": sorted(run_states),
        "tpf_metric": LISTED_METRICS[0],
        "tps_metric": LISTED_METRICS[1],
        "bar_width": BAR_WIDTH,
    }


def table_entry(address: str, built: BuiltTable, shown: Sequence[Plain]) -> Plain:
    """One table with the states of its cells, and these as a bar; `shown`: the states that have a
    column.
    """
    counts = built.status_counts()
    return {
        "address": address,
        "name": built.table.name,
        "title": built.table.title,
        "bar": list(bar_parts(counts)),
        "bar_label": ", ".join(f"{counts[name]} {name}" for name in CELL_STATES if name in counts),
        "counts": [(state, counts.get(state["name"], 0)) for state in shown],
    }


def plotted(runs: ComparedRuns, run_pages: RunPages) -> Plain:
    """A comparison with its plots, and the way to its page."""
    plots = tradeoff_plots(runs.records, runs.title, run_pages)
    return {"address": runs.address, "title": runs.heading, "plots": plots}


def folded_table(name: str, title: str, profile: str) -> Plain:
    """A table that has no page, since none of its runs is stored."""
    option = "" if profile == EMBEDDED else f" --profile {profile}"
    command = f"dllm-bench table {name}{option} --run"
    return {"name": name, "title": title, "command": command}


def bar_parts(counts: Mapping[str, int]) -> Iterator[Plain]:
    """The shares of the states that occur, from left to right."""
    total, x = sum(counts.values()) or 1, 0.0
    for name in CELL_STATES:
        width = BAR_WIDTH * counts.get(name, 0) / total
        if width:
            yield {"x": f"{x:.2f}", "width": f"{width:.2f}", "css": state_class(name)}
        x += width


def link_groups(pages: Sequence[AddressedPage], root: str) -> list[Plain]:
    """Links grouped by folder; pages directly in the folder `root` have no heading."""
    grouped = groupby(pages, key=lambda page: PurePosixPath(page[0]).parent.name)
    return [
        {"heading": "" if name == root else name, "links": list(links)} for name, links in grouped
    ]


# --- runs ----------------------------------------------------------------------------------------


def run_list_entry(entry: RunEntry, contents: SiteContents, differing: Mapping[str, str]) -> Plain:
    """One run as text; a run that is not sealed has no numbers, but says what stopped it."""
    spec, record = entry.spec, contents.records.get(entry.spec.short)
    score, summary = (record.score, record.summary) if record else (None, {})
    ungraded = record.ungraded if record else ""
    total = "?" if entry.total is None else f"{entry.total}"
    tpf, tps = (significant(summary.get(name)) for name in LISTED_METRICS)
    return {
        "link": contents.run_pages.link(spec.short),
        "state": str(entry.state),
        "state_css": state_class(entry.state),
        "error": entry.error or "",
        "decoder": spec.label,
        "settings": differing[spec.short],
        "model": str(spec.model.name),
        "benchmark": str(spec.benchmark.name),
        "samples": f"{entry.done}" if record else f"{entry.done} of {total}",
        "score": f"{100 * score.mean:.1f}" if score else "",
        "interval": f"[{100 * score.low:.1f}, {100 * score.high:.1f}] {ungraded}".strip()
        if score
        else "",
        "tpf": tpf,
        "tps": tps,
    }
