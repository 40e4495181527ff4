"""`export --to eee`: runs in the form of Every Eval Ever, EvalEval's shared store of evaluations.

Writes two files per run, at the paths of its datastore: `data/BENCHMARK/DEVELOPER/MODEL/UUID.json`
with the score, and `UUID_samples.jsonl` with a line per graded sample. Field names and requirements
are those of version 0.3.0 of its two schemas (github.com/evaleval/every_eval_ever) and of its
`every_eval_ever validate`. The schema has no field for speed: TPF, TPS and the other metrics are
stored as details of the score, and a sample's counts as details of its performance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from dllm_bench import __version__
from dllm_bench.api.exports import Metric, graded_record, primary_of, rows_of, standard_error
from dllm_bench.metrics.accuracy import LEVEL, MeanScore
from dllm_bench.paths import ASSETS
from dllm_bench.site.texts import TextSource
from dllm_bench.store.files import write_atomic
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import GROUPS, RunSpec, digest, slug
from dllm_bench.store.store import RunEntry

Plain = dict[str, Any]
FORM = "eee"
SCHEMA_VERSION = "0.3.0"
"""Of both schemas."""
LIBRARY = "dllm-bench"
COUNTS = ("forwards", "emitted", "committed", "rows")
"""Columns of a sample that are exported as details of its performance."""


@dataclass(frozen=True)
class Publisher:
    """Who publishes the results; runs do not store this."""

    organization: str
    """Name of the organization that ran the evaluation."""
    relationship: str
    """To the model's developer: first_party, third_party, collaborative or other."""
    dataset: str | None = None
    """The benchmark's id on the hub (owner/name), if it has one."""


@dataclass(frozen=True)
class Identity:
    """What the two files of a run share."""

    benchmark: str
    model: str
    """OWNER/NAME, see `model_id`."""
    sealed_at: str
    """Seconds since the epoch."""
    uuid: UUID

    @property
    def evaluation(self) -> str:
        """The evaluation's id."""
        return f"{self.benchmark}/{self.model}/{self.sealed_at}"

    def path(self, ending: str) -> str:
        """Return where the datastore has the file with this ending."""
        folders = "/".join(slug(part) for part in (self.benchmark, *self.model.split("/", 1)))
        return f"data/{folders}/{self.uuid}{ending}"


def to_eee(
    entries: Sequence[RunEntry], texts: TextSource, out: Path, publisher: Publisher
) -> Iterator[Path]:
    """Write the files of each run below `out`; the same record gives the same bytes.

    DllmBenchError for a run without a score.
    """
    for entry in entries:
        record, score = graded_record(entry)
        identity = identity_of(record)
        whole = evaluation(record, score, identity, publisher)
        lines = [json.dumps(one) for one in samples(record, rows_of(entry, texts), identity)]
        if lines:
            path, text = identity.path("_samples.jsonl"), "".join(f"{line}\n" for line in lines)
            yield write_atomic(out / path, text)
            whole["detailed_evaluation_results"] = {
                "format": "jsonl",
                "file_path": path,
                "hash_algorithm": "sha256",
                "checksum": hashlib.sha256(text.encode()).hexdigest(),
                "total_rows": len(lines),
            }
        yield write_atomic(out / identity.path(".json"), json.dumps(whole, indent=2) + "\n")


def identity_of(record: RunRecord) -> Identity:
    """Return ids and places of a run's files."""
    key = digest([record.identity_hash, record.sealed_at])  # keeps the same run of two labs apart
    return Identity(
        benchmark=record.spec.benchmark.name,
        model=model_id(record.spec),
        sealed_at=str(record.sealed_at),
        uuid=UUID(hex=key[:32], version=4),
    )


def model_id(spec: RunSpec) -> str:
    """Return the model's id on the hub; dllm-bench/NAME if it ships, else unknown/NAME."""
    from dllm_bench.models.sources import is_hub_id  # imports torch, which takes seconds

    path = spec.model.path or ""
    if is_hub_id(path):
        return path
    owner = LIBRARY if path.startswith(ASSETS) else "unknown"
    return f"{owner}/{slug(spec.model.name)}"


def evaluation(
    record: RunRecord, score: MeanScore, identity: Identity, publisher: Publisher
) -> Plain:
    """Return the content of a run's `UUID.json`, without the reference to its samples."""
    version = str(record.environment.get("dllm_bench") or __version__)
    started = record.sessions[0].started_at if record.sessions else record.sealed_at
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": identity.evaluation,
        "evaluation_timestamp": str(started),
        "retrieved_timestamp": identity.sealed_at,
        "source_metadata": {
            "source_name": LIBRARY,
            "source_type": "evaluation_run",
            "source_organization_name": publisher.organization,
            "evaluator_relationship": publisher.relationship,
        },
        "eval_library": {"name": LIBRARY, "version": version},
        "model_info": model_info(record.spec, identity.model, version),
        "evaluation_results": [result(record, score, publisher.dataset)],
    }


