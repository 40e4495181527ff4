"""The index of a store's sealed records: `IndexedRun` of each, so that lists, estimates and
comparisons need not read thousands of records.

A missing record is read and added. A value is valid as long as its record's fingerprint (for an
archived record, the archive's) is unchanged. Runs are found without unpacking the archive as long
as it is unchanged.

An archive may come with its own index, made together with it (`ship`), so that its runs can be
listed without unpacking. It is used if it states the archive's sha256. It is as trustworthy as the
archive, and its types are checked.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

from dllm_bench import __version__
from dllm_bench.core.declared import Count, made_from
from dllm_bench.core.decoder import DecoderSummary
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.registry import TARGET
from dllm_bench.store.archive import RECORD, archive_of, archived, is_run_folder, unpacked
from dllm_bench.store.cache import DerivedCache, Fingerprint, fingerprint
from dllm_bench.store.files import matching, open_file, write_atomic
from dllm_bench.store.groups import Role, setting_in
from dllm_bench.store.inputs import decoder_of
from dllm_bench.store.record import SHOWN_METRICS, RunRecord
from dllm_bench.store.spec import RunSpec, digest, flat_settings, split
from dllm_bench.store.store import RunEntry, RunState, Store, read_entry, read_record

KIND, MADE_BY = "runs", (__version__, "2")  # the number is raised when the fields change
SETTINGS = (TARGET, "name", "max_new_tokens", "shots", "repeats")  # that an estimate reads
TIMED = ("forwards", "seconds")  # columns of a record
GROUPS = ("model", "benchmark", "hardware")
OTHER_TYPES = (TypeError, ValueError, AttributeError, ArithmeticError, KeyError)
"""Errors that settings of a forged record may raise."""
PACKED = "packed"  # key of the names of the archived runs
SHIPPED = "index.json.xz"  # beside an archive
ARCHIVE, VALUES = "archive", "values"  # keys of its JSON: the archive's sha256, values by key


@dataclass(frozen=True)
class TimedRun:
    """Cost of a run, for estimates of others."""

    config: dict[str, Any]
    """`SETTINGS` of its configuration groups, and `limit`."""
    decoder: DecoderSummary
    """Properties that its decoder declares."""
    samples: Count
    """Number of samples."""
    seconds: float
    """Seconds of all samples."""
    forwards: float
    """Forwards of all samples."""

    @classmethod
    def of(cls, record: RunRecord) -> Self | None:
        """Return the cost of a record; None without forwards and timings, as for served engines and
        batches, and if its settings have types that no run has."""
        spec, columns = record.spec, record.columns
        if any(None in columns[name] for name in TIMED):
            return None
        groups = {name: getattr(spec, name) for name in GROUPS} | {"decoder": {"name": spec.label}}
        with suppress(DllmBenchError, *OTHER_TYPES):
            kept = {
                name: {key: group[key] for key in SETTINGS if key in group}
                for name, group in groups.items()
            }
            config = {**kept, "limit": spec.limit}
            forwards, seconds = (float(sum(columns[name])) for name in TIMED)
            # without sources: a record must not decide which files are opened
            identity = split({"decoder": spec.decoder})[Role.IDENTITY].get("decoder", {})
            return cls(config, summary_of(identity), len(columns["id"]), seconds, forwards)
        return None


def summary_of(decoder: Mapping[str, Any]) -> DecoderSummary:
    """Return the properties that the pieces of a decoder declare. If the decoder cannot be made
    here, because a file that it reads is missing, return those that follow from its settings alone.
    """
    return _summary(json.dumps(dict(decoder), sort_keys=True))


@lru_cache(maxsize=1024)
def _summary(settings: str) -> DecoderSummary:
    """Do what `summary_of` does, once for equal settings."""
    decoder = json.loads(settings)
    with suppress(DllmBenchError):
        summary: DecoderSummary = decoder_of(decoder).summary()
        return summary
    return DecoderSummary(block=setting_in(decoder, "schedule.block"), drafts="draft" in decoder)


@dataclass(frozen=True)
class IndexedRun:
    """A sealed record in the index."""

    run: str
    """Its short hash."""
    benchmark: str
    """Name of its benchmark."""
    model: str
    """Name of its model."""
    decoder: str
    """Label of its decoder."""
    settings: dict[str, str]
    """All settings that can change its output, as text."""
    samples: Count
    """Number of samples."""
    score: float | None
    """Mean score."""
    interval: list[float] | None
    """The score's interval."""
    ungraded: str
    """Remark next to the score if grading failed for samples."""
    metrics: dict[str, float | None]
    """`SHOWN_METRICS`."""
    timed: TimedRun | None
    """Its cost; None without timings."""
    listed: str
    """The rest as JSON, read only by comparisons: see `listed_record`."""
    is_own: bool = True
    """False if it came with an archive; `listed` may then contain anything."""

    @classmethod
    def of(cls, record: RunRecord) -> IndexedRun:
        """Return the indexed part of a record."""
        spec, score, columns = record.spec, record.score, record.columns
        words = sorted(set(columns["verdict"]))
        rest = {
            "spec": spec.to_plain(),
            "identity_hash": record.identity_hash,
            "score": score and asdict(score),
            "sealed_at": record.sealed_at,
            "value": columns["value"],
            "words": words,
            "verdict": [words.index(verdict) for verdict in columns["verdict"]],
            "ids": digest(columns["id"]),
        }
        return cls(
            run=spec.short,
            benchmark=spec.benchmark.name,
            model=spec.model.name,
            decoder=spec.label,
            settings=flat_settings(spec),
            samples=len(columns["id"]),
            score=score.mean if score else None,
            interval=[score.low, score.high] if score else None,
            ungraded=record.ungraded,
            metrics={name: record.summary.get(name) for name in SHOWN_METRICS},
            timed=TimedRun.of(record),
            listed=json.dumps(rest),
        )

    @classmethod
    def of_line(cls, plain: Mapping[str, Any]) -> IndexedRun:
        """Return the run from one of this user's lines, which is not checked again."""
        timed = plain["timed"]
        timed = timed and TimedRun(**{**timed, "decoder": DecoderSummary(**timed["decoder"])})
        return cls(**{**plain, "timed": timed})

    def record(self, ids: Callable[[str], list[str]]) -> RunRecord:
        """Return the record with its score, `SHOWN_METRICS`, and the columns "id", "value" and
        "verdict".

        ids: digest of sample ids -> the ids.
        """
        rest = json.loads(self.listed)
        words = rest["words"]
        columns = {
            "id": ids(rest["ids"]),
            "value": rest["value"],
            "verdict": [words[index] for index in rest["verdict"]],
        }
        spec, identity_hash = RunSpec(**rest["spec"]), rest["identity_hash"]
        vars(spec)["identity_hash"] = identity_hash  # a line of this user: it was checked before
        score = rest["score"] and MeanScore(**rest["score"])
        return RunRecord(spec, identity_hash, score, self.metrics, columns, [], rest["sealed_at"])


