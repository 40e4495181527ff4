"""`dllm-bench report`: what the store holds as a folder of pages that need no server.

Order: pages of runs (only those whose record is newer than their page), then what leads to them:
tables, figures, comparisons, the board. A run's page is written last of its files, so that an
interrupted call goes on where it stopped. Pages of another version of this code are made anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import PACKAGE
from dllm_bench.site import compare_page as site_compare
from dllm_bench.site import index_page as site_board
from dllm_bench.site import run_page as site_run
from dllm_bench.site import sample_data as site_samples
from dllm_bench.site import table_pages as site_tables
from dllm_bench.site.texts import TextSource
from dllm_bench.store.record import RunRecord
from dllm_bench.store.settings import SettingsCache
from dllm_bench.store.store import (
    RunEntry,
    RunState,
    Store,
    read_record,
    read_samples,
    record_fingerprint,
)
from dllm_bench.tables.build import BuiltTable
from dllm_bench.tables.build import build as build_table
from dllm_bench.tables.cost import measured_runs
from dllm_bench.tables.load import load_profile, load_table
from dllm_bench.tables.options import names
from dllm_bench.tables.plan import Runs, plan
from dllm_bench.tables.render import render
from dllm_bench.tables.render_html import STYLE

Compose = Callable[[Sequence[str]], Mapping[str, Any]]
Track = Callable[[Sequence[Any], str], Iterator[Any]]  # items one by one, with progress

STATIC = Path(__file__).parent / "static"
STAMP = "made-by.json"
FIGURE_FORMS = ("svg", "png", "csv")


@dataclass
class SiteBuilder:
    """One call: where the results lie, where the pages go, which runs get one (none named: all)."""

    store: Store
    out: Path
    profile: str
    compose: Compose
    track: Track
    only: Sequence[str] = ()
    texts: TextSource = field(default_factory=TextSource)

    def build(self) -> Iterator[str]:
        """Make what is new or changed; sentences of what was made."""
        anew = self._claim()
        entries = list(self.store.entries())
        sealed = [entry for entry in entries if entry.state is RunState.SEALED]  # and not damaged
        records = {e.spec.short: r for e in sealed if (r := read_record(e.path))}
        chosen = [e for e in entries if e.spec.short in records and self._wanted(e)]
        stale = [entry for entry in chosen if anew or not self._fresh(entry)]
        for entry in self.track(stale, "runs"):
            self._run(entry, records[entry.spec.short])
        paged = {short for short in records if self._page(short).is_file()}
        tables = list(self._tables(paged))
        groups = site_compare.groups(records.values())
        for group in groups:
            self._write(group.address, site_compare.compare_page(group, paged))
        shelf = site_board.Shelf(
            profile=self.profile,
            tables=tables,
            figures=list(self._figures(paged)),
            comparisons=[(group.address, group.title) for group in groups],
            entries=entries,
            records=records,
            paged=paged,
        )
        self._write("index.html", site_board.board(shelf))
        yield f"{len(stale)} pages of runs made, {len(paged) - len(stale)} were there"
        yield f"{len(tables)} tables, {len(shelf.figures)} figures, {len(groups)} comparisons"
        yield f"written: {self.out / 'index.html'}"

    def _claim(self) -> bool:
        """Take the folder, refusing one with other files in it; True where all is to be made."""
        path, stamp = self.out / STAMP, {"dllm_bench_report": code_version()}
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found is None and self.out.is_dir() and any(self.out.iterdir()):
            raise DllmBenchError(
                f"The report was to be written to {self.out}, which holds other files; name an "
                "empty or new directory with --out."
            )
        self._write(STAMP, json.dumps(stamp) + "\n")
        own = (STATIC / "site.css").read_text(encoding="utf-8")
        self._write("static/site.css", STYLE + own)
        for name in ("site.js", "icon.svg"):
            shutil.copyfile(STATIC / name, self.out / "static" / name)
        return found != stamp

    def _wanted(self, entry: RunEntry) -> bool:
        return not self.only or entry.spec.identity_hash.startswith(tuple(self.only))

    def _page(self, short: str) -> Path:
        return self.out / site_run.run_address(short)

    def _fresh(self, entry: RunEntry) -> bool:
        """Whether the run's page is not older than its record."""
        page, changed = self._page(entry.spec.short), record_fingerprint(entry.path)
        return page.is_file() and page.stat().st_mtime_ns >= changed[0]

    def _run(self, entry: RunEntry, record: RunRecord) -> None:
        """The pages of a run, the one that says they are whole last."""
        folder, spec = f"runs/{entry.spec.short}", entry.spec
        samples = read_samples(entry.path)
        prompts, decode = self.texts.prompts(spec, samples), self.texts.decode(spec)
        for number, text in enumerate(site_samples.scripts(record, samples, prompts, decode)):
            self._write(f"{folder}/samples-{number}.js", text)
        self._write(f"{folder}/sample.html", site_run.sample_page(record))
        shown = {key: sample.text for key, sample in samples.items()}
        self._write(site_run.run_address(spec.short), site_run.run_page(record, shown))

    def _tables(self, paged: set[str]) -> Iterator[tuple[str, BuiltTable]]:
        """The tables as (address, table), each written in all its forms."""
        profile, runs = load_profile(self.profile), Runs()
        settings = SettingsCache(self.store.root.parent, self.compose)
        kin = measured_runs(self.store)
        for name in self.track(names("table"), "tables"):
            table = load_table(name)
            given = (settings.compose, self.store, False, settings.resolve, runs)
            built = build_table(table, profile, plan(table, profile, *given), kin)
            stem = site_tables.table_stem(built)
            for form, text in render(built).items():
                if form in site_tables.DOWNLOADS:
                    self._write(f"{stem}.{form}", text)
            self._write(f"{stem}.html", site_tables.table_page(built, paged))
            yield f"{stem}.html", built
        settings.save()

    def _figures(self, paged: set[str]) -> Iterator[tuple[str, str]]:
        """The drawn figures as (address, title), with copies of their files."""
        results = self.store.root.parent
        for drawn in sorted((results / "figures" / self.profile).glob("*/*.svg")):
            stem = drawn.relative_to(results).with_suffix("").as_posix()
            forms = [form for form in FIGURE_FORMS if drawn.with_suffix(f".{form}").is_file()]
            points = site_tables.read_points(drawn.with_suffix(".csv"))
            self._write(f"{stem}.html", site_tables.figure_page(stem, points, forms, paged))
            for form in forms:
                shutil.copyfile(drawn.with_suffix(f".{form}"), self.out / f"{stem}.{form}")
            yield f"{stem}.html", f"{drawn.parent.name}/{drawn.stem}"

    def _write(self, address: str, text: str) -> None:
        path = self.out / address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")


@cache
def code_version() -> str:
    """A hash of the code that pages of runs are made by."""
    files = [
        *sorted(Path(__file__).parent.glob("*.py")),
        *sorted((PACKAGE / "metrics").glob("*.py")),
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