def model_info(spec: RunSpec, model: str, version: str) -> Plain:
    """Return the model, and who controlled its deployment."""
    served, owner = spec.model.is_served, model.split("/")[0]
    engine = {"name": spec.model.engine or LIBRARY} if served else {}
    details = {
        "deployment_type": "unknown" if served else "self_deployed",
        "model_availability": "unknown" if owner == "unknown" else "open_weights",
        **as_details(spec.inputs),
    }
    return {
        "name": spec.model.name,
        "id": model,
        "developer": owner,
        "inference_engine": engine or {"name": LIBRARY, "version": version},
        "additional_details": details,
    }


def result(record: RunRecord, score: MeanScore, dataset: str | None) -> Plain:
    """Return the primary score with its interval, how it is computed, and how the texts were
    decoded."""
    spec, name = record.spec, record.spec.benchmark.name
    metric, key = primary_of(record)
    further = {**record.scores, **{k: v for k, v in record.summary.items() if v is not None}}
    return {
        "evaluation_result_id": result_id(record),
        "evaluation_name": name,
        "source_data": source_data(spec, dataset),
        "metric_config": {
            "metric_id": f"{name}.{metric}" if metric == Metric else metric,
            "metric_name": metric,
            "metric_unit": "proportion",
            "metric_parameters": {"filter": key},
            "lower_is_better": False,
            "score_type": "continuous",
            "min_score": 0.0,
            "max_score": 1.0,
        },
        "score_details": {
            "score": score.mean,
            "details": as_details(further),
            "uncertainty": {
                "standard_error": {"value": standard_error(record), "method": "analytic"},
                "confidence_interval": {
                    "lower": score.low,
                    "upper": score.high,
                    "confidence_level": LEVEL,
                    "method": score.method,
                },
                "num_samples": score.n,
            },
        },
        "generation_config": generation(record),
    }


def generation(record: RunRecord) -> Plain:
    """Return how the texts were decoded, without paths, which only mean something on this
    machine."""
    spec, limits = record.spec, record.spec.benchmark.max_new_tokens
    settings = spec.identity()
    groups = {f"{k}_settings": v for k in (*GROUPS, "baseline", "parent") if (v := settings.get(k))}
    details = {"run": spec.identity_hash, "decoder": spec.label, "device": record.devices}
    further = {"seed": spec.seed, "batch": spec.batch, "limit": spec.limit}
    return {
        "generation_args": {"max_tokens": limits} if limits else {},
        "additional_details": as_details({**details, **further, **groups}),
    }


def result_id(record: RunRecord) -> str:
    """Return the id that joins a run's samples with its score."""
    metric, key = primary_of(record)
    return f"{record.spec.benchmark.name}:{metric},{key}"


def source_data(spec: RunSpec, dataset: str | None) -> Plain:
    """Return where the benchmark's data are: on the hub if a hub id was given, else in this
    package."""
    name, sha256 = spec.benchmark.name, str(spec.inputs.get("dataset", ""))
    if dataset:
        return {"dataset_name": name, "source_type": "hf_dataset", "hf_repo": dataset}
    where = {"source_id": name, "source_version": sha256}
    return {"dataset_name": name, "source_type": "other", **where}


def as_details(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values in the schema's form for additional details: text as it is, anything else as
    JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


def samples(record: RunRecord, rows: Iterator[Plain], identity: Identity) -> Iterator[Plain]:
    """Yield the lines of `UUID_samples.jsonl`.

    The schema requires a grade and a prompt: samples without a grade, or whose prompt is not known
    on this machine, are left out.
    """
    for row in rows:
        if row["prompt"] is None or row["value"] is None:
            continue
        asked = {"raw": row["prompt"], "reference": [row["gold"]] if row["gold"] else []}
        yield {
            "schema_version": SCHEMA_VERSION,
            "evaluation_id": identity.evaluation,
            "model_id": identity.model,
            "evaluation_name": identity.benchmark,
            "evaluation_result_id": result_id(record),
            "sample_id": row["id"],
            "sample_hash": sample_hash(asked),
            "interaction_type": "single_turn",
            "input": asked,
            "output": {"raw": [row["text"]]},
            "answer_attribution": attribution(row, primary_of(record)[1]),
            "evaluation": {"score": float(row["value"]), "is_correct": row["value"] == 1},
            "performance": performance(row),
            "metadata": {"verdict": row["verdict"]},
        }


def sample_hash(asked: Plain) -> str:
    """Return sha256 of prompt and references, as all converters to this schema compute it."""
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def attribution(row: Plain, method: str) -> list[Plain]:
    """Return the answer that was read from the text; empty if the benchmark does not report it."""
    if row["extracted"] is None:
        return []
    return [
        {
            "turn_idx": 0,
            "source": "output.raw",
            "extracted_value": row["extracted"],
            "extraction_method": method,
            "is_terminal": True,
        }
    ]


def performance(row: Plain) -> Plain:
    """Return latency and counts of a sample, where they are known."""
    seconds = {} if row["seconds"] is None else {"latency_ms": 1000 * row["seconds"]}
    counts = {name: row[name] for name in COUNTS if row.get(name) is not None}
    return {**seconds, "additional_details": as_details(counts)}
