"""`dllm-bench table`, `figure` and `claims`: render tables of the papers, draw their figures and
judge their claims from stored runs; `--run` makes missing runs.

All claims are planned and judged together, because Holm's correction needs the whole family. Only
the named ones are run and shown, on the items of their tables or, with --limit, on that many items
for every claim.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dllm_bench.claims import view as claim_view
from dllm_bench.claims.evidence import OneTokenRuns
from dllm_bench.claims.spec import load_claim
from dllm_bench.claims.verdict import (
    COMMAND,
    ClaimVerdict,
    Judgement,
    cells_of_claims,
    judge_claims,
)
from dllm_bench.cli.common import Command, open_store, print_failures, print_lines
from dllm_bench.cli.planned import (
    SINGLE_COMMANDS,
    GrowingTables,
    add_options,
    check_options,
    chosen_profile,
    command_lines,
    default_jobs,
    plan_and_fill,
    plan_whole,
)
from dllm_bench.figures.spec import load_figure
from dllm_bench.site.format import align
from dllm_bench.store.files import explain_write_errors
from dllm_bench.store.store import Store
from dllm_bench.tables import view
from dllm_bench.tables.cost import cost_in_words
from dllm_bench.tables.frame import BuiltTable
from dllm_bench.tables.load import load_table, matching_names, names_of
from dllm_bench.tables.plan import cells_of, distinct_runs, plan_common
from dllm_bench.tables.spec import PaperTable

# --- tables --------------------------------------------------------------------------------------


def show_tables(arguments: Namespace) -> int:
    """Make missing runs if requested, render, and print what is still missing."""
    store = open_store(arguments)
    papers = [load_table(name) for name in matching_names("table", arguments.table)]
    growing = GrowingTables(store)
    planned, failed = plan_and_fill(arguments, papers, store, growing=growing)
    if arguments.commands:
        return print_lines(command_lines(planned))
    tables, written = growing.write(planned)
    if len(tables) > 1:
        print_lines(overview_lines(tables, growing.folder))
    else:
        print_lines(table_lines(tables[0]))
        print_lines(f"written: {path}" for path in written)
    if arguments.run and (arguments.limit or arguments.passes):
        print_lines(outlook_lines(arguments, papers, store))
    return print_failures(failed)


def outlook_lines(
    arguments: Namespace, papers: Sequence[PaperTable], store: Store
) -> Iterator[str]:
    """Yield lines about the tables' own numbers of items and passes: what they add and how long
    they take here."""
    from dllm_bench.runs.progress import duration  # its metrics take time to import

    whole = Namespace(**{**vars(arguments), "limit": None, "passes": None, "run": False})
    planned = cells_of(plan_whole(whole, papers, store))
    specs = [run.spec for run in distinct_runs(planned) if run.open and run.spec]
    known = [record for spec in specs if (record := store.largest_record(spec))]
    seconds = [float(s) for record in known for s in record.columns["seconds"] if s is not None]
    if not seconds:
        return
    requests = sum((spec.limit or 0) * spec.repeats for spec in specs) - len(seconds)
    jobs = arguments.jobs or default_jobs(arguments.profile)
    left = duration(requests * sum(seconds) / len(seconds) / jobs)
    items = max((spec.limit or 0 for spec in specs if spec.repeats == 1), default=0)
    passes = max(spec.repeats for spec in specs)
    own = [f"{items} items a run"] * bool(items)
    own += [f"{passes} passes over the items of timed runs"] * (passes > 1)
    name = papers[0].name if len(papers) == 1 else "all"
    yield (
        f"{' and '.join(own)} narrow the intervals: `dllm-bench table {name} --run`, about {left} "
        "more of decoding here"
    )


def table_lines(built: BuiltTable) -> Iterator[str]:
    """Yield a table: measured numbers next to reported ones, then what is missing."""
    yield built.table.title
    yield view.profile_text(built)
    for block in view.blocks(built):
        yield ""
        yield " · ".join(filter(None, (block["title"], f"measured: {block['measured_on']}")))
        reported = ("reported",) if block["is_reported"] else ()
        titles = [title for name in block["metrics"] for title in (name, *reported)]
        rows = (row_cells(row, bool(reported)) for row in block["rows"])
        yield from align([(*block["heads"], *titles), *rows])
    yield ""
    yield view.progress(built)
    yield from (f"cannot run here: {reason}" for reason in built.unavailable)
    yield from missing_lines(built)


def row_cells(row: view.Plain, is_reported: bool) -> tuple[str, ...]:
    """Return the row's headings, then per metric the measured number and, in some blocks, the
    reported one."""
    texts = list(row["heads"])
    for cell in row["cells"]:
        texts.append(view.measured_text(cell))
        if is_reported:
            reported = cell and cell.planned.cell.reported
            texts.append(reported.text if reported else view.NO_CELL)
    return tuple(texts)


def missing_lines(built: BuiltTable) -> Iterator[str]:
    """Yield the cost of the missing runs, the command for all of them, and commands for single
    ones."""
    yield from view.cost_lines(built)
    if any(run.is_for_elsewhere for run in built.runs):
        flags = f"{built.profile.flags} --commands"
        yield f"commands for a machine that can: dllm-bench table {built.table.name} {flags}"
    if not built.open:
        return
    yield f"all of them: dllm-bench table {built.table.name} {built.profile.flags} --run"
    for run in built.open[:SINGLE_COMMANDS]:
        yield f"one of them ({run.state}: {run.reason}): {run.command}"
    if len(built.open) > SINGLE_COMMANDS:
        yield f"the other {len(built.open) - SINGLE_COMMANDS} commands are in the written table"


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
        for reason, cells in empty_cell_reasons(built).items():
            yield f"{built.table.name}: {cells} cells {reason}"
        yield from (f"{built.table.name}: {line}" for line in view.cost_lines(built))
    distinct = {r.command: built.costs.estimate(r) for built in tables for r in built.open}
    if distinct:
        cost = cost_in_words(list(distinct.values()))
        yield f"in all: {len(distinct)} different runs to make, {cost}"
    yield f"written: md, html, tex, csv and json of each below {folder}"


def empty_cell_reasons(built: BuiltTable) -> dict[str, int]:
    """Return the reasons why cells are empty, with counts; `cost_lines` covers cells that can still
    be run."""
    reasons = [
        f"{cell.status}: {cell.reason}"
        for cell in built.cells.itertuples()
        if view.is_empty(cell) and not cell.planned.run.open
    ]
    return dict(Counter(reasons).most_common())


# --- figures -------------------------------------------------------------------------------------


def draw_figures(arguments: Namespace) -> int:
    """Make missing runs if requested, draw, and print what is still missing. A file is kept if the
    new drawing would lose some of its points.
    """
    store = open_store(arguments)
    figures = [load_figure(name) for name in matching_names("figure", arguments.figure)]
    # torch and matplotlib take seconds to import: only after the names were checked
    from dllm_bench.figures.points import build_figure, make_replays, missing_replays
    from dllm_bench.figures.write import headline, lines, why_kept, write

    tables = [figure.table for figure in figures]
    plans, failed = plan_and_fill(arguments, tables, store)
    if arguments.commands:
        return print_lines(command_lines(plans))
    folder = store.root.parent / "figures"
    for figure, (_, profile, planned) in zip(figures, plans, strict=True):
        missing = list(missing_replays(figure, planned, store))
        failed += make_replays(missing, store) if arguments.run else []
        built = build_figure(figure, profile, planned, store)
        kept = why_kept(built, folder)
        failed += [kept] if kept else []
        with explain_write_errors(folder):
            written = [] if kept else write(built, folder)
        print_lines(lines(built) if len(figures) == 1 else [headline(built)])
        print_lines(f"written: {path}" for path in written)
    return print_failures(failed)


# --- claims --------------------------------------------------------------------------------------


def judge(arguments: Namespace) -> int:
    """Run what is missing if asked to, judge, print the verdicts."""
    store = open_store(arguments)
    shown = matching_names("claim", arguments.claim)
    if arguments.commands:
        claims = [claim for claim in map(load_claim, shown) if not claim.untestable]
        tables = [claim.cells() for claim in claims]
        return print_lines(command_lines(plan_and_fill(arguments, tables, store)[0]))
    judgements, failed = judged(arguments, store, shown)
    chosen = [one for one in judgements if one.claim.name in shown]
    is_one = len(chosen) == 1
    print_lines(claim_view.details(chosen[0]) if is_one else verdict_lines(chosen, arguments))
    return print_failures(failed)


def judged(
    arguments: Namespace, store: Store, shown: Sequence[str]
) -> tuple[list[Judgement], list[str]]:
    """Return all claims with their verdicts, then an error message for each run that failed. With
    --run or --submit, missing runs of the shown claims are made first.
    """
    check_options(arguments)
    claims = [load_claim(name) for name in names_of("claim")]
    testable = {claim.name: claim.cells() for claim in claims if not claim.untestable}
    tables, asked = list(testable.values()), [testable[name] for name in shown if name in testable]
    fills, profile = arguments.run or arguments.submit, chosen_profile(arguments)
    failed = plan_and_fill(arguments, asked, store)[1] if fills else []
    planned = plan_common(profile, partial(plan_whole, arguments, tables, store))
    given = (claims, cells_of_claims(claims, planned), profile)
    return judge_claims(*given, OneTokenRuns(store)), failed


def verdict_lines(judgements: Sequence[Judgement], arguments: Namespace) -> Iterator[str]:
    """Yield a line per claim, then the commands that settle the open ones."""
    yield from align([claim_view.HEADS, *map(claim_view.row, judgements)])
    yield ""
    yield f"{len(judgements)} claims: {claim_view.counts_text(judgements)}"
    yield "one claim in full: dllm-bench claims PAPER/CLAIM; p is corrected for all claims (Holm)"
    again = f"{COMMAND} {arguments.claim} {chosen_profile(arguments).flags}"
    verdicts = {one.verdict for one in judgements}
    if ClaimVerdict.NOT_RUN in verdicts:
        yield f"missing runs: {again} --run"
    if ClaimVerdict.NOT_SETTLED in verdicts:
        yield f"runs of more items, of every claim: {again} --run --limit N"


KINDS = {
    "table": Command(partial(add_options, kind="table"), show_tables),
    "figure": Command(partial(add_options, kind="figure"), draw_figures),
    "claims": Command(partial(add_options, kind="claim"), judge),
}
