"""`dllm-bench report`: what the store holds as a folder of pages that needs no server.

First come the pages of runs (only those whose record is newer than their page), then the pages that
link to them: tables, figures, comparisons, the first page. A run's main page is written last, so an
interrupted call continues where it stopped. If this code or a template has changed, pages of runs
made before are out of date: they are built again, and no page links to those that are not.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.progress import track

from dllm_bench.claims.findings import Findings
from dllm_bench.claims.spec import load_claim
from dllm_bench.claims.verdict import judge_stored
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import console
from dllm_bench.figures.spec import load_figure
from dllm_bench.paths import PACKAGE
from dllm_bench.site import compare_page, pages
from dllm_bench.site.run_page import run_page, sample_page, scripts
from dllm_bench.site.texts import TextSource
from dllm_bench.store import files
from dllm_bench.store.cache import Compose, SettingsCache
from dllm_bench.store.index import RecordIndex
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import differing_settings
from dllm_bench.store.store import RunEntry, Store, read_record, read_samples, record_fingerprint
from dllm_bench.tables import render
from dllm_bench.tables.cost import measured_runs
from dllm_bench.tables.frame import MEASURED, UNDEFINED, BuiltTable
from dllm_bench.tables.frame import build as build_table
from dllm_bench.tables.load import load_profile, load_table, names_of
from dllm_bench.tables.plan import CellState, Planner, stored_folders
from dllm_bench.tables.spec import EMBEDDED, PaperTable

Paged = tuple[str, BuiltTable]  # a table after the address of its page
STATIC = Path(__file__).parent / "static"
STAMP = "made-by.json"
FIGURE_FORMS = ("svg", "png", "csv")
BAR_WIDTH = 240
PLOTTED = 3  # comparisons whose plots the first page shows; the others are links
CELL_STATES = (  # in the order of a table's bar
    MEASURED,
    *map(str, (CellState.SETTING, CellState.PARTIAL, CellState.MISSING, CellState.FAILED)),
    *map(str, (CellState.REPORTED_ONLY, CellState.UNAVAILABLE)),
    UNDEFINED,
)


@dataclass
class SiteBuilder:
    """One call of `dllm-bench report`.

    store: the runs.
    out: the folder of the site.
    profile: name of the profile that tables are built for.
    compose: overrides to the run configuration, for planning the tables.
    only: prefixes of the hashes of runs that get a page; empty: the `most_pages` sealed last (None:
    all), because a page takes ten times as long as an entry of the list of runs. all_tables: also
    tables without any stored run. texts: token texts and prompts.
    """

    store: Store
    out: Path
    profile: str
    compose: Compose
    only: Sequence[str] = ()
    most_pages: int | None = None
    all_tables: bool = False
    settings: SettingsCache = field(init=False)
    planner: Planner = field(init=False)
    texts: TextSource = field(init=False)
    since: int = field(init=False)
    """When the folder was first written by this code, ns; what was made before is out of date."""

    def __post_init__(self) -> None:
        self.settings = SettingsCache(self.store.root.parent, self.compose)
        self.texts = TextSource(self.settings.compose)
        folders = None if self.all_tables else stored_folders(self.store)
        self.planner = replace(Planner.cached(self.settings, self.store), folders=folders)

    def build(self) -> Iterator[str]:
        """Build new and changed pages; yield messages about them."""
        self._prepare_folder()
        left_out = list[str]()
        entries = list(RecordIndex(self.store).entries(left_out))
        records = {entry.spec.short: entry.record for entry in entries if entry.record}
        made = self._build_runs(entries, left_out)
        run_pages = made | {e.spec.short for e in entries if e.record and self._is_up_to_date(e)}
        papers = list(readable("table", load_table, left_out))
        tables = list(self._build_tables(papers, run_pages))
        built_tables = {built.table.name: built for _, built in tables}
        claims = list(readable("claim", load_claim, left_out))
        judgements = judge_stored(load_profile(self.profile), self.planner, claims)
        self._write(pages.FINDINGS_PAGE, pages.findings_page(Findings(judgements, built_tables)))
        groups = compare_page.comparable_runs(records.values())
        for group in groups:
            self._write(group.address, compare_page.comparison_page(group, run_pages))
        self._draw({plot.address: plot for group in groups for plot in group.plots})
        listed: files.Plain = {
            "tables": tables,
            "without_runs": [(t.name, t.title) for t in papers if t.name not in built_tables],
            "figures": list(self._build_figures(run_pages, left_out)),
            "entries": entries,
            "records": records,
        }
        self._write(pages.FIRST_PAGE, self._first_page(listed, groups, run_pages))
        self.settings.save()
        yield from (f"left out: {sentence}" for sentence in left_out)
        yield f"{len(made)} pages of runs made, {len(run_pages) - len(made)} were up to date"
        if without := len(records) - len(run_pages):
            yield (
                f"{without} runs have no page; --runs HASH makes one, --pages N those of the N "
                "sealed last"
            )
        yield f"{len(tables)} tables, {len(listed['figures'])} figures, {len(groups)} comparisons"
        yield f"written: {self.out / pages.FIRST_PAGE}"

    def _build_runs(self, entries: Sequence[RunEntry], left_out: list[str]) -> set[str]:
        """Write the pages of runs that are out of date; return the runs' short hashes. If a run
        cannot be read, a message is added to `left_out` instead.
        """
        made = set[str]()
        stale = [entry for entry in self._with_pages(entries) if not self._is_up_to_date(entry)]
        for entry in with_progress(stale, "runs"):
            try:
                record, samples = read_record(entry.path), read_samples(entry.path)
            except DllmBenchError as error:
                left_out.append(str(error))
            else:
                if record is not None:  # it may be gone since it was listed
                    self._build_run(entry, record, samples)
                    made.add(entry.spec.short)
        return made

    def _first_page(
        self,
        listed: files.Plain,
        comparisons: Sequence[compare_page.ComparedRuns],
        run_pages: Set[str],
    ) -> str:
        """Return the first page: tables with a bar of their cells' states, figures, comparisons,
        runs.

        listed: what is shown as it is: `tables` (address, table) and those `without_runs` (name,
        title), `figures`, all `entries` of the store, and `records` of the sealed runs by short
        hash. Runs of one decoder, model and benchmark are distinguished by the settings in which
        they differ.
        """
        run_states = Counter(str(entry.state) for entry in listed["entries"])
        cells = Counter(status for _, built in listed["tables"] for status in built.cells.status)
        states = [name for name in CELL_STATES if cells[name]]
        by_state = ", ".join(f"{count} {state}" for state, count in sorted(run_states.items()))
        view = {
            **listed,
            "profile": self.profile,
            "runs_by_state": by_state or "none",
            "measured_cells": cells[MEASURED],
            "cells": cells.total(),
            "all_states": CELL_STATES,
            "states": states,
            "state_columns": [(name.capitalize(), "number") for name in states],
            "bar_width": BAR_WIDTH,
            "option": "" if self.profile == EMBEDDED else f" --profile {self.profile}",
            "plotted": comparisons[:PLOTTED],
            "comparisons": comparisons[PLOTTED:],
            "differing": differing_settings([entry.spec for entry in listed["entries"]]),
            "run_states": sorted(run_states),
        }
        return pages.Page(pages.FIRST_PAGE, "Report", runs=run_pages).render("index.html", view)

    def _prepare_folder(self) -> None:
        """Write the static files, and the stamp of this code if the folder has another.

        Raises if the folder holds files that are not of a report.
        """
        path, stamp = self.out / STAMP, {"dllm_bench_report": code_version()}
        previous = None
        with suppress(OSError, ValueError):
            previous = files.parse(files.stored_bytes(path) or b"")
        if not isinstance(previous, dict) and files.matching(self.out, "*"):
            raise DllmBenchError(
                f"The report was to be written to {self.out}, which holds other files; name an "
                "empty or new directory with --out."
            )
        if previous != stamp:
            self._write(STAMP, json.dumps(stamp) + "\n")
        self.since = path.lstat().st_mtime_ns
        styles = (render.TEMPLATES / "table.css", STATIC / "site.css")
        self._write("static/site.css", "".join(s.read_text(encoding="utf-8") for s in styles))
        for name in ("site.js", "icon.svg"):
            self._write(f"static/{name}", (STATIC / name).read_bytes())

    def _with_pages(self, entries: Sequence[RunEntry]) -> list[RunEntry]:
        """Return the runs that get a page: those of `only`, else the `most_pages` sealed last."""
        if self.only:
            hashes = tuple(self.only)
            return [e for e in entries if e.record and e.spec.identity_hash.startswith(hashes)]
        dated = [(entry.record.sealed_at, entry) for entry in entries if entry.record]
        return [entry for _, entry in sorted(dated, key=lambda pair: -pair[0])[: self.most_pages]]

    def _is_up_to_date(self, entry: RunEntry) -> bool:
        """Return whether the run's page is of this code and not older than its record."""
        changed = record_fingerprint(entry.path)[:1]
        return self._is_newer(pages.run_address(entry.spec.short), max([self.since, *changed]))

    def _is_newer(self, address: str, since: int) -> bool:
        """Return whether a file of the site is there and was written since (ns)."""
        made = files.lstat(self.out / address)
        return made is not None and files.is_file(self.out / address) and made.st_mtime_ns >= since

    def _build_run(
        self, entry: RunEntry, record: RunRecord, samples: Mapping[str, SampleRecord]
    ) -> None:
        """Write the pages of a run; its main page last, since it marks the others as complete."""
        folder, spec = f"runs/{entry.spec.short}", entry.spec
        if samples:
            prompts, decode = self.texts.prompts(spec, samples), self.texts.decode(spec)
            answers = self.texts.answers(spec, samples)
            for number, text in enumerate(scripts(record, samples, prompts, decode, answers)):
                self._write(f"{folder}/samples-{number}.js", text)
            self._write(f"{folder}/sample.html", sample_page(record))
        else:  # a page of an earlier report would be empty now
            for stale in files.matching(self.out / folder, "sample*"):
                files.remove_file(stale)
        texts = {name: sample.text for name, sample in samples.items()}
        self._write(pages.run_address(spec.short), run_page(record, texts))

    def _build_tables(self, papers: Sequence[PaperTable], run_pages: Set[str]) -> Iterator[Paged]:
        """Write each table that has a stored run in all its forms; yields (address, table)."""
        profile, similar = load_profile(self.profile), None
        for table in with_progress(papers, "tables"):
            if not self.planner.has_run(table, profile):
                continue
            [planned] = self.planner.common([table], profile)
            similar = similar or measured_runs(self.store, self.settings)
            built = build_table(*planned, similar)
            stem = f"tables/{built.stem}"
            for form, text in render.render(built).items():
                if form in pages.DOWNLOADS:
                    self._write(f"{stem}.{form}", text)
            self._write(f"{stem}.html", pages.table_page(built, run_pages))
            yield f"{stem}.html", built
        self.settings.save()  # before the claims, since composing takes longest

    def _draw(self, plots: Mapping[str, compare_page.TradeOffPlot]) -> None:
        """Draw the plots that are not there, and remove those of runs as they were before."""
        for stale in files.matching(self.out / compare_page.COMPARISONS, "*.svg"):
            if stale.relative_to(self.out).as_posix() not in plots:
                files.remove_file(stale)
        for address, plot in plots.items():
            if not self._is_newer(address, self.since):
                self._write(address, plot.svg())

    def _build_figures(self, run_pages: Set[str], left_out: list[str]) -> Iterator[files.Plain]:
        """Write a page for each drawn figure, and its files; yield its paper, address and title. If
        a drawing cannot be shown, a message is added to `left_out` instead.
        """
        results = self.store.root.parent
        drawings = files.matching(results / "figures" / self.profile, "*/*.svg")
        for drawn in sorted(drawings, key=in_order):
            name = f"{drawn.parent.name}/{drawn.stem}"
            stem = drawn.relative_to(results).with_suffix("").as_posix()
            paths = {form: drawn.with_suffix(f".{form}") for form in FIGURE_FORMS}
            try:
                title = load_figure(name).table.title if name in names_of("figure") else name
                forms = {
                    form: pages.harmless(form, files.stored_bytes(path) or b"", str(path))
                    for form, path in paths.items()
                    if files.is_file(path)
                }
                points = list(files.csv_rows(paths["csv"]))
            except (DllmBenchError, ValueError, csv.Error) as error:
                left_out.append(f"{name}: {error}")
                continue
            page = pages.figure_page(stem, title, points, list(forms), run_pages)
            self._write(f"{stem}.html", page)
            for form, content in forms.items():
                self._write(f"{stem}.{form}", content)
            yield {"paper": drawn.parent.name, "address": f"{stem}.html", "title": title}

    def _write(self, address: str, content: str | bytes) -> None:
        files.write_atomic(self.out / address, content, durable=False)


def readable(kind: str, load: Callable[[str], Any], left_out: list[str]) -> Iterator[Any]:
    """Yield all tables or claims; of one that cannot be read, add a message to `left_out`."""
    for name in names_of(kind):
        try:
            yield load(name)
        except DllmBenchError as error:
            left_out.append(str(error))


def with_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Return the items one by one, with a progress bar on stderr if that is a terminal."""
    err = console(stderr=True)
    return track(items, what, console=err, transient=True, disable=not err.is_terminal)


def in_order(path: Path) -> list[str | int]:
    """Return a key that sorts paths with their numbers by value: figure 9 before figure 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


@cache
def code_version() -> str:
    """Return a hash of the code, definitions, looks and templates that the pages of runs and the
    plots are made by."""
    folders = ("site", "site/templates", "metrics", "tables", "figures")
    sources = (file for folder in folders for file in sorted((PACKAGE / folder).glob("*.*")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
