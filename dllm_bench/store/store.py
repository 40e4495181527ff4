"""The run folders: `<root>/<benchmark>/<model>/<decoder>-<hash10>/`.

spec.json says what the run is. samples.jsonl grows by a line per finished request, sessions.jsonl
by a line per start. record.json is written at once when everything is done: if it exists, the run
is complete. One run at a time writes a folder: one process, or several that share the requests,
each with a samples file of its own, which the next start merges. What a killed process left is used
as it is, except for a half-written last line. Folders are found by hash, so a label may change.

Sealed records may also be packed into one archive beside the runs folder (`runs.tar.xz`, with the
tree of `runs/`), as the committed reference results are. Archived runs are read like any other and
have no samples; nothing here writes the archive.
"""

from __future__ import annotations

import json
import lzma
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.cache import fingerprint
from dllm_bench.store.files import Appender, Lock, explain_write_errors, whole_lines, write_atomic
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.spec import SHOWN, Plain, RunSpec

SPEC, SAMPLES, SESSIONS, RECORD = "spec.json", "samples.jsonl", "sessions.jsonl", "record.json"
ERROR, LOG, LOCK = "error.txt", "log.txt", "lock"
ARCHIVE = ".tar.xz"  # sealed records, packed beside the runs folder
SHARED = "samples-{}.jsonl"  # samples of one of several processes that share a run's requests


class RunState(StrEnum):
    """How far a run is."""

    ABSENT = "absent"  # it has no folder
    PARTIAL = "partial"  # begun, and not complete
    FAILED = "failed"  # partial, and the last attempt ended with an error
    SEALED = "sealed"  # complete


@dataclass(frozen=True)
class RunEntry:
    """A run folder as `status` shows it."""

    path: Path
    state: RunState
    spec: RunSpec
    done: int  # finished samples
    total: int | None  # samples of the whole run; None before the first start counted them
    error: str = ""  # why the last attempt failed


@dataclass(frozen=True)
class Store:
    """All runs below `root`."""

    root: Path

    def path(self, spec: RunSpec) -> Path:
        """The run's folder: the one that has its hash, else the one it would get."""
        folder = Path(self.root) / spec.folder
        for short in (spec.short, spec.former_hash[:SHOWN]):
            named = [f for f in self._siblings(folder) if f.name.endswith(f"-{short}")]
            if named:
                return named[0]
        return folder

    def _siblings(self, folder: Path) -> list[Path]:
        """Run folders beside `folder`, those of the archive included, sorted."""
        on_disk = folder.parent.iterdir() if folder.parent.is_dir() else ()
        archived = (f for f in _archived_folders(Path(self.root)) if f.parent == folder.parent)
        return sorted({*on_disk, *archived})

    def record(self, spec: RunSpec) -> RunRecord | None:
        """The sealed record of `spec`, None when the run is not complete."""
        record = read_record(self.path(spec))
        if record is not None and record.identity_hash != spec.identity_hash:
            raise DllmBenchError(
                f"{self.path(spec) / RECORD} belongs to run {record.identity_hash}, not to "
                f"{spec.identity_hash}; move the folder away."
            )
        return record

    def state(self, spec: RunSpec) -> RunState:
        """How far the run of `spec` is, from file names alone."""
        return _state(self.path(spec))

    def entry(self, spec: RunSpec) -> RunEntry | None:
        """The run's folder as `status` shows it."""
        return read_entry(self.path(spec))

    def entries(self) -> Iterator[RunEntry]:
        """Every run folder, by path."""
        for folder in self.folders():
            entry = read_entry(folder)
            if entry is not None:
                yield entry

    def records(self) -> Iterator[RunRecord]:
        """Every sealed record, by path."""
        for folder in self.folders():
            record = read_record(folder)
            if record is not None:
                yield record

    def folders(self) -> list[Path]:
        """Run folders, sorted by path."""
        on_disk = (path for path in Path(self.root).glob("*/*/*") if path.is_dir())
        return sorted({*on_disk, *_archived_folders(Path(self.root))})

    def find(self, prefix: str) -> RunEntry:
        """The one run whose hash begins with `prefix`."""
        entries = [e for e in self.entries() if e.spec.identity_hash.startswith(prefix)]
        if len(entries) != 1 or not prefix:
            raise DllmBenchError(
                f"{len(entries)} runs below {self.root} have a hash that begins with {prefix!r}; "
                "give a hash (or more of it) that `dllm-bench status` lists."
            )
        return entries[0]

    def open(self, spec: RunSpec, total: int | None = None) -> OpenRunFolder:
        """The run's folder, locked for explain_write_errors; closes with the `with` block."""
        return OpenRunFolder.start(self.path(spec), spec, total)

    def share(
        self, spec: RunSpec, index: int, of: int, session: int, zero_s: float = 0
    ) -> RunShare:
        """Every `of`-th request from `index` on, of a run whose folder another process has open."""
        return RunShare.join(self.path(spec), spec, index, of, session, zero_s)


