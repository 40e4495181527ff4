"""`dllm-bench claims`: what the stored runs say about published claims; missing runs can be made.

All claims are planned and judged, since they are one family (Holm's correction); those that were
named are run and shown. With --power, claims that are not settled are judged again from runs of as
many items as their first runs say are needed.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

from dllm_bench.claims import view
from dllm_bench.claims.spec import load_claim
from dllm_bench.claims.verdict import COMMAND, ClaimVerdict, Judgement, judge_claims
from dllm_bench.cli.common import open_store, print_failures, print_lines
from dllm_bench.cli.table import add_options, command_lines, plan_and_fill
from dllm_bench.site.format import align
from dllm_bench.store.store import Store
from dllm_bench.tables.load import matching_names, names_of

SIZES = (120, 250, 500, 1000)
"""Items of the larger runs: claims share them, and the generated tasks have at most 1000."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `claims`."""
    add_options(parser, "claim")
    text = "items needed for 80 %% power; claims not settled are judged from runs of that size"
    parser.add_argument("--power", action="store_true", help=text)


def run(arguments: Namespace) -> int:
    """Run what is missing if asked to, judge, print the verdicts."""
    store = open_store(arguments)
    shown = matching_names("claim", arguments.claim)
    if arguments.commands:
        claims = [claim for claim in map(load_claim, shown) if not claim.untestable]
        tables = [claim.cells() for claim in claims]
        return print_lines(command_lines(plan_and_fill(arguments, tables, store)[0]))
    judgements, failed = judged(arguments, store, shown)
    if arguments.power:
        judgements, later = with_power(arguments, store, judgements, shown)
        failed += later
    chosen = [one for one in judgements if one.claim.name in shown]
    print_lines(view.details(chosen[0]) if len(chosen) == 1 else table_lines(chosen, arguments))
    return print_failures(failed)


def judged(
    arguments: Namespace, store: Store, shown: Sequence[str]
) -> tuple[list[Judgement], list[str]]:
    """All claims with their verdicts, after the missing runs of those shown were made if asked;
    then an error message for each run that failed.
    """
    claims = [load_claim(name) for name in names_of("claim")]
    testable = [claim for claim in claims if not claim.untestable]
    failed: list[str] = []
    if arguments.run or arguments.submit:
        tables = [claim.cells() for claim in testable if claim.name in shown]
        failed = plan_and_fill(arguments, tables, store)[1]
    reading = Namespace(**{**vars(arguments), "run": False, "submit": False, "wait": False})
    reading.slurm, reading.jobs = [], None
    planned = plan_and_fill(reading, [claim.cells() for claim in testable], store)[0]
    cells = {claim.name: entry[2] for claim, entry in zip(testable, planned, strict=True)}
    return judge_claims(claims, [cells.get(c.name, []) for c in claims], flags(arguments)), failed


def with_power(
    arguments: Namespace, store: Store, pilot: Sequence[Judgement], shown: Sequence[str]
) -> tuple[list[Judgement], list[str]]:
    """The judgements, with those of larger runs in place of claims that the pilot cannot settle."""
    by_size: dict[int, list[str]] = {}
    for one in pilot:
        size = next((size for size in SIZES if size >= (one.needed or size + 1)), None)
        if size and one.verdict is ClaimVerdict.NOT_SETTLED and one.claim.name in shown:
            by_size.setdefault(size, []).append(one.claim.name)
    later: dict[str, Judgement] = {}
    failed: list[str] = []
    for size, names in by_size.items():
        larger = Namespace(**{**vars(arguments), "limit": size})
        judgements, errors = judged(larger, store, names)
        found = {one.claim.name: one for one in judgements if one.evidence}
        later |= {name: found[name] for name in names if name in found}
        failed += errors
    return [later.get(one.claim.name, one) for one in pilot], failed


def flags(arguments: Namespace) -> str:
    """The options that choose profile and items."""
    limit = f" --limit {arguments.limit}" if arguments.limit else ""
    return f"--profile {arguments.profile}{limit}"


def table_lines(judgements: Sequence[Judgement], arguments: Namespace) -> Iterator[str]:
    """One line a claim, then what can be done about those that are open."""
    heads = (*view.HEADS, "items needed") if arguments.power else view.HEADS
    rows = [
        (*view.row(one), str(one.needed or view.NOTHING)) if arguments.power else view.row(one)
        for one in judgements
    ]
    yield from align([heads, *rows])
    yield ""
    yield f"{len(judgements)} claims: {view.counts_text(judgements)}"
    yield "one claim in full: dllm-bench claims PAPER/CLAIM; p is corrected for all claims (Holm)"
    again = f"{COMMAND} {arguments.claim} {flags(arguments)}"
    verdicts = {one.verdict for one in judgements}
    if ClaimVerdict.NOT_RUN in verdicts:
        yield f"missing runs: {again} --run"
    if ClaimVerdict.NOT_SETTLED in verdicts:
        yield f"runs of the items that are needed: {again} --power --run"
