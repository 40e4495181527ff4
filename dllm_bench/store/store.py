"""The run folders: `<root>/<benchmark>/<model>/<decoder>-<hash10>/`.

spec.json is the specification of the run. samples.jsonl grows by a line per finished request,
sessions.jsonl by a line per start. record.json is written when all requested items are done: if it
exists, the run is complete for that number of items. A request for more items continues the run and
rewrites the record; a request for fewer reads a part of it (`seal.first_items`). A folder has one
writer at a time: one process, or several that share the requests, each with its own samples file,
which the next start merges. Folders are found by hash, so a label may change.

Every line, and spec.json and record.json as a whole, has a checksum (`checked`). The next start
sets aside a line that was damaged, or half-written by a killed process (`*.damaged`), and decodes
its sample again; readers refuse it.

Sealed runs may also be packed into one archive next to the runs folder (`runs.tar.xz`, with the
tree of `runs/`), like the committed reference results. Archived runs are read like others, with
samples if these were packed; nothing here writes the archive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self, TypeVar

from dllm_bench.core.declared import Count, fits, made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import strike_out, strike_out_of
from dllm_bench.metrics.sample_stats import SessionIndex
from dllm_bench.store import files
from dllm_bench.store.archive import RECORD, SAMPLES, archive_of, archived
from dllm_bench.store.cache import fingerprint
from dllm_bench.store.lock import Lock, owner_of
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.seal import first_items
from dllm_bench.store.spec import SHOWN, RunSpec

SPEC, SESSIONS = "spec.json", "sessions.jsonl"
ERROR, LOG, LOCK = "error.txt", "log.txt", "lock"
ASIDE = ".damaged"  # ends the name of a file with what could not be used of another
WAIT_S = 3.0  # between two looks at a run that another process makes
Found = TypeVar("Found", "RunEntry", Path)
Read = TypeVar("Read")
SHARED = "samples-{}.jsonl"  # samples of one of several processes that share a run's requests


class RunState(StrEnum):
    """Progress of a run."""

    ABSENT = "absent"  # it has no folder
    PARTIAL = "partial"  # begun, but not complete
    FAILED = "failed"  # partial, and the last attempt ended with an error
    SEALED = "sealed"  # complete
    DAMAGED = "damaged"  # one of its files was changed or damaged


@dataclass(frozen=True)
class RunEntry:
    """A run folder as `status` shows it."""

    path: Path
    state: RunState
    spec: RunSpec
    done: int  # finished samples
    total: int | None  # samples of the whole run; None before the first start counted them
    error: str = ""  # why the last attempt failed, or what is damaged
    record: RunRecord | None = field(default=None, repr=False, compare=False)  # of a sealed run


class DamagedRunError(DllmBenchError):
    """A run folder whose specification cannot be read, so that the run is unknown."""


@dataclass(frozen=True)
class Store:
    """All runs below `root`."""

    root: Path

    def __post_init__(self) -> None:
        files.guard(Path(self.root).parent)

    @classmethod
    def in_results(cls, results: object) -> Self:
        """Return the store of a results directory; DllmBenchError if it cannot be one."""
        return cls(files.results_directory(results) / "runs")

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        """Make the store again in another process, which then guards its folder too."""
        return type(self), (self.root,)

    def path(self, spec: RunSpec) -> Path:
        """Return the run's folder, on disk or in the archive: the one with its hash, or else the
        one it would get. DllmBenchError if two folders have the hash, because one was copied or
        renamed.
        """
        folder = Path(self.root) / spec.folder
        on_disk = files.matching(folder.parent, f"*-{spec.short}")
        if len(on_disk) > 1:
            names = " and ".join(one.name for one in on_disk)
            raise DllmBenchError(
                f"In {folder.parent}, {names} are folders of one run; move all but one of them "
                "away."
            )
        packed = archived(Path(self.root)).by_hash.get(spec.short, spec.folder)
        return on_disk[0] if on_disk else Path(self.root) / packed

    def record(self, spec: RunSpec) -> RunRecord | None:
        """Return the record of the first `spec.limit` items; None if it has fewer."""
        record = self.largest_record(spec)
        return first_items(record, spec.limit) if record and record.covers(spec.limit) else None

    def largest_record(self, spec: RunSpec) -> RunRecord | None:
        """Return the sealed record of a run, with any number of items; None if there is none."""
        record = read_record(self.path(spec))
        if record is not None and record.identity_hash != spec.identity_hash:
            raise DllmBenchError(
                f"{self.path(spec) / RECORD} belongs to run {record.identity_hash}, not to "
                f"{spec.identity_hash}; move the folder away."
            )
        return record

    def state(self, spec: RunSpec) -> RunState:
        """Return the progress of the run of `spec`, from file names alone."""
        return _state(self.path(spec))

    def entry(self, spec: RunSpec) -> RunEntry | None:
        """Return the run's folder as `status` shows it."""
        return read_entry(self.path(spec))

    def entries(self, prefix: str = "") -> Iterator[RunEntry]:
        """Yield every run folder, or those whose hash begins with `prefix`, by path, without those
        whose specification is damaged.
        """
        for folder in self.folders_named(prefix):
            entry = None
            with suppress(DamagedRunError):
                entry = read_entry(folder)
            if entry and entry.spec.identity_hash.startswith(prefix):
                yield entry

    def records(self) -> Iterator[RunRecord]:
        """Return every sealed record, by path."""
        return filter(None, map(read_record, self.folders()))

    def folders(self) -> list[Path]:
        """Return the run folders, sorted by path, including links with such names."""
        root = Path(self.root)
        packed = (root / name for name in archived(root).records)
        return sorted({*files.matching(root, "*/*/*"), *packed})

    def folders_named(self, prefix: str) -> list[Path]:
        """Return the run folders whose names end with a hash that begins with `prefix`. Names hold
        the first digits of a hash, so a longer prefix is compared as far as these."""
        return [path for path in self.folders() if hash_in_name(path).startswith(prefix[:SHOWN])]

    def find(self, prefix: str) -> RunEntry:
        """Return the one run whose hash begins with `prefix`; only folders named so are read."""
        entries = list(self.entries(prefix))
        for folder in () if entries else self.folders_named(prefix):
            read_entry(folder)  # raises if it is damaged
        for entry in entries if prefix else ():
            self.path(entry.spec)  # raises where it has two folders
        return only(entries, f"runs below {self.root} have", prefix)

    def folder_of(self, short: str) -> Path:
        """Return the one run folder whose name ends with a hash that begins with `short`, which may
        be the whole hash."""
        return only(self.folders_named(short), f"run folders below {self.root} end with", short)

    def open(self, spec: RunSpec) -> OpenRunFolder:
        """Return the run's folder, locked for writing; closes with the `with` block."""
        return OpenRunFolder.start(self.path(spec), spec)

    def wait_for(self, spec: RunSpec, report: Callable[[str, str], None]) -> None:
        """Wait until no other process writes the run's folder; reports which one does."""
        lock, reported = self.path(spec) / LOCK, ""
        while (
            files.is_folder(lock.parent) and self.record(spec) is None and (owner := owner_of(lock))
        ):
            if owner != reported:
                report(spec.folder, f"being made by {owner}")
                reported = owner
            time.sleep(WAIT_S)

    def share(self, spec: RunSpec, index: int, session: int, zero_s: float = 0) -> RunShare:
        """Return a share of a run whose folder another process has open, see `RunShare`. The
        finished samples are those of earlier sessions: other shares may be decoding already.
        """
        folder = self.path(spec)
        lock, stored = Lock(folder / LOCK), read_samples(folder)
        done = {key: sample for key, sample in stored.items() if sample.session != session}
        return RunShare(
            folder, spec, lock, samples=done, zero_s=zero_s, index=index, session=session
        )


