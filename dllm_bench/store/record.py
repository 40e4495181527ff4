"""Stored data of a run: a `SampleRecord` per line of samples.jsonl, and one sealed `RunRecord`.

A sample contains raw data (tokens, trace, seconds). A record contains per-sample columns, from
which every metric and table cell can be computed without the samples. A record with a schema
version other than this code's is refused. `store` decides where the files are; `seal` makes
records.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from html import escape
from itertools import chain, compress
from statistics import fmean
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args, get_origin, get_type_hints

from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.core.benchmark import JUDGE_ERROR, SampleScore
from dllm_bench.core.declared import Count, Moment, Range, Seconds, fits, in_words, made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import strike_out_of
from dllm_bench.core.request import Request
from dllm_bench.core.trace import GIVEN, Token, Trace
from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.metrics.drafts import speculative_columns
from dllm_bench.metrics.sample_stats import UNREPORTED, SampleStats, SessionIndex, from_columns
from dllm_bench.store.files import Plain, checked_line, parse, read_checked
from dllm_bench.store.spec import SHOWN, RunSpec

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN_METRICS = ("tpf/emitted", "tps/e2e")  # shown as TPF and TPS wherever runs are listed
SCORE = "score/"  # begins the column of a further score
ONE_PER_BRANCH = ", one per branch"  # LoPA's branches on devices of their own
SCHEMA = 4  # raised with every change of the stored form
WARNING = "warning"  # entry of `Session.environment`: what the run's decoder may cost
FALLBACK = "fallbacks"  # entry of `Session.environment`: slower paths that the machine forced
ENVIRONMENT: dict[str, Any] = {
    "load": float | None,
    "cores": int | None,
    "commit": str | None,
    "diff": str | None,
    WARNING: str | None,
    "packages": dict[str, str | None] | None,
}
"""Entries of `Session.environment` that are read as more than text, if they are there."""
COUNTED = frozenset(SampleStats.columns()) - {
    *("seconds", "steps_s", "first_step_s", "truncated", "empty", "session", "baseline_s"),
    *("baseline_equal", "rounds", "survival", "right", "prefill_s", "draft_s", "head_s"),
    *("verify_s", "ttft_s", "began_s", "ended_s", "tries", "retokenised"),
}
"""Names of `SampleRecord.counts`; the other columns come from a sample's own fields."""
CONVERT = "`python -m scripts.convert_results OLD NEW` in a checkout rewrites those"
OTHER_HASH = (
    "its hash is that of another run, or of this one as versions up to 0.2 stored it, with the "
    f"number of items: {CONVERT}"
)
BEFORE = '\n "spec": {'  # where the hash stands, since keys are sorted

Index = Annotated[int, Range(GIVEN, 2**31)]  # index of a forward, or a negative mark


@dataclass(frozen=True)
class BaselineSample:
    """Result of the run's baseline decoder for the same request."""

    ids: list[Token]  # its new tokens, up to where its text ends
    seconds: Seconds  # duration of its decoding


@dataclass(frozen=True)
class BatchSpan:
    """Start and end of a request in a batch, in seconds from the session's start."""

    began_s: Seconds
    ended_s: Seconds


@dataclass(frozen=True)
class ServedSample:
    """Additional data of a served engine's answer."""

    ttft_s: Seconds  # seconds from sending the request to the first content
    began_s: Seconds  # seconds from the session's start to the first try
    ended_s: Seconds  # seconds from the session's start to the end of the answer
    tries: Count  # how often the request was sent
    prompt_tokens: Count | None  # as the server counts them
    retokenised: bool  # whether we counted the new tokens, with a tokenizer
    finish: str  # the server's reason to end
    problems: list[str] = field(default_factory=list)
    """Flaws of the answer that were left out or replaced."""


