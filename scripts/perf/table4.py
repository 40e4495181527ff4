"""Where the time of `make table4` goes, from a clone to the whole table: measured, and drawn.

    .venv/bin/python -m scripts.perf.table4 [--items 30] [--python python3.12] [--draw]

Clones the commit of this checkout into a temporary folder, calls `make table4` there, and splits
its time by the lines it prints and by what its runs store: when a session began, when each sample
began and how long it took, when a record was sealed. Seconds of the workers are divided by their
number, so that all parts add up to the time that passed. Which share of decoding is forwards is not
stored: it is measured afterwards on one item of every sixth run (`split`). The machine should do
nothing else. Writes `table4.json` beside this file and the drawing of docs/perf.md; `--draw` draws
what was measured before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dllm_bench.figures import style
from dllm_bench.store.provenance import environment
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store, read_samples

ROOT = Path(__file__).resolve().parents[2]
MEASURED = Path(__file__).with_name("table4.json")
DRAWING = ROOT / "docs" / "images" / "table4_time.svg"
STAGE_LINE = re.compile(r"- (\d+) items a run: ")
SPLIT_EVERY = 6  # the first of every six runs tells the share of forwards
SHOWN = 0.05  # seconds of the least part that is drawn
COLOURS = {  # by part; Okabe and Ito
    "install": "#8a8a8a",
    "imports, planning": "#b8b8b8",
    "imports, first models": "#b8b8b8",
    "models, warm-up": "#e69f00",
    "forwards": "#0072b2",
    "rounds outside forwards": "#56b4e9",
    "texts, files": "#999933",
    "grading": "#009e73",
    "one worker waits": "#d8d8d8",
    "table": "#cc79a7",
}
Part = tuple[str, str, float]  # stage, part, seconds


@dataclass(frozen=True)
class Session:
    """What one run did in one stage. Times are in seconds since the epoch.

    began: after its warm-up; graded_from: when its last sample was stored; sealed: when its record
    was written; decoding: seconds in which requests were decoded.
    """

    began: float
    graded_from: float
    sealed: float
    decoding: float


@dataclass(frozen=True)
class Stage:
    """The runs of one number of items: from `began` until the table was written at `ended`."""

    items: int
    began: float
    ended: float
    sessions: Sequence[Session]


# --- measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """What was seen of one `make table4`.

    stages: (items, when its table was written, run folder -> when its record was sealed).
    """

    began: float
    installed: float
    planned: float
    stages: Sequence[tuple[int, float, Mapping[str, float]]]
    results: Path


def make_table(clone: Path, items: int, python: str) -> Made:
    """Call `make table4` in a clone and note when it prints what; output goes to the terminal."""
    results = clone / "results"
    command = ["make", "table4", f"ITEMS={items}", f"PYTHON={python}"]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "DLLM_BENCH_RESULTS": str(results)}
    environ.pop("PYTHONPATH", None)
    began, planned, stages = time.time(), 0.0, list[tuple[int, float, Mapping[str, float]]]()
    made = subprocess.Popen(
        command, cwd=clone, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert made.stdout is not None
    for line in made.stdout:
        sys.stdout.write(line)
        if line.startswith("Making "):
            planned = time.time()
        elif found := STAGE_LINE.search(line):
            stages.append((int(found[1]), time.time(), sealed_times(results)))
    if made.wait():
        raise SystemExit(f"make table4 in {clone} ended with exit code {made.returncode}.")
    if not stages or stages[-1][0] < items:
        stages.append((items, 0.0, {}))
    last = (stages[-1][0], time.time(), sealed_times(results))
    [stamp] = (clone / ".venv").glob(".installed-*")
    return Made(began, stamp.stat().st_mtime, planned, [*stages[:-1], last], results)


def sealed_times(results: Path) -> dict[str, float]:
    """Return when each run's record was sealed, by the name of its folder."""
    records = (results / "runs").glob("*/*/*/record.json")
    return {file.parent.name: json.loads(file.read_text())["sealed_at"] for file in records}


def stages_of(made: Made) -> list[Stage]:
    """Return the stages with what each run did in them, from the stored samples."""
    store, began, stages = Store(made.results / "runs"), made.planned, list[Stage]()
    runs = [(store.path(one.spec), one) for one in store.records()]
    for items, ended, sealed in made.stages:
        sessions = [
            session_of(folder, index, sealed[folder.name])
            for folder, record in runs
            for index, session in enumerate(record.sessions)
            if began <= session.started_at < ended and folder.name in sealed
        ]
        stages.append(Stage(items, began, ended, sessions))
        began = ended
    return stages


def session_of(folder: Path, index: int, sealed: float) -> Session:
    """Return the times of a run's session, by its samples."""
    [*samples] = (one for one in read_samples(folder).values() if one.session == index)
    last = max(one.started_at + (one.seconds or 0.0) for one in samples)
    decoding = sum(one.seconds or 0.0 for one in samples)
    return Session(min(one.started_at for one in samples), last, sealed, decoding)


def forward_share(records: Sequence[RunRecord]) -> float:
    """Return which share of decoding is forwards, measured on the first item of some runs."""
    from dllm_bench.runs.dependencies import REAL
    from dllm_bench.runs.runner import ready
    from scripts.perf.split import split

    forwards = whole = 0.0
    for record in sorted(records, key=lambda one: one.spec.folder)[::SPLIT_EVERY]:
        spec, loaded, decoder = record.spec, REAL.model(record.spec), REAL.decoder(record.spec)
        request = next(iter(REAL.benchmark(spec).requests(loaded.encode)))
        given: Any = (decoder, loaded.denoiser, ready(spec, decoder, loaded, request))
        split(*given)  # warms up
        parts, generation = split(*given)
        forwards += parts["forward"] * len(generation.trace)
        whole += sum(parts.values()) * len(generation.trace)
    return forwards / whole


