"""Decode runs of results/reference again and say whether every count of every sample is the same.

    .venv/bin/python -m scripts.check_reference [WORD ...] [--all] [--limit N]

One run of each decoder and model (or --all) whose names hold one of the words. Counts are
all columns but times: forwards, rows, tokens, forced positions, right answers. To be done after a
change of the loop, of pieces or of models that should alter no token; where tokens do change,
`DECODING_VERSION` is raised and the reference is made anew. New runs lie in a temporary folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dllm_bench.launch.run_one import needs_several, run
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import RECORD, Store, read_record
from scripts.update_reference import REFERENCE

TIMES = ("_s", "seconds")  # how columns of times end


def chosen(words: Sequence[str], every: bool) -> Iterator[RunRecord]:
    """The runs that are decoded again, of one process each."""
    seen: set[tuple[str, str]] = set()
    for path in sorted((REFERENCE / "runs").rglob(RECORD)):
        record = read_record(path.parent)
        spec = record.spec
        kind = spec.label, str(spec.model["name"])
        wanted = not words or any(word in " ".join(kind) for word in words)
        if wanted and (every or kind not in seen) and not needs_several(spec.hardware):
            seen.add(kind)
            yield record


def differences(old: RunRecord, new: RunRecord) -> dict[str, int]:
    """Samples that differ, by column."""
    counts = [name for name in old.columns if not name.endswith(TIMES)]
    pairs = {name: zip(old.columns[name], new.columns[name], strict=True) for name in counts}
    found = {name: sum(a != b for a, b in rows) for name, rows in pairs.items()}
    return {name: number for name, number in found.items() if number}


def main() -> None:
    """Print a line per run; the exit status is 1 where one differs."""
    parser = argparse.ArgumentParser(description="Decode runs of results/reference again.")
    parser.add_argument("words", nargs="*", help="of a decoder's or a model's name")
    parser.add_argument("--all", action="store_true", help="every run, not one of each kind")
    parser.add_argument("--limit", type=int, help="stop after so many runs")
    asked = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, old in enumerate(chosen(asked.words, asked.all), 1):
            begun = time.monotonic()
            found = differences(old, run(old.spec, store=Store(Path(folder))))
            different += bool(found)
            said = ", ".join(f"{name} in {n} samples" for name, n in found.items()) or "the same"
            name = f"{old.spec.benchmark['name']} {old.spec.model['name']} {old.spec.label}"
            print(f"{name} {old.spec.short} ({time.monotonic() - begun:.0f} s): {said}", flush=True)
            if number == asked.limit:
                break
    sys.exit(f"{different} runs differ." if different else 0)


if __name__ == "__main__":
    main()