@dataclass(frozen=True)
class SampleRecord:
    """One finished request."""

    id: str  # id of the request
    prompt_sha256: str  # hash of the prompt's ids
    ids: list[Token]  # (G,) new tokens, including those after the end of the text
    born: list[Index]  # (G,) the forward that committed each token; -1 if it is still masked
    cut: dict[str, Count]  # reason ("eos", "stop", "length") -> index in `ids` where the text ends
    text: str  # the answer, cut
    trace: dict[str, list]  # columns of the forwards
    counts: Mapping[str, float | None]  # token counts, see `sample_stats.count_sample`
    seconds: Seconds | None  # duration of decoding; None in a batch
    first_step_s: Seconds | None  # seconds of the first forward; None in a batch
    started_at: Moment
    session: SessionIndex  # index of the session that decoded it
    raw: str | None = None  # the text before it was cut at a stop string; None if it was not cut
    baseline: BaselineSample | None = None  # only in runs with a baseline
    served: ServedSample | None = None  # only in served runs, whose `ids` and `trace` are empty
    span: BatchSpan | None = None  # only in batched runs, whose samples have no `seconds`
    prompt: str = ""  # text the prompt's ids were encoded from; empty if it is not stored

    def to_line(self, run: str = "") -> str:
        """Return one line of JSON with a checksum, without the newline.

        run: short hash of the run that the sample belongs to.
        """
        prompt = self.prompt.encode(errors="replace").decode()  # it may hold half a surrogate pair
        return checked_line({"run": run, **asdict(self), "prompt": prompt})

    @classmethod
    def from_line(cls, line: str | bytes, run: str = "") -> SampleRecord:
        """Read a line that `to_line` wrote; ValueError for anything else.

        run: if given, the short hash of the run that the line must belong to.
        """
        plain = read_checked(line)
        stated = plain.pop("run", "")
        if run and run != stated:
            raise ValueError(f"a sample of run {stated or 'unknown'}")
        sample = made_from(cls, plain)
        sample.check()
        return sample

    def check(self) -> None:
        """Raise ValueError for values that contradict each other or that no run can have."""
        forwards = Trace.check_columns(self.trace)
        if len(self.born) != len(self.ids) or max(self.born, default=-1) >= max(forwards, 1):
            raise ValueError("tokens of forwards that are not in the trace")
        if not self.counts.keys() <= COUNTED:
            raise ValueError(f"counts of {', '.join(sorted(self.counts.keys() - COUNTED))}")
        _check_types(self.counts, _column_types())

    def stats(self) -> SampleStats:
        """Return the inputs of the metrics."""
        trace = Trace.from_columns(self.trace)
        further: dict[str, Any] = {**dict.fromkeys(UNREPORTED), **self.counts}
        if self.baseline:
            ours = self.ids[: min([*self.cut.values(), len(self.ids)])]
            further["baseline_s"] = self.baseline.seconds
            further["baseline_equal"] = ours == self.baseline.ids
        if part := self.served or self.span:
            shared = asdict(part).items()
            further |= {name: value for name, value in shared if name in SampleStats.columns()}
            further["session"] = self.session
        steps_s = sum(forward.ms for forward in trace.forwards) / 1000
        return SampleStats(
            seconds=self.seconds,
            steps_s=None if self.seconds is None else steps_s,
            first_step_s=self.first_step_s,
            truncated=set(self.cut) <= {"length"},
            empty=not self.text.strip(),
            **speculative_columns(trace, self.born, self.ids),
            **further,
        )


@dataclass(frozen=True)
class Session:
    """One start of a run; a run that is resumed has several."""

    started_at: Moment
    warmups: Count  # requests decoded before the first one that counts
    environment: Plain  # code, packages and machine, see `provenance`
    samples: Count = 0  # samples it finished, known once the run is sealed