# --- split ----------------------------------------------------------------------------------------


def parts_of(made: Made, stages: Sequence[Stage], workers: int, forwards: float) -> list[Part]:
    """Return the parts of the whole time as they pass, without those that take none."""
    parts = [("clone", "install", made.installed - made.began)]
    parts.append(("clone", "imports, planning", made.planned - made.installed))
    for index, stage in enumerate(stages):
        named = stage_parts(stage, workers, forwards, first=index == 0)
        parts += [(f"{stage.items} items", part, seconds) for part, seconds in named]
    return [part for part in parts if part[2] >= SHOWN]


def stage_parts(
    stage: Stage, workers: int, forwards: float, first: bool
) -> Iterator[tuple[str, float]]:
    """Yield the parts of a stage; seconds of workers are divided by their number."""
    free = [stage.began] * workers  # since when each worker has had nothing to do
    imports = starts = 0.0
    for one in sorted(stage.sessions, key=lambda session: session.began):
        worker = max((w for w in range(workers) if free[w] <= one.began), key=free.__getitem__)
        if first and free[worker] == stage.began:
            imports += one.began - free[worker]
        else:
            starts += one.began - free[worker]
        free[worker] = one.sealed
    decoding = sum(one.decoding for one in stage.sessions)
    stored = sum(one.graded_from - one.began for one in stage.sessions) - decoding
    grading = sum(one.sealed - one.graded_from for one in stage.sessions)
    ended = max(free)
    yield "imports, first models", imports / workers
    yield "models, warm-up", starts / workers
    yield "forwards", forwards * decoding / workers
    yield "rounds outside forwards", (1 - forwards) * decoding / workers
    yield "texts, files", stored / workers
    yield "grading", grading / workers
    yield "one worker waits", sum(ended - since for since in free) / workers
    yield "table", stage.ended - ended


# --- drawn ----------------------------------------------------------------------------------------


def drawing(measured: Mapping[str, Any]) -> bytes:
    """Draw one bar a part, each where the one before ends, with its seconds and share."""
    parts, total = measured["parts"], measured["total_s"]
    with style.applied():
        figure = style.empty_figure(7.2, 0.9 + 0.22 * len(parts))
        ax = figure.subplots()
        began = 0.0
        for row, (_, part, seconds) in enumerate(parts):
            ax.barh(row, seconds, left=began, color=COLOURS[part], height=0.72)
            text = f"{seconds:.1f} s, {100 * seconds / total:.0f} %"
            late = began + seconds > 0.8 * total and began > 0.2 * total
            where = (began, row) if late else (min(began + seconds, 0.8 * total), row)
            ax.annotate(
                text,
                where,
                (-4 if late else 4, 0),
                textcoords="offset points",
                ha="right" if late else "left",
                va="center",
                fontsize=7,
            )
            began += seconds
        ax.set_yticks(range(len(parts)), [f"{stage}: {part}" for stage, part, _ in parts])
        ax.set(ylim=(len(parts) - 0.4, -0.6), xlim=(0, total), xlabel=caption(measured))
        ax.grid(axis="y", visible=False)
        title = f"make table4 ITEMS={measured['items']}: {in_minutes(total)} from a clone"
        ax.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
        return style.as_file(figure, "svg")


def in_minutes(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def caption(measured: Mapping[str, Any]) -> str:
    """Return the axis and what was measured on which machine."""
    return (
        f"seconds since the start · {measured['cpu']}, {measured['cores']} cores, "
        f"{measured['workers']} workers, load {measured['load']} before · "
        f"commit {(measured['commit'] or 'unknown')[:10]}"
    )


# --- the command ----------------------------------------------------------------------------------


def measure(items: int, python: str) -> dict[str, Any]:
    """Make the table in a clone, and return its parts with the machine."""
    here = environment()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "dllm-bench"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        made = make_table(clone, items, python)
        stages = stages_of(made)
        share = forward_share([*Store(made.results / "runs").records()])
    workers = min(2, here["cores"] or 1)  # as `dllm-bench table --run` has for embedded models
    parts = [(*names, round(s, 2)) for *names, s in parts_of(made, stages, workers, share)]
    facts = {name: here[name] for name in ("cpu", "cores", "load", "commit")}
    facts |= {"items": items, "workers": workers, "forward_share": round(share, 3)}
    return {**facts, "total_s": round(stages[-1].ended - made.began, 2), "parts": parts}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure unless told to draw only, write the JSON and the drawing."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.perf.table4", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--items", type=int, default=30, help="items a cell (default: 30)")
    parser.add_argument("--python", default=sys.executable, help="makes the clone's .venv")
    parser.add_argument("--draw", action="store_true", help="draw what was measured before")
    args = parser.parse_args(argv)
    if not args.draw:
        measured = measure(args.items, args.python)
        MEASURED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    DRAWING.write_bytes(drawing(json.loads(MEASURED.read_text(encoding="utf-8"))))
    print(f"written: {MEASURED} and {DRAWING}")


if __name__ == "__main__":
    main()