def only(found: Sequence[Found], which: str, prefix: str) -> Found:
    """Return the one that was found; DllmBenchError unless it is one, and a hash was given."""
    if len(found) != 1 or not prefix:
        raise DllmBenchError(
            f"{len(found)} {which} a hash that begins with {prefix!r}; give a hash (or more of it) "
            "that `dllm-bench status` lists."
        )
    return found[0]


def remove(folders: Sequence[Path]) -> None:
    """Delete run folders; if a run is in progress or in an archive, none is deleted
    (DllmBenchError).
    """
    packed = [folder for folder in folders if files.lstat(folder) is None]
    if packed:
        raise DllmBenchError(
            f"{len(packed)} of {len(folders)} runs to be removed are in a read-only archive, "
            f"{packed[0].name} first; use another directory (--results)."
        )
    for folder in folders:  # one lock at a time: each takes an open file
        with Lock(folder / LOCK):
            pass
    for folder in folders:
        with Lock(folder / LOCK), files.explain_write_errors(folder):
            files.remove_folder(folder)


def hash_in_name(folder: Path) -> str:
    """Return the hash at the end of a run folder's name."""
    return folder.name.rpartition("-")[2]


def read_record(folder: Path) -> RunRecord | None:
    """Return the sealed record in `folder`, or the archive's for that folder."""
    content = file_of_run(folder, RECORD)
    return None if content is None else RunRecord.from_json(content, str(folder / RECORD))