@dataclass(frozen=True, repr=False)
class RunRecord:
    """A finished run. A run is complete if and only if its record.json exists."""

    spec: RunSpec
    identity_hash: str  # sha256, see `RunSpec.identity_hash`
    score: MeanScore | None  # mean of the benchmark's primary score; None if nothing was graded
    summary: dict[str, float | None]  # every metric by the name of its definition
    columns: dict[str, list]
    """Per-sample lists of equal length: "id", "value", "verdict", the names of `SampleStats`, and
    "score/NAME" for each further score."""
    sessions: list[Session]
    sealed_at: Moment
    scores: dict[str, float] = field(default_factory=dict)
    """Means of the further scores, and avg@k and pass@k if items were repeated."""
    unused: dict[str, float] = field(default_factory=dict)
    """Setting -> share of the samples it had no effect on, see `seal`."""
    schema: int = SCHEMA  # version of the stored form

    @property
    def environment(self) -> Plain:
        """Provenance of the first session."""
        return self.sessions[0].environment if self.sessions else {}

    @property
    def environments(self) -> list[Plain]:
        """Provenance of every session that finished samples; they may be from different
        machines."""
        return [s.environment for s in self.sessions if s.samples] or [self.environment]

    @property
    def warnings(self) -> list[str]:
        """Warnings at run time about combinations that lower the score."""
        given = (session.environment.get(WARNING) for session in self.sessions)
        return [str(text) for text in dict.fromkeys(given) if text]

    @property
    def devices(self) -> str:
        """Devices of the samples, in words."""
        devices = (str(one.get("device") or "unknown device") for one in self.environments)
        spread = self.spec.hardware.uses_cuda and self.spec.hardware.branch_parallel > 1
        return " and ".join(dict.fromkeys(devices)) + (ONE_PER_BRANCH if spread else "")

    @cached_property
    def samples(self) -> DataFrame:
        """The frame that metrics read: a row per sample, in column order."""
        return from_columns(self.columns)

    @cached_property
    def item_ids(self) -> list[str]:
        """The item of each sample."""
        return list(map(item_id_of, self.columns["id"]))

    def of_items(self, items: Set[str]) -> RunRecord:
        """Return the record with only the samples of these items; score and summary stay."""
        kept = [item in items for item in self.item_ids]
        columns = {name: list(compress(column, kept)) for name, column in self.columns.items()}
        return replace(self, columns=columns)

    @property
    def items(self) -> int:
        """Number of items; an item that was decoded several times counts once."""
        return len(set(self.item_ids))

    def covers(self, limit: int | None) -> bool:
        """Return whether it contains the first `limit` items of the benchmark (None: all of
        them)."""
        sealed = self.spec.limit
        # with fewer items than its limit it contains every existing item
        return sealed is None or self.items < sealed or (limit is not None and limit <= sealed)

    @cached_property
    def values(self) -> dict[str, float]:
        """Score by item, for paired comparisons: the mean over repetitions; graded ones only."""
        return {item: fmean(values) for item, values in graded(self.columns).items()}

    @property
    def grades(self) -> dict[str, SampleScore]:
        """The grade of each sample by its id."""
        further = [name for name in self.columns if name.startswith(SCORE)]
        columns = [self.columns[name] for name in ("id", "value", "verdict", *further)]
        names, found = [name.removeprefix(SCORE) for name in further], dict[str, SampleScore]()
        for key, value, verdict, *scores in zip(*columns, strict=True):
            pairs = zip(names, scores, strict=True)
            metrics = {name: score for name, score in pairs if score is not None}
            found[key] = SampleScore(math.nan if value is None else value, verdict, metrics)
        return found

    @property
    def verdicts(self) -> dict[str, int]:
        """Number of samples with each verdict (timeouts are separate from failures)."""
        return dict(sorted(Counter(self.columns["verdict"]).items()))

    @property
    def ungraded(self) -> str:
        """Remark next to the score if grading failed for samples: "3 not graded", else ""."""
        count = self.columns["verdict"].count(JUDGE_ERROR)
        return f"{count} not graded" if count else ""

    @property
    def basis(self) -> str:
        """What the score rests on: its interval's method, the samples, and those not graded."""
        if self.score is None:
            return ""
        return ", ".join(filter(None, [self.score.method, f"n = {self.score.n}", self.ungraded]))

    def __repr__(self) -> str:
        head, *rest = [f"{name} {value}" for name, value in self._shown()]
        return f"RunRecord({self.spec.short}, {self._what}: {head}, {', '.join(rest)})"

    def _repr_html_(self) -> str:
        """Return a table of what was run, its score and its speed."""
        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in self._shown())
        what = f"<b>{escape(self._what)}</b> <code>{self.spec.short}</code>"
        return f"{what}<table>{rows}</table>"

    @property
    def _what(self) -> str:
        spec = self.spec
        return f"{spec.label}, {spec.model.name} on {spec.benchmark.name}"

    def _shown(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of the most informative metrics of a run."""
        score = self.score
        ends = score and f"{100 * score.mean:.1f} % [{100 * score.low:.1f}, {100 * score.high:.1f}]"
        yield "score", ends or "–"
        yield "n", str(len(self.columns["id"]))
        for name in SHOWN_METRICS:
            if (value := self.summary.get(name)) is not None:
                yield name, f"{value:.2f}"

    def to_json(self) -> str:
        """Return the stored text: keys sorted, one column per line."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["spec"] = self.spec.to_plain()
        plain["score"] = asdict(self.score) if self.score else None
        plain["sessions"] = [asdict(session) for session in self.sessions]
        plain = strike_out_of(plain)
        text = _dump(plain, plain["columns"])
        return text.replace(BEFORE, f'\n "sha256": "{_sha256(text)}",{BEFORE}', 1)

    @classmethod
    def from_json(cls, content: str | bytes, source: str = "record.json") -> Self:
        """Read what `to_json` wrote; `source` names the file in an error."""
        try:
            text = content.decode() if isinstance(content, bytes) else content
            plain = parse(text)
            _check_schema(plain.get("schema"), source)
            _check_content(text, plain.pop("sha256", None), source)
            plain["spec"] = RunSpec.from_plain(plain["spec"], source)
            record = made_from(cls, plain)
            if record.identity_hash != record.spec.identity_hash:
                raise ValueError(OTHER_HASH)
            _check_columns(record.columns)
            for session in record.sessions:
                _check_types(session.environment, ENVIRONMENT)
            return record
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DllmBenchError(
                f"{source} is no run record ({type(error).__name__}: {error}); move it away and "
                "give the command that made the run again."
            ) from error


def _dump(plain: Plain, columns: Mapping[str, list]) -> str:
    """Return indented JSON, with each column on one line."""
    marks = {name: f"\0{index}\0" for index, name in enumerate(sorted(columns))}
    text = json.dumps({**plain, "columns": marks}, indent=1, sort_keys=True, ensure_ascii=False)
    for name, mark in marks.items():
        line = json.dumps(columns[name], ensure_ascii=False, separators=(",", ":"))
        text = text.replace(json.dumps(mark), line)
    return text + "\n"


def _check_schema(version: object, source: str) -> None:
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"schema version {version!r}")
    if version < SCHEMA:
        raise ValueError(f"schema version {version}, as versions up to 0.1 stored it: {CONVERT}")
    if version > SCHEMA:
        raise DllmBenchError(
            f"{source} has schema version {version}, this code knows versions up to {SCHEMA}; "
            "update dllm-bench."
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_content(text: str, stated: str | None, source: str) -> None:
    """Raise DllmBenchError if the stored text does not match its hash."""
    actual = _sha256(text.replace(f'\n "sha256": "{stated}",', "", 1))
    if actual != stated:
        raise DllmBenchError(
            f"{source} was changed after it was sealed: it states sha256 {str(stated)[:SHOWN]} and "
            f"has {actual[:SHOWN]}; move the file away and give the command that made the "
            "run again, which seals the finished samples."
        )


def _check_columns(columns: Mapping[str, list]) -> None:
    """Raise ValueError for columns that no run has: of unequal length, or without ids."""
    lengths = {len(columns[name]) for name in ("id", "value", "verdict")}
    lengths |= {len(column) for column in columns.values()}
    if len(lengths) != 1 or not all(isinstance(key, str) for key in columns["id"]):
        raise ValueError("columns of unequal length, or ids that are no text")
    absent = [name for name in SampleStats.required() if name not in columns]
    if absent:
        raise ValueError(f"no column {', '.join(absent)}")
    grades = {name: float | None for name in columns if name.startswith(SCORE)}
    declared = {**_column_types(), **grades, "value": float | None, "verdict": str}
    for name in columns.keys() & declared.keys():
        kind, values = declared[name], columns[name]
        if NoneType in get_args(kind):  # the rest is checked at once, since there are thousands
            kind, values = get_args(kind)[0], [value for value in values if value is not None]
        while get_origin(kind) is Sequence and set(map(type, values)) == {list}:
            kind, values = get_args(kind)[0], [*chain.from_iterable(values)]
        if not fits(values, Sequence[kind]):  # type: ignore[valid-type]
            raise ValueError(f"{name} is not {in_words(kind)}")
    _check_drafts(columns)


def _check_drafts(columns: Mapping[str, list]) -> None:
    """Raise ValueError for rounds of drafts that do not belong together."""
    per_round = [columns[name] for name in ("survival", "right") if name in columns]
    for rounds, *others in zip(columns.get("rounds", ()), *per_round, strict=False):
        known = [len(other) for other in others if other is not None]
        if any(len(one) not in (3, 4) for one in rounds or ()) or set(known) - {len(rounds or ())}:
            raise ValueError("rounds that are no three or four counts, or of unequal number")


@cache
def _column_types() -> dict[str, Any]:
    """Return the types of `SampleStats`."""
    return get_type_hints(SampleStats, include_extras=True)


def _check_types(plain: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
    """Raise ValueError for an entry that is not of the type declared for it."""
    for name, value in plain.items():
        if name in declared and not fits(value, declared[name]):
            raise ValueError(f"{name} is not {in_words(declared[name])}")


def whole_texts(samples: Iterable[SampleRecord]) -> dict[str, str]:
    """Return the texts by sample id, not cut at stop strings."""
    return {sample.id: sample.raw or sample.text for sample in samples}


def prompt_sha256(request: Request) -> str:
    """Return the hash that a sample stores of its prompt."""
    return hashlib.sha256(repr(request.prompt_ids).encode()).hexdigest()


def graded(columns: Mapping[str, list]) -> dict[str, list[float]]:
    """Return {item: values of its repetitions}, without samples that have no grade."""
    values: dict[str, list[float]] = {}
    for key, value in zip(columns["id"], columns["value"], strict=True):
        if value is not None:
            values.setdefault(item_id_of(key), []).append(value)
    return values
