"""Rewrite stored runs whose hash holds the number of items, as every run's did until version 0.2.

    .venv/bin/python -m scripts.convert_results OLD NEW

OLD is a results directory, whose runs are a folder or an archive; NEW is a new one. Runs that
differ only in their number of items become one, the largest, since a run continues with more items.
Of a folder, records, samples and token replays are converted, of an archive the records; the
dataset hash of an embedded task becomes that of its frozen items, if the run had these items. Runs
of version 0.1, which name pieces by module path, are converted too. What cannot be converted is
named and left out.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dllm_bench.benchmarks.embedded import FrozenTask
from dllm_bench.core.declared import made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.registry import TARGET
from dllm_bench.store.archive import RECORD, REPLAYS, SAMPLES, archive_of
from dllm_bench.store.files import CHECK, parse
from dllm_bench.store.inputs import benchmark_of
from dllm_bench.store.record import SCHEMA, RunRecord, SampleRecord
from dllm_bench.store.seal import first_items
from dllm_bench.store.spec import RunSpec, digest

FORMER_PATHS: Mapping[str, str] = read_yaml(Path(__file__).with_name("former_names.yaml"))
"""Registered name -> module path that runs of version 0.1 stored and hashed in its place."""
NAMES = {path: name for name, path in FORMER_PATHS.items()}
CLOCKED = ("seconds", "session")
"""Columns that differ between two runs of the same samples, besides those that end in _s."""


@dataclass(frozen=True)
class OldRun:
    """A sealed run as it was stored."""

    folder: str
    """Its folder below the runs folder."""
    plain: dict[str, Any]
    """Its record."""
    files: Path | None
    """Its folder on the disk; None for a run of an archive."""


def old_runs(results: Path) -> Iterator[OldRun]:
    """Yield the sealed runs of a results directory, of its folder and of its archive."""
    for record in sorted(results.glob(f"runs/*/*/*/{RECORD}")):
        folder = record.parent.relative_to(results / "runs").as_posix()
        yield OldRun(folder, json.loads(record.read_bytes()), record.parent)
    archive = archive_of(results / "runs")
    if archive.is_file():
        with tarfile.open(archive, "r:xz") as packed:
            for member in packed:
                file = packed.extractfile(member)
                if file is not None and member.name.endswith(f"/{RECORD}"):
                    folder = str(Path(member.name).parent.relative_to("runs"))
                    yield OldRun(folder, json.loads(file.read()), None)


def renamed(plain: Any, names: Mapping[str, str]) -> Any:
    """Return plain data with the names of its pieces replaced, at any depth."""
    if isinstance(plain, Mapping):
        return {
            key: names.get(value, value)
            if key == TARGET and isinstance(value, str)
            else renamed(value, names)
            for key, value in plain.items()
        }
    if isinstance(plain, (list, tuple)):
        return [renamed(value, names) for value in plain]
    return plain


def former_hash(spec: RunSpec) -> str:
    """Return the hash that a run had while its number of items was part of it."""
    limit = {} if spec.limit is None else {"limit": spec.limit}
    return digest({**spec.identity(), **limit})


def hash_of_paths(spec: RunSpec) -> str:
    """Return the hash that a run had while its pieces were named by their module paths."""
    return digest(renamed({**spec.identity(), "limit": spec.limit}, FORMER_PATHS))


def renewed(spec: RunSpec) -> RunSpec:
    """Return the run with today's hash of its items; DllmBenchError if they are other items."""
    benchmark = benchmark_of(spec.benchmark)
    with patch.object(FrozenTask, "items_hash", lambda *_: None):
        vars(benchmark).pop("_hash", None)
        dataset = benchmark.dataset_hash()
    vars(benchmark).pop("_hash", None)
    if dataset != spec.inputs["dataset"]:
        raise DllmBenchError("its items are not those of this version")
    return replace(spec, inputs={**spec.inputs, "dataset": benchmark.dataset_hash()})


def converted(run: OldRun) -> RunRecord:
    """Return the record under its new hash."""
    spec = RunSpec.from_plain(renamed(run.plain["spec"], NAMES))
    if run.plain["identity_hash"] not in (former_hash(spec), hash_of_paths(spec)):
        raise DllmBenchError("its hash is not that of its specification")
    new = renewed(spec)
    plain = {**run.plain, "spec": new, "identity_hash": new.identity_hash, "schema": SCHEMA}
    plain.pop("sha256", None)
    return made_from(RunRecord, plain)


def differing(small: RunRecord, large: RunRecord) -> list[str]:
    """Return the columns in which a run differs from the first items of a larger one."""
    part = first_items(large, small.items)
    return [
        name
        for name, column in small.columns.items()
        if name not in CLOCKED and not name.endswith("_s") and part.columns.get(name) != column
    ]


def write(run: OldRun, record: RunRecord, results: Path) -> None:
    """Write a converted run with the files that belong to it."""
    folder = results / "runs" / record.spec.folder
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(record.to_json(), encoding="utf-8")
    if run.files is None:
        return
    if (run.files / REPLAYS).is_file():
        shutil.copyfile(run.files / REPLAYS, folder / REPLAYS)
    if (run.files / SAMPLES).is_file():
        lines = [parse(line) for line in (run.files / SAMPLES).read_bytes().splitlines()]
        own = [{key: line[key] for key in line if key not in ("run", CHECK)} for line in lines]
        samples = [made_from(SampleRecord, line) for line in own]
        text = "".join(sample.to_line(record.spec.short) + "\n" for sample in samples)
        (folder / SAMPLES).write_text(text, encoding="utf-8")


def convert(old: Path, new: Path) -> None:
    """Convert a results directory; print a line for each run that is left out or differs."""
    kept: dict[str, tuple[OldRun, RunRecord]] = {}
    merged = 0
    for run in old_runs(old):
        try:
            record = converted(run)
        except (DllmBenchError, ValueError, KeyError) as error:
            print(f"{run.folder}: left out, {error}")
            continue
        earlier = kept.get(record.identity_hash)
        if earlier:
            merged += 1
            small, large = sorted((record, earlier[1]), key=lambda one: one.items)
            if names := differing(small, large):
                print(f"{run.folder}: differs from the larger run in {', '.join(names)}")
        if not earlier or earlier[1].items < record.items:
            kept[record.identity_hash] = (run, record)
    for run, record in kept.values():
        write(run, record, new)
    print(f"{len(kept)} runs below {new}; {merged} were the first items of another")


if __name__ == "__main__":
    if len(sys.argv) != 3 or Path(sys.argv[2], "runs").exists():
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