def sealed_record(entry: RunEntry) -> RunRecord:
    """Return the record of a run that must be complete."""
    record = read_record(entry.path)
    if record is None:
        raise DllmBenchError(
            f"Run {entry.spec.short} is {entry.state.value} ({entry.done} samples); complete it "
            "with the command that started it."
        )
    return record


def record_fingerprint(folder: Path) -> list[int]:
    """Return a value that changes whenever the sealed record of `folder` does, beginning with its
    time of change (ns); empty if there is none.
    """
    own = fingerprint(folder / RECORD)
    if not own and archived_file(folder, RECORD) is not None:
        return fingerprint(archive_of(folder.parents[2]))
    return own


def file_of_run(folder: Path, name: str) -> bytes | None:
    """Return the content of a run's file, in its folder or in the archive; None if it has none."""
    content = files.stored_bytes(folder / name)
    return archived_file(folder, name) if content is None else content


def archived_file(folder: Path, name: str) -> bytes | None:
    """Return the content of a run's file in the archive beside the runs folder, if there is one."""
    if len(folder.parents) < 3:
        return None
    runs = folder.parents[2]
    return archived(runs).files.get(name, {}).get(folder.relative_to(runs).as_posix())


def read_entry(folder: Path) -> RunEntry | None:
    """Return the content of `folder`, without locking it; None if it is not a run folder.

    Raises DamagedRunError if neither its record nor its specification can be read.
    """
    record, damage = None, ""
    try:
        record = read_record(folder)
    except DllmBenchError as unreadable:
        damage = str(unreadable)
    if record is not None:
        n = len(record.columns["id"])
        return RunEntry(folder, RunState.SEALED, record.spec, n, n, record=record)
    head = read_head(folder)
    if head is None and damage:
        raise DamagedRunError(damage)
    if head is None:
        return None
    lines = StoredLines.of(folder)
    damage = damage or (lines.damage if lines.damaged else "")
    error = (files.stored_bytes(folder / ERROR) or b"").decode(errors="replace").strip()
    state = RunState.DAMAGED if damage else _state(folder)
    return RunEntry(folder, state, head.spec, len(lines.samples), head.total, damage or error)


def read_samples(folder: Path) -> dict[str, SampleRecord]:
    """Return finished samples by id, in the order they were written; raises if one is damaged."""
    lines = StoredLines.of(folder)
    if lines.damaged:
        raise DllmBenchError(lines.damage)
    return lines.samples


def sample_files(folder: Path) -> list[Path]:
    """Return the files with finished samples: one, and one per process while several share the
    run."""
    shares = files.matching(folder, SHARED.format("*"))
    return [path for path in (folder / SAMPLES, *shares) if files.lstat(path)]


def sample_contents(folder: Path) -> list[tuple[str, bytes]]:
    """Return (name, content) of each file with finished samples; of an archived run, the one."""
    on_disk = [(path.name, files.stored_bytes(path) or b"") for path in sample_files(folder)]
    packed = None if on_disk else archived_file(folder, SAMPLES)
    return on_disk if packed is None else [(SAMPLES, packed)]


@dataclass(frozen=True)
class StoredLines:
    """The lines of a run's samples files."""

    folder: Path
    samples: dict[str, SampleRecord]  # by id, in the order they were written
    good: list[bytes]  # the lines they were read from
    damaged: dict[str, bytes]  # place ("samples.jsonl line 3, why") -> a line that is no sample
    torn: list[bytes]  # half-written last lines

    @classmethod
    def of(cls, folder: Path, run: str = "") -> StoredLines:
        """Return all lines in `folder`; with `run`, a short hash, those of others count as
        damaged."""
        lines = cls(folder, {}, [], {}, [])
        for name, content in sample_contents(folder):
            *whole, torn = content.split(b"\n")
            lines.torn.extend([torn] if torn else [])
            for number, line in enumerate(whole, start=1):
                try:
                    sample = SampleRecord.from_line(line, run)
                except ValueError as error:
                    lines.damaged[f"{name} line {number}, {error}"] = line
                    continue
                if sample.id not in lines.samples:
                    lines.samples[sample.id] = sample
                    lines.good.append(line)
        return lines

    @property
    def damage(self) -> str:
        """Return a message about the damage and what to do."""
        first, *more = self.damaged
        again = "give the command that made the run again, which sets it aside and decodes again"
        if files.is_file(self.folder / RECORD):
            again = f"move {RECORD} away, then {again}"
        others = f" and {len(more)} more" if more else ""
        return f"{self.folder} is damaged ({first}{others}); {again}."


