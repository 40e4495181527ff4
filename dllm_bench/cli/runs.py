"""`dllm-bench runs`: check the files of all runs, remove runs, free a folder."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.cli.common import (
    Command,
    add_results_option,
    open_store,
    print_failures,
    print_lines,
)
from dllm_bench.store.lock import unlock
from dllm_bench.store.store import LOCK, remove
from dllm_bench.store.verify import verify


def add_names(parser: ArgumentParser) -> None:
    """Add the options of `runs rm`."""
    add_results_option(parser)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="hashes, or their beginnings")


def add_name(parser: ArgumentParser) -> None:
    """Add the options of `runs unlock`."""
    add_results_option(parser)
    parser.add_argument("run", help="hash of a run, or its beginning (see status)")


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
    return print_lines(
        [f"{folder} is free; it was held by {owner}, which stops writing if it is still alive."]
    )


KINDS = {
    "verify": Command(add_results_option, verify_all),
    "rm": Command(add_names, remove_named),
    "unlock": Command(add_name, unlock_named),
}
