"""`dllm-bench compare`, `rescore` and `runs`: compare stored runs on the samples they share, grade
their texts again, check the files of all runs, remove runs, free a folder.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from dllm_bench.api.comparison import RunComparison, require_two, sealed_record
from dllm_bench.cli.common import (
    Command,
    add_results_option,
    add_run_argument,
    add_runs_argument,
    add_settings_argument,
    compose,
    open_store,
    print_failures,
    print_lines,
)
from dllm_bench.runs import rescore
from dllm_bench.store.files import write_atomic
from dllm_bench.store.lock import unlock
from dllm_bench.store.store import LOCK, remove
from dllm_bench.store.verify import verify

EACH_WITH_FIRST = "; each is compared with the first"


def compare(arguments: Namespace) -> int:
    """Print the comparison of two or more runs."""
    require_two(arguments.runs)
    store = open_store(arguments)
    found = tuple(sealed_record(store.find(name)) for name in arguments.runs)
    return print_lines(RunComparison(found).lines())


def add_rescore_arguments(parser: ArgumentParser) -> None:
    """Add the options of `rescore`."""
    add_run_argument(parser)
    add_settings_argument(parser, "grade with these; nothing is saved")
    parser.add_argument("--evalplus", type=Path, metavar="FILE", help="write EvalPlus's samples")


def rescore_texts(arguments: Namespace) -> int:
    """Print the new scores, or write the texts in EvalPlus's format."""
    entry = open_store(arguments).find(arguments.run)
    settings = rescore.settings(entry, rescore.changes(arguments.settings), compose)
    if arguments.evalplus:
        write_atomic(arguments.evalplus, "".join(rescore.evalplus_lines(entry, settings)))
        limit = entry.spec.limit
        too_few = (
            f"The run has the first {limit} items (limit={limit}), and evalplus.evaluate wants "
            "a line for every problem; decode all of them with limit=null."
        )
        return print_lines([f"written: {arguments.evalplus}", *([too_few] if limit else [])])
    return print_lines(rescore.report(rescore.rescore(entry, settings)))


def verify_all(arguments: Namespace) -> int:
    """Read every file of every run and print how many runs are whole; 1 if any is damaged."""
    store = open_store(arguments)
    runs = [verified for folder in store.folders() if (verified := verify(folder))]
    damaged = [verified for verified in runs if verified.damages]
    print_lines([f"{len(runs)} runs below {store.root}: {len(runs) - len(damaged)} whole"])
    return print_failures([sentence for verified in damaged for sentence in verified.damages])


def remove_named(arguments: Namespace) -> int:
    """Remove the folders of the runs for good; refused, for all, if a hash is unknown or a run is
    going on. Folders of a benchmark or model stay, also where they are empty now.
    """
    store = open_store(arguments)
    folders = [store.folder_of(name) for name in arguments.runs]
    remove(folders)
    return print_lines(f"removed: {folder}" for folder in folders)


def unlock_named(arguments: Namespace) -> int:
    """Free the run's folder; refused if the process that has it is alive on this machine."""
    folder = open_store(arguments).folder_of(arguments.run)
    owner = unlock(folder / LOCK)
    text = f"it was held by {owner}, which stops writing if it is still alive."
    return print_lines([f"{folder} is free; {text}"])


KINDS = {
    "compare": Command(partial(add_runs_argument, remark=EACH_WITH_FIRST), compare),
    "rescore": Command(add_rescore_arguments, rescore_texts),
    "verify": Command(add_results_option, verify_all),
    "rm": Command(add_runs_argument, remove_named),
    "unlock": Command(add_run_argument, unlock_named),
}
