"""Make results/reference from a results directory in which everything was measured (`make all`).

    .venv/bin/python -m scripts.update_reference [RESULTS]
    .venv/bin/python -m scripts.update_reference RESULTS --add TABLE...
    .venv/bin/python -m scripts.update_docs

The reference holds the sealed records that a table, a figure or a claim shows, with samples and
token replays of the runs whose figures read them, packed into `runs.tar.xz` with an index beside
it, the tables as Markdown and json, and the figures as csv and svg. Whatever was in
results/reference before is removed. RESULTS is results/ by default. Run it after every change of
what a run is: weights, frozen items, decoders, the embedded profile. With --add everything stays,
the sealed records of RESULTS are added (without samples, so for tables alone), the tables named are
written again, and records that nothing shows any more are taken out.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from dllm_bench.api.compose import compose
from dllm_bench.claims.verdict import judge_stored
from dllm_bench.cli.main import main
from dllm_bench.figures.spec import load_figure
from dllm_bench.store.archive import REPLAYS, SAMPLES
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.index import RecordIndex
from dllm_bench.store.store import RECORD, Store
from dllm_bench.tables.load import load_profile, names_of
from dllm_bench.tables.plan import Planner
from dllm_bench.tables.spec import EMBEDDED

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
RECORDS = "runs/*/*/*/record.json"
COPIED = (
    "tables/*/*.md",
    "tables/*/*.json",
    "figures/embedded/*/*.csv",
    "figures/embedded/*/*.svg",
)


def shown_runs(results: Path) -> set[str]:
    """Hashes of the runs that the written tables and figures name, and that the claims rest on."""
    tables = results.glob("tables/*/*.json")
    hashes = {run for table in tables for run in json.loads(table.read_text())["runs"]}
    for figure in results.glob("figures/embedded/*/*.csv"):
        hashes |= set(figure.read_text().replace(",", " ").split())
    planner = Planner.cached(SettingsCache(results, compose), Store(results / "runs"))
    judgements = judge_stored(load_profile(EMBEDDED), planner)
    runs = (run for one in judgements for run in one.runs)
    return hashes | {run.record.identity_hash for run in runs if run.record}


def runs_with_series(results: Path) -> set[str]:
    """Return the hashes of the runs whose samples a figure reads, to draw series of a run."""
    hashes: set[str] = set()
    for name in names_of("figure"):
        drawn = results / "figures" / EMBEDDED / f"{name}.csv"
        if drawn.is_file() and load_figure(name).calls:
            hashes |= set(drawn.read_text().replace(",", " ").split())
    return hashes


def pack(
    results: Path,
    archive: Path,
    shown: Collection[str] | None = None,
    with_samples: Collection[str] = (),
) -> int:
    """Pack the sealed records, or those of the runs `shown`, and the samples and token replays of
    the runs `with_samples`; equal files give equal bytes. Returns the number of records.
    """
    files, count = list[Path](), 0
    for record in sorted(results.glob(RECORDS)):
        run = json.loads(record.read_bytes())["identity_hash"]
        if shown is None or run in shown:
            count += 1
            files.append(record)
            also = (record.with_name(name) for name in (SAMPLES, REPLAYS))
            files += [path for path in also if run in with_samples and path.is_file()]
    write_archive(archive, {f.relative_to(results).as_posix(): f.read_bytes() for f in files})
    return count


def write_archive(archive: Path, files: Mapping[str, bytes]) -> None:
    """Pack files by their names, sorted."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            packed.addfile(member, io.BytesIO(files[name]))


def read_archive(archive: Path) -> dict[str, bytes]:
    """Return the content of each file of an archive, by its name."""
    with tarfile.open(archive) as packed:
        members = ((member.name, packed.extractfile(member)) for member in packed)
        return {name: content.read() for name, content in members if content}


def prune(reference: Path) -> int:
    """Take out the records that no table, figure or claim of a reference shows, with their samples;
    returns the number of these records."""
    archive = reference / "runs.tar.xz"
    files, shown = read_archive(archive), shown_runs(reference)
    records = [name for name in files if name.endswith(RECORD)]
    hashes = {name: json.loads(files[name])["identity_hash"] for name in records}
    gone = {Path(name).parent for name in records if hashes[name] not in shown}
    if gone:
        kept = {name: text for name, text in files.items() if Path(name).parent not in gone}
        write_archive(archive, kept)
        ship_index(reference / "runs")
    return len(gone)


def add(results: Path, reference: Path, tables: Sequence[str]) -> int:
    """Add the sealed records of `results` to a reference and write these of its tables anew;
    returns the number of records that are new; a repeated run replaces its earlier record."""
    archive = reference / "runs.tar.xz"
    files = read_archive(archive)
    records = {r.relative_to(results).as_posix(): r.read_bytes() for r in results.glob(RECORDS)}
    write_archive(archive, files | records)
    ship_index(reference / "runs")
    for table in tables:
        if main(["table", table, "--results", str(reference)]):
            sys.exit(f"{table} could not be written; see above.")
        for other in (reference / "tables").glob(f"{table}.*"):
            if other.suffix not in (".md", ".json"):
                other.unlink()
    return sum(files.get(name) != content for name, content in records.items())


def ship_index(runs: Path) -> None:
    """Write the index beside the archive of a runs folder, so that listing it is quick."""
    index = RecordIndex(Store(runs))
    list(index.sealed())
    index.ship()


def replace(results: Path) -> int:
    """Replace the reference by what `results` holds; returns the number of files."""
    files = [file for pattern in COPIED for file in sorted(results.glob(pattern))]
    if not files or not any(results.glob(RECORDS)):
        sys.exit(f"No runs and tables are stored below {results}; run `make all` first.")
    shutil.rmtree(REFERENCE, ignore_errors=True)
    for file in files:
        place = REFERENCE / file.relative_to(results)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    archive = REFERENCE / "runs.tar.xz"
    records = pack(results, archive, shown_runs(results), runs_with_series(results))
    ship_index(REFERENCE / "runs")
    print(f"{records} records packed and {len(files)} files copied to {REFERENCE}")
    return len(files) + 2


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m scripts.update_reference")
    parser.add_argument("results", nargs="?", type=Path, default=ROOT / "results")
    parser.add_argument(
        "--add", nargs="+", metavar="TABLE", help="add runs, and write these tables"
    )
    arguments = parser.parse_args()
    if arguments.add:
        print(add(arguments.results, REFERENCE, arguments.add), "records added")
        print(prune(REFERENCE), "records taken out")
    else:
        replace(arguments.results)
