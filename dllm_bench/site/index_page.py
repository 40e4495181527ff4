"""The first page of the report: tables with the states of their cells, figures, comparisons, runs.

Everything on it leads to a page of its own. A bar shows how many cells of a table stand in which
state; runs of one decoder, model and benchmark are told apart by the settings in which they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

from dllm_bench.registry import TARGET
from dllm_bench.site.format import LISTED_METRICS, significant
from dllm_bench.site.html import Column, Html, Page, el, filters, grid, link, section
from dllm_bench.site.run_page import run_address, shorten
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec, leaves
from dllm_bench.store.store import RunEntry
from dllm_bench.tables.build import MEASURED, UNDEFINED, BuiltTable
from dllm_bench.tables.plan import CellState

BAR = (240, 12)  # width and height of a table's bar
STATE_COLUMN = 1
STANDINGS = (  # of cells, as a bar shows them from left to right
    MEASURED,
    *map(str, (CellState.SETTING, CellState.PARTIAL, CellState.MISSING, CellState.FAILED)),
    *map(str, (CellState.REPORTED_ONLY, CellState.UNAVAILABLE)),
    UNDEFINED,
)


@dataclass(frozen=True)
class Shelf:
    """What the board shows. records: of the sealed entries, by hash; paged: hashes with a page."""

    profile: str
    tables: Sequence[tuple[str, BuiltTable]]  # address, table
    figures: Sequence[tuple[str, str]]  # address, title
    comparisons: Sequence[tuple[str, str]]
    entries: Sequence[RunEntry]
    records: Mapping[str, RunRecord]
    paged: set[str]


def board(shelf: Shelf) -> str:
    """The whole page."""
    states = Counter(str(entry.state) for entry in shelf.entries)
    cells = Counter(cell.standing for _, built in shelf.tables for cell in built.cells)
    runs = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    head = [
        el("h1", {}, "dllm-bench"),
        el(
            "p", {"class": "lead"}, "Decoding methods for diffusion language models, measured alike"
        ),
        el(
            "p",
            {"class": "soft"},
            f"Runs: {runs}. Cells of tables, profile {shelf.profile}: ",
            f"{cells[MEASURED]} measured of {cells.total()}.",
        ),
    ]
    return Page("index.html", "Report")(
        *head,
        tables_section(shelf.tables),
        listed("Figures", "figures", shelf.figures, "dllm-bench figure PAPER/FIGURE"),
        listed("Decoders compared", "comparisons", shelf.comparisons, "dllm-bench run"),
        runs_section(shelf),
    )


def tables_section(tables: Sequence[tuple[str, BuiltTable]]) -> Html:
    """A row per table: title, bar, a count per standing that occurs."""
    found = {address: built.standings() for address, built in tables}
    shown = [name for name in STANDINGS if any(name in counts for counts in found.values())]
    columns = [Column("Table"), Column("Title", wide=True), Column("")]
    columns += [Column(name.capitalize(), number=True) for name in shown]
    rows = [
        (
            link(address, built.table.name),
            built.table.title,
            bar(found[address]),
            *(count_text(found[address].get(name, 0), name) for name in shown),
        )
        for address, built in tables
    ]
    legend = (el("li", {"class": css_class(name)}, name) for name in shown)
    return section(
        "Tables",
        el("ul", {"class": "legend", "aria-label": "States of cells"}, *legend),
        grid(columns, rows, "Tables and the states of their cells"),
        name="tables",
    )


def count_text(count: int, standing: str) -> Html:
    """How many cells; none are less visible."""
    return el("span", {"class": css_class(standing) if count else "soft"}, f"{count}")


def css_class(standing: str) -> str:
    """A standing as the name of a class."""
    return f"state-{standing.replace(' ', '-')}"


def bar(counts: Mapping[str, int]) -> Html:
    """The shares of the standings as one bar."""
    width, height = BAR
    total, at, parts = sum(counts.values()) or 1, 0.0, []
    for name in STANDINGS:
        share = width * counts.get(name, 0) / total
        where = {"x": f"{at:.2f}", "width": f"{share:.2f}", "height": height}
        parts += [el("rect", {**where, "class": css_class(name)})] if share else []
        at += share
    words = ", ".join(f"{counts[name]} {name}" for name in STANDINGS if name in counts)
    box = {"class": "bar", "viewBox": f"0 0 {width} {height}", "preserveAspectRatio": "none"}
    return el("svg", {**box, "role": "img", "aria-label": words}, *parts)


def listed(title: str, name: str, pages: Sequence[tuple[str, str]], command: str) -> Html:
    """Links by folder; a sentence where there are none."""
    if not pages:
        nothing = el("p", {"class": "soft"}, "None yet; they come from ", el("code", {}, command))
        return section(title, nothing, name=name)
    parts: list[str] = []
    for folder, found in groupby(pages, key=lambda page: PurePosixPath(page[0]).parent.name):
        items = (el("li", {}, link(address, text)) for address, text in found)
        parts += [el("h3", {}, folder)] if folder != name else []
        parts.append(el("ul", {"class": "links"}, *items))
    return section(title, *parts, name=name)


# --- runs ----------------------------------------------------------------------------------------


def runs_section(shelf: Shelf) -> Html:
    """The list of runs with fields that narrow it."""
    columns = [
        Column("Run"),
        Column("State"),
        Column("Decoder"),
        Column("Settings", wide=True),
    ]
    columns += [Column("Model"), Column("Benchmark"), Column("Samples", number=True)]
    columns += [Column("Score %", number=True), Column("95 % interval", number=True)]
    columns += [Column("TPF", number=True), Column("TPS", number=True)]
    apart = settings_apart([entry.spec for entry in shelf.entries])
    rows = (run_row(entry, shelf, apart) for entry in shelf.entries)
    states = sorted({str(entry.state) for entry in shelf.entries})
    about = f"TPF is {LISTED_METRICS[0]}, TPS {LISTED_METRICS[1]}. "
    about += "Settings: those in which runs of one decoder, model and benchmark differ."
    return section(
        "Runs",
        filters("all-runs", STATE_COLUMN, states, "State"),
        grid(columns, rows, "Runs", "all-runs"),
        el("p", {"class": "soft"}, about),
        name="runs",
    )


def run_row(entry: RunEntry, shelf: Shelf, apart: Mapping[str, str]) -> tuple[str, ...]:
    """One run; one that is not sealed has no numbers, but says what stopped it."""
    spec, record = entry.spec, shelf.records.get(entry.spec.short)
    score, summary = (record.score, record.summary) if record else (None, {})
    page = run_address(spec.short) if spec.short in shelf.paged else ""
    total = "?" if entry.total is None else f"{entry.total}"
    return (
        link(page, el("code", {}, spec.short)),
        el("span", {"class": css_class(entry.state), "title": entry.error or None}, entry.state),
        spec.label,
        apart[spec.short],
        str(spec.model["name"]),
        str(spec.benchmark["name"]),
        f"{entry.done}" if record else f"{entry.done} of {total}",
        f"{100 * score.mean:.1f}" if score else "",
        f"[{100 * score.low:.1f}, {100 * score.high:.1f}]" if score else "",
        *(significant(summary.get(name)) for name in LISTED_METRICS),
    )


def settings_apart(specs: Iterable[RunSpec]) -> dict[str, str]:
    """Hash -> the settings in which a run differs from others of its name."""
    alike: dict[tuple[str, ...], list[RunSpec]] = {}
    for spec in specs:
        key = (spec.label, str(spec.model["name"]), str(spec.benchmark["name"]))
        alike.setdefault(key, []).append(spec)
    return dict(entry for group in alike.values() for entry in differences(group))


def differences(specs: Sequence[RunSpec]) -> Iterator[tuple[str, str]]:
    """(hash, settings whose value not all of the runs share)."""
    flat = [dict(leaves(spec.identity())) for spec in specs]
    known = dict.fromkeys(key for one in flat for key in one)
    keys = [key for key in known if len({str(one.get(key)) for one in flat}) > 1]
    for spec, one in zip(specs, flat, strict=True):
        yield spec.short, ", ".join(setting(key, one[key]) for key in keys if key in one)


def setting(key: str, value: Any) -> str:
    """A setting with its value; a piece by the name of its class."""
    name = key.removeprefix("decoder.").removesuffix(f".{TARGET}")
    return f"{name} {value.rpartition('.')[2] if key.endswith(TARGET) else shorten(value)}"
