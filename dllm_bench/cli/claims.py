"""`dllm-bench claims`: judge published claims by the stored runs; `--run` makes missing runs.

All claims are planned and judged together, because Holm's correction needs the whole family. Only
the named ones are run and shown, on the items of their tables or, with --limit, on that many items
for every claim.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

from dllm_bench.claims import view
from dllm_bench.claims.baseline import OneTokenRuns
from dllm_bench.claims.spec import load_claim
from dllm_bench.claims.verdict import (
    COMMAND,
    ClaimVerdict,
    Judgement,
    judge_claims,
)
from dllm_bench.cli.common import open_store, print_failures, print_lines
from dllm_bench.cli.table import add_options, chosen_profile, command_lines, plan_and_fill
from dllm_bench.site.format import align
from dllm_bench.store.store import Store
from dllm_bench.tables.load import matching_names, names_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `claims`."""
    add_options(parser, "claim")


def run(arguments: Namespace) -> int:
    """Run what is missing if asked to, judge, print the verdicts."""
    store = open_store(arguments)
    shown = matching_names("claim", arguments.claim)
    if arguments.commands:
        claims = [claim for claim in map(load_claim, shown) if not claim.untestable]
        tables = [claim.cells() for claim in claims]
        return print_lines(command_lines(plan_and_fill(arguments, tables, store)[0]))
    judgements, failed = judged(arguments, store, shown)
    chosen = [one for one in judgements if one.claim.name in shown]
    print_lines(view.details(chosen[0]) if len(chosen) == 1 else table_lines(chosen, arguments))
    return print_failures(failed)


def judged(
    arguments: Namespace, store: Store, shown: Sequence[str]
) -> tuple[list[Judgement], list[str]]:
    """Return all claims with their verdicts, then an error message for each run that failed. With
    --run or --submit, missing runs of the shown claims are made first.
    """
    failed: list[str] = []

    claims = [load_claim(name) for name in names_of("claim")]
    testable = {claim.name: claim.cells() for claim in claims if not claim.untestable}
    if arguments.run or arguments.submit:
        tables = [table for name, table in testable.items() if name in shown]
        failed.extend(plan_and_fill(arguments, tables, store)[1])
    reading = dict.fromkeys(("run", "retime", "submit", "wait"), False)
    asked = Namespace(**{**vars(arguments), **reading, "slurm": [], "jobs": None})
    planned = plan_and_fill(asked, list(testable.values()), store)[0]
    cells = {name: entry[2] for name, entry in zip(testable, planned, strict=True)}
    all_cells = [cells.get(claim.name, []) for claim in claims]
    profile = chosen_profile(arguments)
    return judge_claims(claims, all_cells, profile, OneTokenRuns(store)), failed


def table_lines(judgements: Sequence[Judgement], arguments: Namespace) -> Iterator[str]:
    """Yield a line per claim, then the commands that settle the open ones."""
    yield from align([view.HEADS, *map(view.row, judgements)])
    yield ""
    yield f"{len(judgements)} claims: {view.counts_text(judgements)}"
    yield "one claim in full: dllm-bench claims PAPER/CLAIM; p is corrected for all claims (Holm)"
    again = f"{COMMAND} {arguments.claim} {chosen_profile(arguments).flags}"
    verdicts = {one.verdict for one in judgements}
    if ClaimVerdict.NOT_RUN in verdicts:
        yield f"missing runs: {again} --run"
    if ClaimVerdict.NOT_SETTLED in verdicts:
        yield f"runs of more items, of every claim: {again} --run --limit N"