def _state(folder: Path) -> RunState:
    if files.is_file(folder / RECORD) or archived_file(folder, RECORD) is not None:
        return RunState.SEALED
    if files.is_file(folder / ERROR):
        return RunState.FAILED
    return RunState.PARTIAL if files.is_file(folder / SPEC) else RunState.ABSENT


@dataclass(frozen=True)
class RunHead:
    """The content of spec.json."""

    spec: RunSpec
    total: int | None  # samples of the whole run


def read_head(folder: Path) -> RunHead | None:
    """Return the content of spec.json, None without one; raises DamagedRunError if it is
    damaged."""
    path = folder / SPEC
    try:
        content = files.stored_bytes(path)
    except DllmBenchError as error:
        raise DamagedRunError(str(error)) from error
    if content is None:
        return None
    try:
        head = files.read_checked(content)
        spec, total = RunSpec.from_plain(head["spec"], str(path)), head["total"]
        if not fits(total, Count | None):
            raise ValueError("its number of samples is no count")
        if head["identity_hash"] != spec.identity_hash:
            raise ValueError("its hash is that of another run")
        return RunHead(spec, total)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedRunError(
            f"{path} is damaged ({error}); repeat the command that made the run: it rewrites the "
            "file and keeps the samples that belong to the run."
        ) from error


def read_sessions(folder: Path) -> tuple[dict[int, Session], dict[str, bytes]]:
    """Return (the sessions of a run by index, place and reason -> a line that is no session)."""
    by_index, damaged = dict[int, Session](), dict[str, bytes]()
    lines = (files.stored_bytes(folder / SESSIONS) or b"").splitlines()  # the last may lack its end
    for number, line in enumerate(lines):
        try:
            plain = files.read_checked(line)
            index = plain.pop("index", number)
            if not fits(index, SessionIndex):
                raise ValueError("an index that no session has")
            by_index[index] = made_from(Session, plain)
        except (ValueError, TypeError) as error:
            damaged[f"{SESSIONS} line {number + 1}, {error}"] = line
    return by_index, damaged


def verify(folder: Path) -> list[str] | None:
    """Read every file of `folder` and compare them, without changing anything.

    Returns a message per damage, none if everything is as it was written; None if it is not a run
    folder.
    """
    damages = list[str]()

    def content(read: Callable[[Path], Read]) -> Read | None:
        try:
            return read(folder)
        except DllmBenchError as error:
            damages.append(str(error))
            return None

    record, head = content(read_record), content(read_head)
    lines = content(StoredLines.of) or StoredLines(folder, {}, [], {}, [])
    _, damaged_sessions = content(read_sessions) or ({}, {})
    if not (record or head or damages):
        if not lines.good:
            return None
        damages.append(f"{folder} holds samples of a run that nothing describes; move it away.")
    damages += [lines.damage] if lines.damaged else []
    damages += [
        f"{folder} is damaged ({place}); its samples are whole, the machine and code they were "
        "decoded with are not known."
        for place in damaged_sessions
    ]
    return [*damages, *_disagreements(folder, record, head, lines)]


def _disagreements(
    folder: Path, record: RunRecord | None, head: RunHead | None, lines: StoredLines
) -> Iterator[str]:
    """Yield a message for each disagreement between two files of a run."""
    specs = [part.spec for part in (record, head) if part]
    for spec in specs:
        if hash_in_name(folder) != spec.short:
            yield f"{folder} holds run {spec.short}; move it away."
    if len(set(specs)) > 1:
        yield f"{folder}: {SPEC} and {RECORD} are of two runs; move the folder away."
    if record is None or not (sample_files(folder) or lines.good or lines.damaged or lines.torn):
        return  # a sealed record may be stored without its samples
    lost = [key for key in record.columns["id"] if key not in lines.samples]
    if lost:
        yield (
            f"{folder}: the record has {len(record.columns['id'])} samples, {SAMPLES} "
            f"{len(lines.samples)} ({lost[0]!r} is missing); its numbers are whole, what is lost "
            "cannot be shown or graded again."
        )


