"""Read every file of a run and compare them, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dllm_bench.core.declared import made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.files import every_line, read_checked
from dllm_bench.store.record import RunRecord, Session
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import (
    SAMPLES,
    SESSIONS,
    RunHead,
    StoredLines,
    hash_in_name,
    read_head,
    read_record,
)


@dataclass(frozen=True)
class VerifiedRun:
    """Findings in one run folder."""

    folder: Path
    damages: list[str]  # messages; empty if everything is as it was written


def verify(folder: Path) -> VerifiedRun | None:
    """Read every file of `folder`; return None if it is not a run folder."""
    damages = list[str]()
    record: RunRecord | None = None
    head: RunHead | None = None
    try:
        record = read_record(folder)
    except DllmBenchError as error:
        damages.append(str(error))
    try:
        head = read_head(folder)
    except DllmBenchError as error:
        damages.append(str(error))
    lines = StoredLines.of(folder)
    if record is None and head is None and not damages:
        if not lines.good:
            return None
        damages.append(f"{folder} holds samples of a run that nothing describes; move it away.")
    damages += [lines.damage] if lines.damaged else []
    damages += [f"{folder}: {SESSIONS} {place}." for place in damaged_sessions(folder)]
    damages += disagreements(folder, record, head, lines)
    return VerifiedRun(folder, damages)


def damaged_sessions(folder: Path) -> Iterator[str]:
    """Yield a clause for each invalid line of sessions.jsonl."""
    for number, line in enumerate(every_line(folder / SESSIONS), start=1):
        try:
            plain = read_checked(line)
            plain.pop("index", None)
            made_from(Session, plain)
        except ValueError as error:
            yield (
                f"line {number} is damaged ({error}); its samples are whole, the machine and code "
                "they were decoded with are not known"
            )


def disagreements(
    folder: Path, record: RunRecord | None, head: RunHead | None, lines: StoredLines
) -> Iterator[str]:
    """Yield a message for each disagreement between two files of a run."""
    specs: list[RunSpec] = [part.spec for part in (record, head) if part is not None]
    for spec in specs:
        if hash_in_name(folder) != spec.short:
            yield f"{folder} holds run {spec.short}; move it away."
    if len({spec.identity_hash for spec in specs}) > 1:
        yield f"{folder}: spec.json and record.json are of two runs; move the folder away."
    if record is None or not (lines.good or lines.damaged or lines.torn):
        return  # a sealed record may be stored without its samples
    lost = [key for key in record.columns["id"] if key not in lines.samples]
    if lost:
        yield (
            f"{folder}: the record has {len(record.columns['id'])} samples, {SAMPLES} "
            f"{len(lines.samples)} ({lost[0]!r} is missing); its numbers are whole, what is lost "
            "cannot be shown or graded again."
        )
