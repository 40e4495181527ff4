"""What a run leaves behind: one `SampleRecord` per line of samples.jsonl, one sealed `RunRecord`.

A sample holds raw facts (tokens, trace, seconds). A record holds per-sample columns, enough to
compute every metric and table cell without the samples. Both carry a schema version; a newer one
than this code knows is refused with a sentence. Where the files lie is the store's business.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.metrics import definitions
from dllm_bench.metrics.acceptance import speculative_columns
from dllm_bench.metrics.accuracy import MeanScore, mean_score, repeated
from dllm_bench.metrics.sample_stats import SampleStats, from_columns
from dllm_bench.store.ineffective import unused
from dllm_bench.store.spec import SHOWN, Plain, RunSpec

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import SampleScore

SCORE = "score/"  # begins the column of a further score
SCHEMA = 4  # raised with every change of the stored form
HASHED = 3  # records from this version on carry a hash of their text
NAMED = 4  # records from this version on hold registered names instead of module paths
BEFORE = '\n "spec": {'  # where the hash stands, since keys are sorted


@dataclass(frozen=True)
class BaselineSample:
    """What the run's baseline made of the same request: its tokens to the end, and its time."""

    ids: list[int]
    seconds: float


@dataclass(frozen=True)
class BatchSpan:
    """When a request of a batch began and ended, from the session's start."""

    began_s: float
    ended_s: float


@dataclass(frozen=True)
class ServedSample:
    """What is known of a served engine's answer alone: seconds from sending to the first content,
    from the session's start to the first try and to the end, tries, tokens of the prompt, whether
    the new tokens were counted here, and the server's reason to end.
    """

    ttft_s: float
    began_s: float
    ended_s: float
    tries: int
    prompt_tokens: int | None
    retokenised: bool
    finish: str

    def stats(self) -> Plain:
        """Those of `SampleStats`."""
        return {
            f.name: getattr(self, f.name) for f in fields(self) if f.name in SampleStats.columns()
        }


