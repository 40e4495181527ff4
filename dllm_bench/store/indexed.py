"""`IndexedRun`: the part of a sealed record that lists, estimates and comparisons need.

Code that writes a record adds it to the index of its results folder (`add`), so that thousands of
runs are read from one file. `RecordIndex` (`index`) reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from dllm_bench import __version__
from dllm_bench.core.declared import Count
from dllm_bench.core.decoder import DecoderSummary
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.registry import TARGET, instantiate
from dllm_bench.store.cache import Fingerprint, add_lines, head_of, signed_line, writable
from dllm_bench.store.groups import setting_in
from dllm_bench.store.nolinks import lstat
from dllm_bench.store.record import SHOWN_METRICS, RunRecord
from dllm_bench.store.spec import Role, RunSpec, digest, flat_settings, split

FILE = ".index.jsonl"  # in the runs folder
KIND, MADE_BY = "runs", (__version__, "1")  # the number is raised when the fields change
SETTINGS = (TARGET, "name", "max_new_tokens", "shots", "repeats")  # that an estimate reads
TIMED = ("forwards", "seconds")  # columns of a record
GROUPS = ("model", "benchmark", "hardware")
OTHER_TYPES = (TypeError, ValueError, AttributeError, ArithmeticError, KeyError)
"""Errors that settings of a forged record may raise."""


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
        batches."""
        spec, columns = record.spec, record.columns
        if any(None in columns[name] for name in TIMED):
            return None
        groups = {name: getattr(spec, name) for name in GROUPS} | {"decoder": {"name": spec.label}}
        kept = {
            name: {key: group[key] for key in SETTINGS if key in group}
            for name, group in groups.items()
        }
        # without sources: a record must not decide which files are opened
        identity = split({"decoder": spec.decoder})[Role.IDENTITY].get("decoder", {})
        forwards, seconds = (float(sum(columns[name])) for name in TIMED)
        config = {**kept, "limit": spec.limit}
        return cls(config, summary_of(identity), len(columns["id"]), seconds, forwards)


def summary_of(decoder: Mapping[str, Any]) -> DecoderSummary:
    """Return the properties that the pieces of a decoder declare. If the decoder cannot be made
    here, because a file that it reads is missing, return those that follow from its settings alone.
    """
    settings = {key: value for key, value in decoder.items() if key != "name"}
    made = _made_summary(json.dumps(settings, sort_keys=True)) if TARGET in settings else None
    if made:
        return made
    return DecoderSummary(block=setting_in(decoder, "schedule.block"), drafts="draft" in decoder)


@lru_cache(maxsize=1024)
def _made_summary(settings: str) -> DecoderSummary | None:
    """Return the properties that a decoder's pieces declare, computed once for equal settings; None
    if it cannot be made."""
    with suppress(DllmBenchError):
        summary: DecoderSummary = instantiate(json.loads(settings), "decoder").summary()
        return summary
    return None


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
            timed=_timed(record),
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


def _timed(record: RunRecord) -> TimedRun | None:
    """Return the cost of a record; None also if its settings have types that no run has."""
    with suppress(DllmBenchError, *OTHER_TYPES):
        return TimedRun.of(record)
    return None


def key_of(root: Path, folder: Path) -> str:
    """Return the key of a run in the index."""
    return folder.relative_to(root).as_posix()


def fingerprint_of(file: Path) -> Fingerprint:
    """Return the time of change (ns), size and inode of a file below a results folder; empty
    without one."""
    found = lstat(file)
    return [found.st_mtime_ns, found.st_size, found.st_ino] if found else []


def add(folder: Path, file: Path, record: RunRecord) -> None:
    """Add a record to the index of its results, after its file is written. Failure is not an error,
    because readers add missing records.
    """
    root = folder.parents[2]
    with suppress(DllmBenchError, OSError, ValueError):
        head, plain = head_of(KIND, MADE_BY), asdict(IndexedRun.of(record))
        line = signed_line(head, key_of(root, folder), fingerprint_of(file), plain)
        add_lines(writable(root / FILE), [line.line])
