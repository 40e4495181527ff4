"""What `table`, `figure` and `claims` share: their options, planning runs, making missing ones."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dllm_bench.cli.common import (
    add_profile_option,
    add_results_option,
    compose,
    positive_int,
    print_lines,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.site.format import looked_up
from dllm_bench.store.files import explain_write_errors
from dllm_bench.store.provenance import machine
from dllm_bench.store.settings import SettingsCache
from dllm_bench.store.store import Store, remove
from dllm_bench.tables.cost import measured_runs
from dllm_bench.tables.frame import LOAD_PER_CORE, BuiltTable, build, disturbed_runs, is_loaded
from dllm_bench.tables.load import available_here, load_profile, names_of, title_of
from dllm_bench.tables.plan import (
    PlannedCell,
    PlannedRun,
    PlannedTable,
    cells_of,
    distinct_runs,
    missing_trained_files,
    plan_common,
    plans_of,
)
from dllm_bench.tables.render import write
from dllm_bench.tables.spec import EMBEDDED, PaperTable, Profile

EXAMPLES = {"table": "lopa/table4", "figure": "dspark/figure2", "claim": "lopa/tpf_gsm8k"}
SINGLE_COMMANDS = 3  # commands printed for missing runs; the rendered table lists all
STAGES = (10, 30, 60, 120, 250, 500)  # every run reaches a stage's items before any run goes on


def add_options(parser: ArgumentParser, kind: str) -> None:
    """Add the options of `table`, `figure` or `claims`; all claims unless some are named."""
    add_results_option(parser)
    example = EXAMPLES[kind]
    paper = example.partition("/")[0]
    text = f"for example {example}; {paper}: every {kind} of the paper; all: every {kind}"
    count, metavar = "?" if kind == "claim" else None, f"PAPER/{kind.upper()}"
    parser.add_argument(kind, metavar=metavar, nargs=count, default="all", help=text)
    add_profile_option(parser)
    parser.add_argument("--run", action="store_true", help="make missing runs on this machine")
    text = "with --run: repeat timed runs that began on a busy machine (marked †)"
    parser.add_argument("--retime", action="store_true", help=text)
    parser.add_argument("--submit", action="store_true", help="submit missing runs to SLURM")
    parser.add_argument(
        "--wait", action="store_true", help="with --submit: wait until all jobs have ended"
    )
    text = "with --submit: replaces settings of conf/hydra/launcher/slurm.yaml, as in "
    text += "partition=gpu; repeatable"
    parser.add_argument("--slurm", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "print the commands of all runs without a record as a shell script, those that cannot "
    text += "be made on this machine included, and nothing else"
    parser.add_argument("--commands", action="store_true", help=text)
    parser.add_argument("--jobs", type=positive_int, metavar="N", help="runs at the same time")
    parser.add_argument(
        "--limit", type=positive_int, metavar="N", help="items per run; a larger N continues runs"
    )
    text = "passes over the items of timed runs; 1: timings come from the runs of the scores"
    parser.add_argument("--passes", type=positive_int, metavar="N", help=text)
    parser.formatter_class = RawDescriptionHelpFormatter
    names = names_of(kind)
    width = max(map(len, names))
    lines = (f"  {name.ljust(width)}  {title_of(kind, name)}".rstrip() for name in names)
    parser.epilog = "\n".join([f"{kind}s:", *lines])


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
    arguments: Namespace,
    papers: Sequence[PaperTable],
    store: Store,
    growing: GrowingTables | None = None,
) -> tuple[list[PlannedTable], list[str]]:
    """Make or submit missing runs if requested, then plan each table.

    growing: with --run, brings all runs to the same number of items and writes the tables after
    each stage.

    Returns the planned tables (`plan_common`) and an error message for each run that failed.
    """
    check_options(arguments)
    profile = chosen_profile(arguments)

    def plans(profile: Profile) -> list[PlannedTable]:
        return plan_whole(arguments, papers, store, profile)

    planned = plans(profile)
    if arguments.retime and remove_disturbed(cells_of(planned), store):
        planned = plans(profile)
    runs = distinct_runs(cells_of(planned))
    stages = stages_of(runs) if growing and arguments.run else []
    if growing and any(run.open for run in runs) and arguments.run:
        growing.announce(planned, stages)

    def show(items: int) -> None:
        if growing:
            growing.show(plans(profile.at_most(items)), items)

    failed = fill(arguments, runs, store, stages, show)
    if arguments.submit or (arguments.run and any(run.open for run in runs)):
        planned = plans(profile)
    return planned if arguments.commands else plan_common(profile, plans, planned), failed


def plan_whole(
    arguments: Namespace, papers: Sequence[PaperTable], store: Store, profile: Profile | None = None
) -> list[PlannedTable]:
    """Plan each table with a profile, by default the one that the arguments choose."""
    settings, fills = SettingsCache(store.root.parent, compose), arguments.run or arguments.submit
    plans = plans_of(papers, settings, store, any_machine=arguments.submit, download=fills)
    planned = plans(profile or chosen_profile(arguments))
    settings.save()
    return planned


def chosen_profile(arguments: Namespace) -> Profile:
    """Load the profile, with the items and passes that the command line asks for."""
    profile = load_profile(arguments.profile)
    if arguments.limit is not None:
        profile = profile.limited(arguments.limit)
    return profile if arguments.passes is None else profile.in_passes(arguments.passes)


def stages_of(runs: Sequence[PlannedRun]) -> list[int]:
    """Return the numbers of items that all open runs reach before any run goes further."""
    limits = [run.spec.limit for run in runs if run.open and run.spec]
    if len(limits) < 2:
        return []
    return [n for n in STAGES if any(limit is None or n < limit for limit in limits)]


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
    # torch takes seconds to import, and rendering stored runs needs none of it
    from dllm_bench.tables.fill import run_here, submit

    if arguments.submit:
        return submit(runs, store, arguments.slurm, arguments.wait)
    jobs = arguments.jobs or default_jobs(arguments.profile)
    return run_here(runs, store, jobs, stages, after)


def default_jobs(profile: str) -> int:
    """Return the number of runs at a time: two for embedded models on two cores, else one."""
    return min(2, os.cpu_count() or 1) if profile == EMBEDDED else 1


@dataclass
class GrowingTables:
    """Tables that are rewritten whenever all of their runs have more items."""

    store: Store
    started: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        """Where the tables are written."""
        return self.store.root.parent / "tables"

    def announce(self, planned: Sequence[PlannedTable], stages: Sequence[int]) -> None:
        """Print the planned runs and the output folder, before the first run."""
        runs = [run for run in distinct_runs(cells_of(planned)) if run.open]
        names = " and ".join(paper.name for paper, *_ in planned[:SINGLE_COMMANDS])
        more = f" and {len(planned) - SINGLE_COMMANDS} more" if planned[SINGLE_COMMANDS:] else ""
        first = f", first of {' then '.join(map(str, stages))} items" if stages else ""
        print_lines(
            [
                f"Making {names}{more}: {len(runs)} runs{first}, written to {self.folder} after "
                "each stage. The time left is measured from the first runs; the same command "
                "continues after a stop.",
            ]
        )

    def show(self, planned: Sequence[PlannedTable], items: int) -> None:
        """Write the tables from the first `items` items of each run, and print where."""
        from dllm_bench.runs.progress import duration  # its metrics take time to import

        _, written = self.write(planned)
        pages = [path for path in written if path.suffix == ".md"]
        where = pages[0] if len(pages) == 1 else self.folder
        passed = duration(time.monotonic() - self.started)
        print_lines([f"{passed} - {items} items a run: {where}"])

    def write(self, planned: Sequence[PlannedTable]) -> tuple[list[BuiltTable], list[Path]]:
        """Build and write the tables; also returns the files."""
        settings = SettingsCache(self.store.root.parent, compose)
        similar = measured_runs(self.store, settings)
        tables = [build(*one, similar) for one in planned]
        settings.save()
        with explain_write_errors(self.folder):
            return tables, [path for built in tables for path in write(built, self.folder)]


def command_lines(planned: Sequence[PlannedTable]) -> Iterator[str]:
    """Yield a shell script that makes every run without a record, including those that need another
    machine.
    """
    runs = distinct_runs(cells_of(planned))
    by_command = {run.command: run for run in runs if run.open or run.is_for_elsewhere}
    yield f"# {len(by_command)} runs without a record"
    names = {run.chosen.get("model", "") for run in by_command.values() if run.is_for_elsewhere}
    names -= {"", "served", *available_here("model")}
    if names:
        yield f"dllm-bench prefetch {' '.join(sorted(names))}  # their weights"
    sources = missing_trained_files(by_command.values())
    yield from (f"# train first: {source} (dllm-bench train)" for source in sources)
    reason = ""
    for command, run in by_command.items():
        if run.reason != reason:
            reason = run.reason
            yield "# " + " ".join(reason.split())
        yield command