@dataclass(frozen=True)
class SampleRecord:
    """One finished request. `counts` those of `sample_stats.count_sample`; times are in seconds.

    cut: reason -> index in `ids` where the text ends for it; trace: columns of the forwards;
    session: which start of the run decoded it; started_at: seconds since the epoch; raw: the text
    before it was cut at a stop string, None where nothing was; baseline: of runs that have one;
    served: of runs on a served engine, which tells no ids and no forwards; span: of runs in
    batches, whose samples have no seconds.
    """

    id: str
    prompt_sha256: str
    ids: list[int]
    born: list[int]
    cut: dict[str, int]
    text: str
    trace: dict[str, list]
    counts: Mapping[str, int | None]
    seconds: float | None
    first_step_s: float | None
    started_at: float
    session: int
    raw: str | None = None
    baseline: BaselineSample | None = None
    served: ServedSample | None = None
    span: BatchSpan | None = None

    def to_line(self) -> str:
        """One line of JSON, without the line's end."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> SampleRecord:
        """Inverse of `to_line`; ValueError for anything else."""
        plain = json.loads(line)
        names = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not isinstance(plain, dict) or not needed <= set(plain) <= names:
            raise ValueError("not a sample record")
        twin, served = plain.get("baseline"), plain.get("served")
        span = plain.get("span")
        parts: Plain = {"baseline": BaselineSample(**twin) if twin else None}
        parts |= {"served": ServedSample(**served) if served else None}
        return cls(**{**plain, **parts, "span": BatchSpan(**span) if span else None})

    def stats(self) -> SampleStats:
        """What the metrics are computed from."""
        trace, further = Trace.from_columns(self.trace), dict[str, Any](self.counts)
        if self.baseline:
            ours = self.ids[: min([*self.cut.values(), len(self.ids)])]
            further["baseline_s"] = self.baseline.seconds
            further["baseline_equal"] = ours == self.baseline.ids
        if self.served:
            further |= {**self.served.stats(), "session": self.session}
        if self.span:
            further |= {**asdict(self.span), "session": self.session}
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
    """One start of a run: when, on what, with how many warm-up requests."""

    started_at: float
    warmups: int
    environment: Plain
    samples: int = 0


@dataclass(frozen=True)
class RunRecord:
    """A finished run; its presence in the store is the run's completion.

    columns: per-sample lists of equal length ("id", "value", "verdict", the names of `Facts`,
    "score/NAME" for each further score); summary: every definition by name; scores: means of
    the further scores, and avg@k and pass@k where items were repeated; unused: setting -> share of
    samples it had no effect on.
    """

    spec: RunSpec
    identity_hash: str
    score: MeanScore | None
    summary: dict[str, float | None]
    columns: dict[str, list]
    sessions: list[Session]
    sealed_at: float
    scores: dict[str, float] = field(default_factory=dict)
    unused: dict[str, float] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def environment(self) -> Plain:
        """Provenance of the first session."""
        return self.sessions[0].environment if self.sessions else {}

    @property
    def environments(self) -> list[Plain]:
        """Provenance of every session that finished samples, which may be of several machines."""
        return [s.environment for s in self.sessions if s.samples] or [self.environment]

    @property
    def devices(self) -> str:
        """What the samples were computed on, in words."""
        found = (str(one.get("device") or "unknown device") for one in self.environments)
        return " and ".join(dict.fromkeys(found))

    @property
    def sample_stats(self) -> list[SampleStats]:
        """One entry per sample, in column order."""
        return from_columns(self.columns)

    @property
    def values(self) -> dict[str, float]:
        """Score by item, for paired comparisons: the mean over repetitions; graded ones only."""
        return {item: fmean(values) for item, values in graded(self.columns).items()}

    @property
    def verdicts(self) -> dict[str, int]:
        """How many samples ended with each verdict (timeouts apart from failures)."""
        return dict(sorted(Counter(self.columns["verdict"]).items()))

    def to_json(self) -> str:
        """The stored text: keys sorted, one column per line."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["spec"] = self.spec.to_plain()
        plain["score"] = asdict(self.score) if self.score else None
        plain["sessions"] = [asdict(session) for session in self.sessions]
        columns = {name: _Line(column) for name, column in self.columns.items()}
        text = _dump({**plain, "columns": columns})
        return text.replace(BEFORE, f'\n "sha256": "{_sha256(text)}",{BEFORE}', 1)

    @classmethod
    def from_json(cls, text: str, source: str = "record.json") -> Self:
        """Inverse of `to_json`; `source` names the file in an error."""
        try:
            plain = json.loads(text)
            _check_schema(plain.get("schema"), source)
            _check_content(text, plain.pop("sha256", None), plain["schema"], source)
            plain["spec"] = RunSpec.from_plain(plain["spec"])
            if plain["schema"] < NAMED:  # its hash was over module paths
                plain["identity_hash"] = plain["spec"].identity_hash
            plain["score"] = MeanScore(**plain["score"]) if plain["score"] else None
            plain["sessions"] = [Session(**session) for session in plain["sessions"]]
            return cls(**plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DllmBenchError(
                f"{source} is no run record ({type(error).__name__}: {error}); move it away and "
                "run the cell again."
            ) from error


class _Line:
    """A list to be written on one line."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.text = json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))


def _dump(plain: Plain) -> str:
    lines: list[str] = []

    def mark(value: object) -> str:
        if not isinstance(value, _Line):
            raise TypeError(f"{type(value).__name__} cannot be stored")
        lines.append(value.text)
        return f"\0{len(lines) - 1}\0"

    text = json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False, default=mark)
    for index, line in enumerate(lines):
        text = text.replace(f'"\\u0000{index}\\u0000"', line)
    return text + "\n"


def _check_schema(found: object, source: str) -> None:
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"schema version {found!r}")
    if found > SCHEMA:
        raise DllmBenchError(
            f"{source} has schema version {found}, this code knows versions up to {SCHEMA}; "
            "update dllm-bench."
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_content(text: str, stated: str | None, schema: int, source: str) -> None:
    """A sentence where the stored text is not the one that was hashed."""
    found = _sha256(text.replace(f'\n "sha256": "{stated}",', "", 1))
    if schema >= HASHED and found != stated:
        raise DllmBenchError(
            f"{source} was changed after it was sealed: it states sha256 {str(stated)[:SHOWN]} and "
            f"has {found[:SHOWN]}; move the file away and run the cell again, which seals what is "
            "finished anew."
        )


def seal(
    spec: RunSpec,
    samples: Sequence[SampleRecord],
    scores: Mapping[str, SampleScore],
    sessions: Sequence[Session],
    sealed_at: float,
) -> RunRecord:
    """The record of a complete run; samples in request order, one score each."""
    facts = [sample.stats() for sample in samples]
    columns: dict[str, list] = {"id": [sample.id for sample in samples]}
    columns["value"] = [_number(scores[sample.id].value) for sample in samples]
    columns["verdict"] = [str(scores[sample.id].verdict) for sample in samples]
    for name in SampleStats.columns():
        column = [_short(getattr(fact, name)) for fact in facts]
        if name in SampleStats.required() or any(value not in (None, []) for value in column):
            columns[name] = column
    further = sorted({name for score in scores.values() for name in score.metrics})
    for name in further:
        columns[f"{SCORE}{name}"] = [_number(scores[s.id].metrics.get(name)) for s in samples]
    outcomes = list(graded(columns).values())
    counted = Counter(sample.session for sample in samples)
    return RunRecord(
        spec=spec,
        identity_hash=spec.identity_hash,
        score=mean_score([fmean(values) for values in outcomes], seed=spec.seed),
        summary=definitions.measure_all(from_columns(columns)),
        columns=columns,
        sessions=[
            Session(s.started_at, s.warmups, s.environment, counted[i])
            for i, s in enumerate(sessions)
        ],
        sealed_at=sealed_at,
        scores={**_means(columns), **repeated(outcomes)},
        unused=unused(spec, samples),
    )


def graded(columns: Mapping[str, list]) -> dict[str, list[float]]:
    """Item -> the values of its repetitions; samples without a grade are left out."""
    found: dict[str, list[float]] = {}
    for key, value in zip(columns["id"], columns["value"], strict=True):
        if value is not None:
            found.setdefault(item_id_of(key), []).append(value)
    return found


def _means(columns: Mapping[str, list]) -> dict[str, float]:
    """Mean of every further score over the samples that have it."""
    known = {
        name.removeprefix(SCORE): [value for value in column if value is not None]
        for name, column in columns.items()
        if name.startswith(SCORE)
    }
    return {name: fmean(values) for name, values in known.items() if values}


def _short(value: Any) -> Any:
    """Seconds to the microsecond: more digits are noise and cost space."""
    return round(value, 6) if isinstance(value, float) else value


def _number(value: float | None) -> float | None:
    """The value; None for one that is absent or not a number (not graded)."""
    return None if value is None or math.isnan(value) else float(value)
