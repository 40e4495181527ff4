"""Make results/reference from a results directory in which everything was measured (`make all`).

    .venv/bin/python -m scripts.update_reference [RESULTS]
    .venv/bin/python -m scripts.update_docs

The reference holds the sealed records without their samples, packed into `runs.tar.xz`, the tables
as Markdown and json, and the figures as csv and svg; whatever was in results/reference before is
removed. RESULTS is results/ by default. Run it after every change of what a run is: weights,
generated items, decoders, the embedded profile.
"""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
RECORDS = "runs/*/*/*/record.json"
COPIED = (
    "tables/*/*.md",
    "tables/*/*.json",
    "figures/embedded/*/*.csv",
    "figures/embedded/*/*.svg",
)


def pack(results: Path, archive: Path) -> int:
    """Pack the sealed records; equal records give equal bytes. Returns their number."""
    records = sorted(results.glob(RECORDS))
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for record in records:
            content = record.read_bytes()
            member = tarfile.TarInfo(record.relative_to(results).as_posix())
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return len(records)


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
    records = pack(results, REFERENCE / "runs.tar.xz")
    print(f"{records} records packed and {len(files)} files copied to {REFERENCE}")
    return len(files) + 1


if __name__ == "__main__":
    replace(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results")
