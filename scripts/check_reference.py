"""Decode runs of results/reference again and compare every count of every sample.

    .venv/bin/python -m scripts.check_reference [WORD ...] [--all] [--samples N]

Checks one run of each pair of decoder and model (every run with --all) whose names contain one of
the words; with --samples N, only the first N samples of each run. All columns except timings are
compared: forwards, rows, tokens, forced positions, scores. Run it after a change of the loops,
pieces or models that should not change any token. After a change that should, raise
`DECODING_VERSION` and make the reference again. The new runs are written to a temporary folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch.local import run
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store
from scripts.update_reference import REFERENCE

TIME_SUFFIXES = ("_s", "seconds")
"""Suffixes of the names of timing columns."""


def reference_records() -> Iterator[RunRecord]:
    """Return the records of the reference results."""
    return Store(REFERENCE / "runs").records()


def chosen_records(words: Sequence[str], every: bool) -> Iterator[RunRecord]:
    """Yield the records to check, without runs that used several processes."""
    seen: set[tuple[str, str]] = set()
    for record in reference_records():
        spec = record.spec
        pair = spec.label, spec.model.name
        wanted = not words or any(word in " ".join(pair) for word in words)
        if wanted and (every or pair not in seen) and not spec.hardware.several:
            seen.add(pair)
            yield record


def differences(old: RunRecord, new: RunRecord) -> dict[str, int]:
    """Column of `old` -> number of samples of `new` that differ; equal columns are left out."""
    row_of = {sample: row for row, sample in enumerate(old.columns["id"])}
    rows = [row_of[sample] for sample in new.columns["id"]]
    differing = {}
    for name, column in old.columns.items():
        if not name.endswith(TIME_SUFFIXES):
            found = new.columns.get(name, [None] * len(rows))  # left out if it is None throughout
            differing[name] = sum(column[row] != one for row, one in zip(rows, found, strict=True))
    return {name: number for name, number in differing.items() if number}


def main() -> None:
    """Print one line per run; the exit status is 1 if a run differs, fails, or none was chosen."""
    parser = argparse.ArgumentParser(description="Decode runs of results/reference again.")
    parser.add_argument("words", nargs="*", help="part of a decoder's or a model's name")
    parser.add_argument("--all", action="store_true", help="every run, not one of each pair")
    parser.add_argument("--samples", type=int, metavar="N", help="first samples of a run to check")
    args = parser.parse_args()
    checked = different = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for old in chosen_records(args.words, args.all):
            started = time.monotonic()
            spec = replace(old.spec, limit=args.samples or old.spec.limit)
            name = f"{old.spec.benchmark.name} {old.spec.model.name} {old.spec.label}"
            try:
                columns = differences(old, run(spec, store=Store(Path(folder))))
            except DllmBenchError as error:
                failed += 1
                print(f"{name} {old.spec.short}: {error}", flush=True)
                continue
            different += bool(columns)
            result = ", ".join(f"{name} differs in {n} samples" for name, n in columns.items())
            seconds = time.monotonic() - started
            print(f"{name} {old.spec.short} ({seconds:.0f} s): {result or 'the same'}", flush=True)
            checked += 1
    if failed:
        sys.exit(f"{different} runs differ and {failed} could not be decoded.")
    if not checked:
        sys.exit(f"No run of {REFERENCE} matches; give other words, or none for all pairs.")
    sys.exit(f"{different} runs differ." if different else 0)


if __name__ == "__main__":
    main()
