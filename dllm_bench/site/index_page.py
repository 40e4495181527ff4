"""The first page of the report: tables, figures, comparisons, runs, each with a link to its page.

A bar shows the states of a table's cells. Runs of one decoder, model and benchmark are
distinguished by the settings in which they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath

from dllm_bench.site.compare_page import ComparedRuns, tradeoff_plots
from dllm_bench.site.pages import FIRST_PAGE, Page, Plain, RunPages, state_class
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import differing_settings
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
    """Return the whole page."""
    run_states = Counter(str(entry.state) for entry in contents.entries)
    cells = Counter(status for _, built in contents.tables for status in built.cells.status)
    states = [name for name in CELL_STATES if cells[name]]
    by_state = ", ".join(f"{count} {state}" for state, count in sorted(run_states.items()))
    view = {
        "contents": contents,
        "runs_by_state": by_state or "none",
        "measured_cells": cells[MEASURED],
        "cells": cells.total(),
        "all_states": CELL_STATES,
        "states": states,
        "state_columns": [(name.capitalize(), "number") for name in states],
        "bar_parts": bar_parts,
        "option": "" if contents.profile == EMBEDDED else f" --profile {contents.profile}",
        "figures": link_groups(contents.figures, "figures"),
        "plotted": [
            (runs, tradeoff_plots(runs.records, runs.title, contents.run_pages))
            for runs in contents.comparisons[:PLOTTED]
        ],
        "comparisons": contents.comparisons[PLOTTED:],
        "differing": differing_settings([entry.spec for entry in contents.entries]),
        "run_states": sorted(run_states),
        "bar_width": BAR_WIDTH,
    }
    return Page(FIRST_PAGE, "Report").render("index.html", view)


def bar_parts(counts: Mapping[str, int]) -> Iterator[Plain]:
    """Yield the shares of the states that occur, from left to right."""
    total, x = sum(counts.values()) or 1, 0.0
    for name in CELL_STATES:
        width = BAR_WIDTH * counts.get(name, 0) / total
        if width:
            yield {"x": f"{x:.2f}", "width": f"{width:.2f}", "css": state_class(name)}
        x += width


def link_groups(pages: Sequence[AddressedPage], root: str) -> list[Plain]:
    """Return links grouped by folder; pages directly in the folder `root` have no heading."""
    grouped = groupby(pages, key=lambda page: PurePosixPath(page[0]).parent.name)
    return [
        {"heading": "" if name == root else name, "links": list(links)} for name, links in grouped
    ]