class RecordIndex:
    """The index of a store."""

    def __init__(self, store: Store) -> None:
        self.root = Path(store.root)
        self._cache = DerivedCache(self.root.parent, KIND, MADE_BY)
        self._names: set[str] = set()
        self._ids: dict[str, list[str]] = {}

    def folders(self) -> Iterator[tuple[Path, Fingerprint]]:
        """Yield every run folder, by path, with its record's fingerprint: empty if not sealed."""
        archive = self._archive
        packed = set(self._packed(archive))
        names = {path.relative_to(self.root).as_posix() for path in matching(self.root, "*/*/*")}
        self._names = names | packed
        for name in sorted(self._names, key=lambda name: self.root / name):
            own = fingerprint(self.root / name / RECORD) if name in names else []
            yield self.root / name, own or (archive if name in packed else [])

    def _packed(self, archive: Fingerprint) -> list[str]:
        """Return the names of the archived runs."""
        names = self._cache.get(PACKED, archive) if archive else []
        if names is None:
            names = self._shipped.get(PACKED) or list(archived(self.root).records)
            self._cache.put(PACKED, archive, names)
        return list(names)

    def sealed(self) -> Iterator[IndexedRun]:
        """Yield every sealed run, by path; damaged ones are left out."""
        return (run for _, run in self.runs(sealed=True) if isinstance(run, IndexedRun))

    def entries(self, unreadable: list[str]) -> Iterator[RunEntry]:
        """Yield every run folder, by path, with `IndexedRun.record` instead of a sealed run's
        record. For a run that cannot be read, a message is added to `unreadable` instead.
        """
        for folder, run in self.runs(own=True):
            try:
                entry = self._entry(folder, run) if isinstance(run, IndexedRun) else run
            except (DllmBenchError, KeyError) as error:  # KeyError: changed since it was listed
                entry = DllmBenchError(str(error))
            if isinstance(entry, RunEntry):
                yield entry
            else:
                unreadable.append(str(entry))

    def runs(
        self, sealed: bool = False, own: bool = False
    ) -> Iterator[tuple[Path, IndexedRun | RunEntry | DllmBenchError]]:
        """Yield each run folder, by path, with its information: for a sealed run from the index,
        otherwise from the folder now, or the reason why that cannot be read. Then write new values.

        sealed: only folders with a record; own: without values that came with an archive.
        """
        for folder, mark in self.folders():
            if sealed and not mark:
                continue
            known = self._get(folder, mark)
            try:
                run = known if known and (known.is_own or not own) else self._read(folder, mark)
            except DllmBenchError as error:
                yield folder, error
            else:
                if run:
                    yield folder, run
        self.save()

    def _entry(self, folder: Path, run: IndexedRun) -> RunEntry:
        """Return a sealed run as an entry; for runs with the same samples, one record is read for
        their common ids.
        """

        def ids_of(stated: str) -> list[str]:
            if stated not in self._ids:
                whole = read_record(folder)
                ids = whole.columns["id"] if whole else []
                self._ids[digest(ids)] = ids
            return self._ids[stated]

        record, n = run.record(ids_of), run.samples
        return RunEntry(folder, RunState.SEALED, record.spec, n, n, record=record)

    def _get(self, folder: Path, mark: Fingerprint) -> IndexedRun | None:
        """Return the index's value for a sealed record; None if there is none."""
        key = folder.relative_to(self.root).as_posix()
        plain = self._cache.get(key, mark) if mark else None
        if plain is not None:
            return IndexedRun.of_line(plain)
        if mark and mark == self._archive and key in self._shipped:
            with suppress(ValueError):
                run = replace(made_from(IndexedRun, self._shipped[key]), is_own=False)
                self._cache.put(key, mark, asdict(run))
                return run
        return None

    def _read(self, folder: Path, mark: Fingerprint) -> IndexedRun | RunEntry | None:
        """Read the folder and return its content, added to the index if it is a sealed record."""
        entry = read_entry(folder)
        if entry is None or entry.record is None or not mark:
            return entry
        run = IndexedRun.of(entry.record)
        self._cache.put(folder.relative_to(self.root).as_posix(), mark, asdict(run))
        return run

    @cached_property
    def _archive(self) -> Fingerprint:
        return fingerprint(archive_of(self.root))

    @property
    def _archive_sha256(self) -> str:
        with os.fdopen(open_file(archive_of(self.root), os.O_RDONLY), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def _shipped(self) -> Mapping[str, Any]:
        """Return the values by key that came with the archive, if they state its sha256."""
        try:
            plain = json.loads(unpacked(self.root.with_name(SHIPPED)))
            names = plain[VALUES].get(PACKED, ())
            is_of_archive = plain[ARCHIVE] == self._archive_sha256
            return dict(plain[VALUES]) if is_of_archive and all(map(is_run_folder, names)) else {}
        except (*OTHER_TYPES, OSError, EOFError, lzma.LZMAError, RecursionError, DllmBenchError):
            return {}

    def ship(self) -> None:
        """Write the index of the archived runs next to the archive."""
        values = {key: self._cache.get(key, self._archive) for key in self._cache.known()}
        kept = {key: value for key, value in values.items() if value is not None}
        text = json.dumps({ARCHIVE: self._archive_sha256, VALUES: kept}, sort_keys=True)
        write_atomic(self.root.with_name(SHIPPED), lzma.compress(text.encode(), preset=9))

    def save(self) -> None:
        """Write new values, and drop those of runs that are gone."""
        self._cache.save(lambda key: key == PACKED or key in self._names)
