"""Make results/reference from a results directory in which everything was measured (`make all`).

    .venv/bin/python -m scripts.update_reference [RESULTS]
    .venv/bin/python -m scripts.update_docs

Copied are the records without their samples, the tables, and the figures as csv and svg; what was
in results/reference before is removed. RESULTS is results/ where nothing is said. To be done after
every change of what a run is: weights, generated items, decoders, the embedded profile.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
KEPT = (
    "runs/*/*/*/record.json",
    "tables/*/*",
    "figures/embedded/*/*.csv",
    "figures/embedded/*/*.svg",
)


def copy(results: Path) -> int:
    """Replace the reference; returns the number of files."""
    files = [file for pattern in KEPT for file in sorted(results.glob(pattern))]
    if not files:
        sys.exit(f"Nothing is stored below {results}; run `make all` first.")
    shutil.rmtree(REFERENCE, ignore_errors=True)
    for file in files:
        place = REFERENCE / file.relative_to(results)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return len(files)


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results"
    print(f"{copy(source)} files copied to {REFERENCE}")