@dataclass
class OpenRunFolder:
    """A run folder that this process has locked for writing."""

    folder: Path
    spec: RunSpec
    lock: Lock
    total: int | None = None  # samples of the whole run; None if not known yet
    record: RunRecord | None = None  # set if the run is sealed with the requested items
    of_fewer_items: RunRecord | None = None  # set if it is sealed with fewer
    samples: dict[str, SampleRecord] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    zero_s: float | None = None  # clock at the start of a session shared by processes
    _writer: files.Appender | None = None

    @classmethod
    def start(cls, folder: Path, spec: RunSpec) -> OpenRunFolder:
        """Make and lock the folder, and read the finished samples."""
        with files.explain_write_errors(folder):
            files.make_folder(folder)
        lock = Lock(folder / LOCK)
        lock.acquire()
        try:
            files.remove_temporaries(folder)
            run = cls(folder, spec, lock)
            run._load()
        except BaseException:
            lock.release()
            raise
        return run

    def _load(self) -> None:
        sealed = read_record(self.folder)
        if sealed is not None and sealed.covers(self.spec.limit):
            self.record = first_items(sealed, self.spec.limit)
            return
        self.of_fewer_items = sealed
        self._claim()
        self._gather()
        self._read_sessions()
        files.remove_file(self.folder / ERROR)

    def _gather(self) -> None:
        """Read the finished samples and merge them into one file of whole lines."""
        parts = sample_files(self.folder)
        lines = StoredLines.of(self.folder, self.spec.short)
        self.samples = lines.samples
        self._set_aside(SAMPLES, lines.damaged, lines.torn)
        kept = b"".join(line + b"\n" for line in lines.good)
        shares = [path for path in parts if path.name != SAMPLES]
        stored = sum(found.st_size for path in parts if (found := files.lstat(path)))
        if shares or len(kept) != stored:  # also where they are in an archive alone
            files.write_atomic(self.folder / SAMPLES, kept)
        for path in shares:
            files.remove_file(path)

    def _set_aside(self, name: str, damaged: Mapping[str, bytes], torn: Sequence[bytes]) -> None:
        """Append the unusable parts of a file to `<name>.damaged`."""
        if not damaged and not torn:
            return
        path = self.folder / (name + ASIDE)
        with files.explain_write_errors(path):
            files.append_bytes(path, b"".join(line + b"\n" for line in (*damaged.values(), *torn)))
        places = [*damaged, *["a half-written last line"] * len(torn)]
        self.note(f"set aside in {path.name}: {'; '.join(places)}")

    def _read_sessions(self) -> None:
        """Read the sessions, those that are in the record alone too; one whose line is damaged
        keeps its number and has no environment."""
        stored, damaged = read_sessions(self.folder)
        self._set_aside(SESSIONS, damaged, ())
        sealed = self.of_fewer_items.sessions if self.of_fewer_items else ()
        by_index = {**dict(enumerate(sealed)), **stored}
        used = [sample.session for sample in self.samples.values()]
        count = max([*by_index, *used], default=-1) + 1
        self.sessions = [by_index.get(index, Session(0.0, 0, {})) for index in range(count)]
        if damaged:
            self._write_sessions()

    def _claim(self) -> None:
        """Write spec.json, or check that the existing one belongs to this run."""
        try:
            head = read_head(self.folder)
        except DamagedRunError as error:
            self.note(f"set aside as {SPEC + ASIDE}: {error}")
            files.rename(self.folder / SPEC, SPEC + ASIDE)
            head = None
        if head is not None and head.spec != self.spec:
            raise DllmBenchError(
                f"{self.folder} belongs to run {head.spec.identity_hash}, not to "
                f"{self.spec.identity_hash}; move it away."
            )
        if head is None:
            self._write_head(None)
        else:
            self.total = head.total

    def _write_head(self, total: int | None) -> None:
        self.total = total
        settings = self.spec.to_plain()
        if strike_out_of(settings) != settings:
            raise DllmBenchError(
                f"The settings of run {self.spec.short} hold a key that is in use, and they are "
                "stored; take it out of them, and name its environment variable (model.key_env)."
            )
        head = {"identity_hash": self.spec.identity_hash, "spec": settings, "total": total}
        files.write_atomic(
            self.folder / SPEC, json.dumps(files.checked(head), indent=1, sort_keys=True) + "\n"
        )

    def expect(self, total: int) -> None:
        """Store the run's number of samples."""
        if total != self.total:
            self._write_head(total)

    def wants(self, turn: int, key: str) -> bool:
        """Return whether request `turn` of the run, with id `key`, still has to be decoded."""
        return key not in self.samples

    @property
    def samples_file(self) -> Path:
        """The file that finished samples are appended to."""
        return self.folder / SAMPLES

    def begin(self, session: Session) -> int:
        """Store the start of a session; returns its index, which its samples refer to."""
        self.sessions.append(session)
        self._write_sessions()
        return len(self.sessions) - 1

    def _write_sessions(self) -> None:
        lines = [files.checked_line({"index": i, **asdict(s)}) for i, s in enumerate(self.sessions)]
        files.write_atomic(self.folder / SESSIONS, "".join(line + "\n" for line in lines))

    def append(self, sample: SampleRecord) -> None:
        """Add a finished sample."""
        self._check_lock()
        if self._writer is None:
            self._writer = files.Appender(self.samples_file)
        self._writer.append(sample.to_line(self.spec.short))
        self.samples[sample.id] = sample

    def seal(self, record: RunRecord) -> None:
        """Store the record, which completes the run. If the samples on disk are not those that were
        decoded, nothing is stored (DllmBenchError).
        """
        self._check_lock()
        self._close_writer()
        self._check_stored()
        files.write_atomic(self.folder / RECORD, record.to_json())
        self.record = record

    def _check_stored(self) -> None:
        """Compare the samples on disk with those in memory, line by line."""
        short, stored = self.spec.short, StoredLines.of(self.folder).samples
        other = [
            key
            for key, sample in self.samples.items()
            if key not in stored or stored[key].to_line(short) != sample.to_line(short)
        ]
        if other:
            raise DllmBenchError(
                f"{self.folder} was to be sealed with {len(self.samples)} samples, and "
                f"{len(other)} of them are not on disk as they were decoded ({other[0]!r} first): "
                f"{SAMPLES} was cut or changed while the run was writing it. "
                "Nothing is sealed; give the same command again, which decodes what is missing."
            )

    def _check_lock(self) -> None:
        """Raise if the folder is gone, or if another process may be writing it."""
        if not files.is_folder(self.folder):
            raise DllmBenchError(
                f"{self.folder} was deleted while the run was writing it; give the same command "
                "again, which decodes its samples again."
            )
        if self.lock.lost:
            raise DllmBenchError(
                f"{self.folder} was taken over by the process that {self.lock.path} names, since "
                "this one did not touch the lock for too long, or its lock was deleted; leave the "
                "run to that process, or give the same command again if there is none."
            )

    def fail(self, message: str) -> None:
        """Store the reason why the run stopped, for `status` and tables."""
        self.note(f"stopped: {message}")
        if self.lock.lost:
            return
        with suppress(DllmBenchError):  # a full disk may be the reason
            files.write_atomic(self.folder / ERROR, message + "\n", durable=False)

    def note(self, message: str) -> None:
        """Append one line to log.txt."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError, DllmBenchError):
            files.append_bytes(self.folder / LOG, f"{stamp} {strike_out(message)}\n".encode())

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        """Sync the samples to disk and release the lock."""
        try:
            self._close_writer()
        finally:
            self.lock.release()

    def __enter__(self) -> OpenRunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class RunShare(OpenRunFolder):
    """One process's share of a run on N replicas: every N-th request, from `index` on.

    The process that started the shares holds the folder's lock.
    """

    index: int = 0
    session: int = 0  # index of the session that all shares belong to

    @property
    def samples_file(self) -> Path:
        return self.folder / SHARED.format(self.index)

    def wants(self, turn: int, key: str) -> bool:
        return turn % self.spec.hardware.replicas == self.index and super().wants(turn, key)

    def expect(self, total: int) -> None:
        if self.index == 0:
            super().expect(total)

    def begin(self, session: Session) -> int:
        """Store this process's session, with its environment, as the one of all; returns its index.

        Every share may do so, since all write the same but for what differs between processes.
        """
        self._read_sessions()
        self.sessions[self.session] = session
        self._write_sessions()
        return self.session
