"""`dllm-bench table`, `figure`, `claims` and `report`: render tables of the papers, draw their
figures, judge their claims and build a static site of them from stored runs; `--run` makes missing
runs.

All claims are planned and judged together, because Holm's correction needs the whole family. Only
the named ones are run and shown, on the items of their tables or, with --limit, on that many items
for every claim.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from dllm_bench.claims import verdict
from dllm_bench.claims.spec import load_claim
from dllm_bench.cli.common import (
    compose,
    configured_paths,
    given_folders,
    open_store,
    print_failures,
    print_lines,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import show
from dllm_bench.figures.spec import load_figure
from dllm_bench.models.sources import is_hub_id
from dllm_bench.site.texts import align, looked_up
from dllm_bench.store.archive import archive_of
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.files import explain_write_errors, is_folder, results_directory
from dllm_bench.store.provenance import machine
from dllm_bench.store.store import Store, remove
from dllm_bench.tables import load, plan, render
from dllm_bench.tables.cost import cost_in_words, measured_runs
from dllm_bench.tables.frame import LOAD_PER_CORE, BuiltTable, build, disturbed_runs, is_loaded
from dllm_bench.tables.plan import PlannedCell, PlannedRun, PlannedTable, Planner
from dllm_bench.tables.spec import EMBEDDED, PaperTable, Profile

SINGLE_COMMANDS = 3  # commands printed for missing runs; the rendered table lists all
STAGES = (10, 30, 60, 120, 250, 500)  # every run reaches a stage's items before any run goes on


# --- options, planning, making missing runs ------------------------------------------------------


def check_options(arguments: Namespace) -> None:
    """Refuse options that contradict each other or would have no effect."""
    if arguments.run and arguments.submit:
        raise DllmBenchError("--run decodes here and --submit sends to SLURM; give one of them.")
    if arguments.commands and (arguments.run or arguments.submit):
        raise DllmBenchError("--commands prints what --run and --submit make; give one of them.")
    needs = {"retime": "run", "wait": "submit", "slurm": "submit", "jobs": "run"}
    for flag, other in needs.items():
        if getattr(arguments, flag) and not getattr(arguments, other):
            raise DllmBenchError(f"--{flag} goes with --{other}, which was not given; add it.")


def plan_and_fill(
    arguments: Namespace, papers: Sequence[PaperTable], store: Store, grow: bool = False
) -> tuple[list[PlannedTable], list[str]]:
    """Make or submit missing runs if requested, then plan each table.

    grow: with --run, bring all runs to the same number of items, and write the tables after each
    stage.

    Returns the planned tables (`plan.plan_common`) and an error message for each run that failed.
    """
    check_options(arguments)

    def plans(profile: Profile) -> list[PlannedTable]:
        with planner_of(arguments, store) as planner:
            return planner.each(papers, profile)

    profile = chosen_profile(arguments)
    planned = plans(profile)
    if arguments.retime and remove_disturbed(plan.cells_of(planned), store):
        planned = plans(profile)
    runs = plan.distinct_runs(plan.cells_of(planned))
    open_runs, started = [run for run in runs if run.open], time.monotonic()
    grow = grow and arguments.run
    stages = stages_of(open_runs) if grow else []
    if grow and open_runs:
        first = f", first of {' then '.join(map(str, stages))} items" if stages else ""
        show(
            f"Making {len(open_runs)} runs{first}; tables are written after each stage. The time "
            "left is measured from the first runs; the same command continues after a stop."
        )

    def write_stage(items: int) -> None:
        from dllm_bench.runs.progress import duration  # its metrics take time to import

        _, written = write_tables(plans(replace(profile, most=items)), store)
        pages = [path for path in written if path.suffix == ".md"]
        where = pages[0] if len(pages) == 1 else tables_folder(store)
        show(f"{duration(time.monotonic() - started)} - {items} items a run: {where}")

    failed = fill(arguments, runs, store, stages, write_stage)
    if arguments.submit or (arguments.run and open_runs):
        planned = plans(profile)
    return planned if arguments.commands else plan.plan_common(profile, plans, planned), failed


@contextmanager
def planner_of(arguments: Namespace, store: Store) -> Iterator[Planner]:
    """Give a planner of the runs that the arguments make or show, and keep what it composed."""
    fills = arguments.run or arguments.submit
    with SettingsCache(store.root.parent, compose) as settings:
        planner = Planner.cached(settings, store)
        yield replace(planner, any_machine=arguments.submit, download=fills)


def chosen_profile(arguments: Namespace) -> Profile:
    """Load the profile, with the items and passes that the command line asks for."""
    profile = replace(load.load_profile(arguments.profile), limit=arguments.limit)
    return profile if arguments.passes is None else profile.in_passes(arguments.passes)


def stages_of(runs: Sequence[PlannedRun]) -> list[int]:
    """Return the numbers of items that all of the runs reach before any goes further."""
    limits = [run.spec.limit for run in runs if run.spec]
    several = len(limits) > 1
    return [n for n in STAGES if several and any(limit is None or n < limit for limit in limits)]


def remove_disturbed(planned: Sequence[PlannedCell], store: Store) -> int:
    """Remove the timed runs that began on a busy machine and return their number; DllmBenchError if
    the machine is busy now.
    """
    runs = disturbed_runs(planned)
    here = machine("cpu")
    if runs and is_loaded(here):
        raise DllmBenchError(
            f"--retime makes {len(runs)} runs again that began on a busy machine, and the load is "
            f"{here['load']} on {here['cores']} cores now; wait until it is below "
            f"{LOAD_PER_CORE * here['cores']:.1f}."
        )
    remove([store.root / run.folder for run in runs])
    return len(runs)


def fill(
    arguments: Namespace,
    runs: Sequence[PlannedRun],
    store: Store,
    stages: Sequence[int] = (),
    after: Callable[[int], None] = lambda items: None,
) -> list[str]:
    """Make or submit the missing runs as requested; return an error message for each run that
    failed.

    stages, after: for runs that are made here, see `run_all`.
    """
    if not (arguments.run or arguments.submit):
        return []
    known = [run.record for run in runs if run.record]
    if arguments.run and known:
        print_lines([f"{len(known)} of {len(runs)} runs {looked_up(known)}"])
    if arguments.run and not any(run.open for run in runs):
        return []
    if arguments.submit:
        from dllm_bench.tables.fill import submit

        return submit(runs, store, arguments.slurm, arguments.wait)
    # torch takes seconds to import, and rendering stored runs needs none of it
    from dllm_bench.launch.local import run_all

    # two runs at a time of embedded models on two cores, else one
    jobs = arguments.jobs or (min(2, os.cpu_count() or 1) if arguments.profile == EMBEDDED else 1)
    specs = [run.spec for run in runs if run.open and run.spec]
    outcomes = run_all(specs, store=store, jobs=jobs, stages=stages, after=after)
    return [f"{outcome.spec.folder}: {outcome.error}" for outcome in outcomes if outcome.error]


def tables_folder(store: Store) -> Path:
    """Return where the tables are written."""
    return store.root.parent / "tables"


def write_tables(
    planned: Sequence[PlannedTable], store: Store
) -> tuple[list[BuiltTable], list[Path]]:
    """Build and write the tables; also returns the files."""
    folder = tables_folder(store)
    with SettingsCache(store.root.parent, compose) as settings:
        similar = measured_runs(store, settings)
        tables = [build(*one, similar) for one in planned]
    with explain_write_errors(folder):
        return tables, [path for built in tables for path in render.write(built, folder)]


def command_lines(planned: Sequence[PlannedTable], given: str = "") -> Iterator[str]:
    """Yield a shell script that makes every run without a record, including those that need another
    machine.

    given: options that end each command, see `given_folders`.
    """
    runs = plan.distinct_runs(plan.cells_of(planned))
    by_command = {run.command: run for run in runs if run.open or run.is_for_elsewhere}
    yield f"# {len(by_command)} runs without a record"
    elsewhere = [run for run in by_command.values() if run.is_for_elsewhere]
    names = {run.chosen.get("model", "") for run in elsewhere}
    names -= {"", "served", *load.available_here("model")}
    drafters = filter(is_hub_id, plan.named_sources(elsewhere))
    if words := [*sorted(names), *(f"model.path={source}" for source in drafters)]:
        yield f"dllm-bench prefetch {' '.join(words)}  # their weights"
    sources = plan.missing_trained_files(by_command.values())
    yield from (f"# train first: {source} (dllm-bench train)" for source in sources)
    for reason, alike in groupby(by_command.values(), lambda run: run.reason):
        yield f"# {' '.join(reason.split())}"
        yield from (f"{run.command}{given}" for run in alike)


# --- tables --------------------------------------------------------------------------------------


def show_tables(arguments: Namespace) -> int:
    """Make missing runs if requested, render, and print what is still missing."""
    store = open_store(arguments)
    papers = [load.load_table(name) for name in load.matching_names("table", arguments.table)]
    planned, failed = plan_and_fill(arguments, papers, store, grow=True)
    if arguments.commands:
        return print_lines(command_lines(planned, given_folders(arguments)))
    tables, written = write_tables(planned, store)
    if len(tables) > 1:
        print_lines(overview_lines(tables, tables_folder(store)))
    else:
        print_lines(table_lines(tables[0], given_folders(arguments)))
        print_lines(f"written: {path}" for path in written)
    return print_failures(failed)


def table_lines(built: BuiltTable, given: str = "") -> Iterator[str]:
    """Yield a table: measured numbers next to reported ones, then `missing_lines`."""
    yield built.table.title
    yield render.profile_text(built)
    for block in render.blocks(built):
        yield ""
        yield " · ".join(filter(None, (block["title"], f"measured: {block['measured_on']}")))
        reported = ("reported",) if block["is_reported"] else ()
        titles = [title for name in block["metrics"] for title in (name, *reported)]
        rows = (row_cells(row, bool(reported)) for row in block["rows"])
        yield from align([(*block["heads"], *titles), *rows])
    yield ""
    yield render.progress(built)
    yield from missing_lines(built, "table", given)


def row_cells(row: render.Plain, is_reported: bool) -> tuple[str, ...]:
    """Return the row's headings, then per metric the measured number and, in some blocks, the
    reported one."""
    texts = list(row["heads"])
    for cell in row["cells"]:
        texts.append(render.measured_text(cell))
        if is_reported:
            texts.append((cell and cell.planned.cell.reported) or render.NO_CELL)
    return tuple(texts)


def missing_lines(built: BuiltTable, kind: str, given: str = "") -> Iterator[str]:
    """Yield why some runs of a table or figure cannot be made here, the cost of the missing ones,
    the command for all of them, and commands for single ones.

    given: options that end each command, see `given_folders`.
    """
    yield from (f"cannot run here: {reason}" for reason in built.unavailable)
    yield from render.cost_lines(built)
    again = f"dllm-bench {kind} {built.table.name} {built.profile.flags}{given}"
    if any(run.is_for_elsewhere for run in built.runs):
        yield f"commands for a machine that can: {again} --commands"
    if built.open:
        yield f"all of them: {again} --run"
    for run in built.open[:SINGLE_COMMANDS]:
        yield f"one of them ({run.state}: {run.reason}): {run.command}{given}"
    if len(built.open) > SINGLE_COMMANDS:
        yield f"the other {len(built.open) - SINGLE_COMMANDS} commands: {again} --commands"


def overview_lines(tables: Sequence[BuiltTable], folder: Path) -> Iterator[str]:
    """Yield the numbers of cells per state for several tables, and why some are empty."""
    counts = [built.status_counts() for built in tables]
    states = list(dict.fromkeys(state for count in counts for state in count))
    rows = [
        (built.table.name, str(len(built.cells)), *(str(count.get(state, 0)) for state in states))
        for built, count in zip(tables, counts, strict=True)
    ]
    yield from align([("table", "cells", *states), *rows])
    for built in tables:
        empty = Counter(  # `cost_lines` covers cells that can still be run
            f"{cell.status}: {cell.reason}"
            for cell in built.cells.itertuples()
            if render.is_empty(cell) and not cell.planned.run.open
        )
        for reason, cells in empty.most_common():
            yield f"{built.table.name}: {cells} cells {reason}"
        yield from (f"{built.table.name}: {line}" for line in render.cost_lines(built))
    if distinct := {r.command: built.costs.estimate(r) for built in tables for r in built.open}:
        cost = cost_in_words(list(distinct.values()))
        yield f"in all: {len(distinct)} different runs to make, {cost}"
    yield f"written: md, html, tex, csv and json of each below {folder}"


# --- figures -------------------------------------------------------------------------------------


def draw_figures(arguments: Namespace) -> int:
    """Make missing runs if requested, draw, and print what is still missing. A file is kept if the
    new drawing would lose some of its points.
    """
    store = open_store(arguments)
    figures = [load_figure(name) for name in load.matching_names("figure", arguments.figure)]
    # torch and matplotlib take seconds to import: only after the names were checked
    from dllm_bench.figures.draw import headline, lines, why_kept, write
    from dllm_bench.figures.points import build_figure, make_replays, missing_replays

    plans, failed = plan_and_fill(arguments, [figure.table for figure in figures], store)
    if arguments.commands:
        return print_lines(command_lines(plans, given_folders(arguments)))
    folder = store.root.parent / "figures"
    for figure, (_, profile, planned) in zip(figures, plans, strict=True):
        missing = list(missing_replays(figure, planned, store))
        failed += make_replays(missing, store) if arguments.run else []
        built = build_figure(figure, profile, planned, store)
        kept = why_kept(built, folder)
        failed += [kept] if kept else []
        with explain_write_errors(folder):
            written = [] if kept else write(built, folder)
        alone = (*lines(built), *missing_lines(built.built, "figure", given_folders(arguments)))
        print_lines(alone if len(figures) == 1 else [headline(built)])
        print_lines(f"written: {path}" for path in written)
    return print_failures(failed)


# --- claims --------------------------------------------------------------------------------------


def judge(arguments: Namespace) -> int:
    """Make missing runs of the named claims if requested, judge all claims, and print the verdicts
    of those named.
    """
    check_options(arguments)
    store, profile = open_store(arguments), chosen_profile(arguments)
    shown, given = load.matching_names("claim", arguments.claim), given_folders(arguments)
    failed = list[str]()
    if arguments.run or arguments.submit or arguments.commands:
        asked = [one.cells() for one in map(load_claim, shown) if not one.untestable]
        plans, failed = plan_and_fill(arguments, asked, store)
        if arguments.commands:
            return print_lines(command_lines(plans, given))
    with planner_of(arguments, store) as planner:
        judgements = verdict.judge_stored(profile, planner)
    chosen = [one for one in judgements if one.claim.name in shown]
    print_lines(chosen[0].details(given) if len(chosen) == 1 else verdict_lines(chosen, arguments))
    return print_failures(failed)


def verdict_lines(judgements: Sequence[verdict.Judgement], arguments: Namespace) -> Iterator[str]:
    """Yield a line per claim, then the commands that settle the open ones."""
    yield from align([verdict.ROW_HEADS, *(one.row for one in judgements)])
    yield ""
    yield f"{len(judgements)} claims (p corrected for all, Holm): {verdict.counts_text(judgements)}"
    given = given_folders(arguments)
    yield f"one claim in full: dllm-bench claims PAPER/CLAIM{given}"
    again = f"{verdict.COMMAND} {arguments.claim} {chosen_profile(arguments).flags}{given}"
    verdicts = {one.verdict for one in judgements}
    if verdict.ClaimVerdict.NOT_RUN in verdicts:
        yield f"missing runs: {again} --run"
    if verdict.ClaimVerdict.NOT_SETTLED in verdicts:
        yield f"runs of more items, of every claim: {again} --run --limit N"


# --- the report -----------------------------------------------------------------------------------


def build_report(arguments: Namespace) -> int:
    """Build the site and print what was built."""
    store = open_store(arguments)
    for prefix in arguments.runs:
        store.find(prefix)  # raises if the hash names no run, or several
    # an archive of runs is read-only: nothing is written next to it
    packed = archive_of(store.root).is_file() and not is_folder(store.root)
    results = configured_paths(Namespace(results=None)).results if packed else store.root.parent
    out = arguments.out or results_directory(str(results)) / "site"
    if out.exists() and not out.is_dir():
        raise DllmBenchError(
            f"The report was to be written to {out}, which is a file; name a directory."
        )
    from dllm_bench.site.build import SiteBuilder  # takes half a second to import

    builder = SiteBuilder(
        store=store,
        out=out,
        profile=arguments.profile,
        compose=compose,
        only=tuple(arguments.runs),
        most_pages=arguments.pages,
        all_tables=arguments.tables,
    )
    return print_lines(builder.build())