def read_record(folder: Path) -> RunRecord | None:
    """The sealed record in `folder`, or the archive's for that folder."""
    path = folder / RECORD
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        archived = _archived_text(folder)
        if archived is None:
            return None
        text = archived
    return RunRecord.from_json(text, str(path))


def record_fingerprint(folder: Path) -> list[int]:
    """What changes when the sealed record of `folder` does, its time of change (ns) first; empty
    where there is none.
    """
    own = fingerprint(folder / RECORD)
    return own or (fingerprint(_archive_of(folder)) if _archived_text(folder) is not None else [])


def _archive_of(folder: Path) -> Path:
    """Where the archive of the runs folder above a run's folder lies."""
    runs = folder.parents[2]
    return runs.with_name(runs.name + ARCHIVE)


def _archived_text(folder: Path) -> str | None:
    if len(folder.parents) < 3:
        return None
    return _archived(folder.parents[2]).get(folder.relative_to(folder.parents[2]).as_posix())


def _archived_folders(root: Path) -> list[Path]:
    return [root / name for name in _archived(root)]


def _archived(root: Path) -> dict[str, str]:
    """Run folder below `root` -> text of its record, for all runs of the archive beside `root`."""
    archive = root.with_name(root.name + ARCHIVE)
    return _unpacked(archive, tuple(fingerprint(archive))) if archive.is_file() else {}


@lru_cache(maxsize=4)
def _unpacked(archive: Path, _mark: tuple[int, ...]) -> dict[str, str]:
    """Records of an archive, kept in memory until its file changes."""
    try:
        with tarfile.open(archive, "r:xz") as packed:
            members = {
                Path(*Path(member.name).parts[1:]).parent.as_posix(): packed.extractfile(member)
                for member in packed
                if Path(member.name).name == RECORD
            }
            return {name: file.read().decode() for name, file in members.items() if file}
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DllmBenchError(
            f"{archive} is no archive of run records ({error}); restore it, or move it away."
        ) from error


def read_entry(folder: Path) -> RunEntry | None:
    """What `folder` contains, without locking it; None if it is no run folder."""
    record, damage = None, ""
    try:
        record = read_record(folder)
    except DllmBenchError as unreadable:
        damage = str(unreadable)
    if record is not None:
        n = len(record.columns["id"])
        return RunEntry(folder, RunState.SEALED, record.spec, n, n)
    head = _read_head(folder)
    if head is None:
        return None
    done = sum(path.read_bytes().count(b"\n") for path in sample_files(folder))
    error = (folder / ERROR).read_text(encoding="utf-8") if (folder / ERROR).exists() else ""
    spec = RunSpec.from_plain(head["spec"])
    state = RunState.FAILED if damage else _state(folder)
    return RunEntry(folder, state, spec, done, head["total"], damage or error.strip())


def read_samples(folder: Path) -> dict[str, SampleRecord]:
    """Finished samples by id, in the order they were written; broken lines are skipped."""
    return _parse(_sample_lines(folder))[0]


def sample_files(folder: Path) -> list[Path]:
    """The files with finished samples: one, and one per process while several share the run."""
    shares = sorted(folder.glob(SHARED.format("*")))
    return [path for path in (folder / SAMPLES, *shares) if path.exists()]


def _sample_lines(folder: Path) -> list[bytes]:
    return [line for path in sample_files(folder) for line in whole_lines(path)]


def _state(folder: Path) -> RunState:
    if (folder / RECORD).exists() or _archived_text(folder) is not None:
        return RunState.SEALED
    if (folder / ERROR).exists():
        return RunState.FAILED
    return RunState.PARTIAL if (folder / SPEC).exists() else RunState.ABSENT


def _read_head(folder: Path) -> Plain | None:
    try:
        head = json.loads((folder / SPEC).read_text(encoding="utf-8"))
        return {"spec": head["spec"], "total": head["total"]}
    except (FileNotFoundError, ValueError, KeyError):
        return None


def _parse(stored: list[bytes]) -> tuple[dict[str, SampleRecord], list[bytes]]:
    """Samples by id, and the lines they were read from."""
    samples: dict[str, SampleRecord] = {}
    good: list[bytes] = []
    for line in stored:
        try:
            sample = SampleRecord.from_line(line)
        except ValueError:
            continue
        if sample.id not in samples:
            samples[sample.id] = sample
            good.append(line)
    return samples, good


@dataclass
class OpenRunFolder:
    """A run folder that this process has locked for writing."""

    folder: Path
    spec: RunSpec
    lock: Lock
    total: int | None  # samples of the whole run; None if not known yet
    record: RunRecord | None = None  # set if the run is sealed
    samples: dict[str, SampleRecord] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    zero_s: float | None = None  # the clock at the start of a session that processes share
    _writer: Appender | None = None

    @classmethod
    def start(cls, folder: Path, spec: RunSpec, total: int | None) -> OpenRunFolder:
        """Make and lock the folder, and read what is finished."""
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder / LOCK)
        lock.acquire()
        try:
            run = cls(folder, spec, lock, total)
            run._load()
        except BaseException:
            lock.release()
            raise
        return run

    @property
    def state(self) -> RunState:
        """Sealed, or partial."""
        return RunState.SEALED if self.record else RunState.PARTIAL

    def _load(self) -> None:
        self.record = read_record(self.folder)
        if self.record is not None:
            return
        self._claim()
        self._gather()
        self.sessions = _read_sessions(self.folder)
        (self.folder / ERROR).unlink(missing_ok=True)

    def _gather(self) -> None:
        """Read the finished samples and merge them into one file of whole lines."""
        files = sample_files(self.folder)
        length = sum(path.stat().st_size for path in files)
        self.samples, good = _parse(_sample_lines(self.folder))
        kept = b"".join(line + b"\n" for line in good)
        if len(kept) < length:
            self.note(f"dropped {length - len(kept)} bytes of broken lines in {SAMPLES}")
        shares = [path for path in files if path.name != SAMPLES]
        if len(kept) < length or shares:
            write_atomic(self.folder / SAMPLES, kept.decode())
        for path in shares:
            path.unlink()

    def _claim(self) -> None:
        """Write spec.json, or check that the folder's is of this run."""
        head = _read_head(self.folder)
        if head is None or (self.total is not None and head["total"] != self.total):
            self._write_head(self.total)
            return
        self.total = head["total"]
        stored = RunSpec.from_plain(head["spec"])
        if stored != self.spec:
            raise DllmBenchError(
                f"{self.folder} belongs to run {stored.identity_hash}, not to "
                f"{self.spec.identity_hash}; move it away."
            )

    def _write_head(self, total: int | None) -> None:
        self.total = total
        head = {
            "identity_hash": self.spec.identity_hash,
            "spec": self.spec.to_plain(),
            "total": total,
        }
        write_atomic(self.folder / SPEC, json.dumps(head, indent=1, sort_keys=True) + "\n")

    def expect(self, total: int) -> None:
        """Store how many samples the run has."""
        if total != self.total:
            self._write_head(total)

    def wants(self, turn: int, key: str) -> bool:
        """Whether request `turn` of the run, with id `key`, is still to be decoded."""
        return key not in self.samples

    @property
    def samples_file(self) -> Path:
        """The file that finished samples are appended to."""
        return self.folder / SAMPLES

    def begin(self, session: Session) -> int:
        """Store the start of a session; returns its index, which its samples refer to."""
        self.sessions.append(session)
        text = "".join(json.dumps(asdict(s), ensure_ascii=False) + "\n" for s in self.sessions)
        write_atomic(self.folder / SESSIONS, text)
        return len(self.sessions) - 1

    def append(self, sample: SampleRecord) -> None:
        """Add a finished sample."""
        self._check_lock()
        if self._writer is None:
            self._writer = Appender(self.samples_file)
        self._writer.append(sample.to_line())
        self.samples[sample.id] = sample

    def seal(self, record: RunRecord) -> None:
        """Store the record, which completes the run."""
        self._check_lock()
        self._close_writer()
        write_atomic(self.folder / RECORD, record.to_json())
        self.record = record

    def _check_lock(self) -> None:
        """Raise if another process took over the lock: two must not write at the same time."""
        if self.lock.lost:
            raise DllmBenchError(
                f"{self.folder} was taken over by the process that {self.lock.path} names, since "
                "this one did not touch the lock for too long; leave the run to that process."
            )

    def fail(self, message: str) -> None:
        """Store why the run stopped, for `status` and tables."""
        self.note(f"stopped: {message}")
        if self.lock.lost:
            return
        with suppress(OSError):  # a full disk may be the reason
            (self.folder / ERROR).write_text(message + "\n", encoding="utf-8")

    def note(self, message: str) -> None:
        """Append one line to log.txt."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError), open(self.folder / LOG, "a", encoding="utf-8") as file:
            file.write(f"{stamp} {message}\n")

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass
class RunShare(OpenRunFolder):
    """One process's share of a run's requests: every `of`-th, from `index` on.

    The process that started the shares holds the folder's lock.
    """

    index: int = 0
    of: int = 1
    session: int = 0  # index of the session that all shares belong to

    @classmethod
    def join(
        cls, folder: Path, spec: RunSpec, index: int, of: int, session: int, zero_s: float
    ) -> RunShare:
        """Read all finished samples, of any process."""
        lock = Lock(folder / LOCK)
        share = cls(folder, spec, lock, None, index=index, of=of, session=session, zero_s=zero_s)
        share.samples = read_samples(folder)
        return share

    @property
    def samples_file(self) -> Path:
        return self.folder / SHARED.format(self.index)

    def wants(self, turn: int, key: str) -> bool:
        return turn % self.of == self.index and super().wants(turn, key)

    def expect(self, total: int) -> None:
        if self.index == 0:
            super().expect(total)

    def begin(self, session: Session) -> int:
        return self.session


def _read_sessions(folder: Path) -> list[Session]:
    return [Session(**json.loads(line)) for line in whole_lines(folder / SESSIONS)]
