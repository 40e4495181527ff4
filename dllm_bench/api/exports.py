"""Export what runs measured to the formats of other programs.

A function `to_FORM` writes each of the formats: parquet, csv, a data set of `datasets`, lm-eval's
results folder, the data of d3LLM's AUP leaderboard, the results that the Hugging Face hub shows on
a model's page, and Every Eval Ever. The first four contain every sample with its prompt, right
answer, extracted answer and grade.

`eee`, Every Eval Ever, is EvalEval's shared store of evaluations. `to_eee` writes two files per
run, at the paths of its datastore: `data/BENCHMARK/DEVELOPER/MODEL/UUID.json` with the score, and
`UUID_samples.jsonl` with a line per graded sample. Field names and requirements are those of
version 0.3.0 of its two schemas (github.com/evaleval/every_eval_ever) and of its `every_eval_ever
validate`. The schema has no field for speed: TPF, TPS and the other metrics are stored as details
of the score, and a sample's counts as details of its performance.
"""

from __future__ import annotations

import hashlib
import json
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any
from uuid import UUID

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from dllm_bench import __version__
from dllm_bench.api.runs import of_one_type, sample_rows
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.accuracy import LEVEL, MeanScore
from dllm_bench.paths import ASSETS, read_yaml
from dllm_bench.site.texts import TextSource
from dllm_bench.store.files import Plain, write_atomic
from dllm_bench.store.groups import GROUPS
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec, digest, slug
from dllm_bench.store.store import RunEntry, read_samples, sealed_record

Metric, Filter = "score", "none"  # lm-eval's names, for benchmarks without their own
SCHEMA_VERSION = "0.3.0"  # of both schemas of Every Eval Ever
LIBRARY = "dllm-bench"
CONSTANT = read_yaml(Path(__file__).with_name("eee.yaml"))
"""Place in a file of Every Eval Ever -> its fields that are the same in every file."""
COUNTS = ("forwards", "emitted", "committed", "rows")
"""Columns of a sample that `eee` has as details of its performance."""
AUP_FILE = "data_dllm_bench.yaml"  # the leaderboard's own files are data_llada.yaml and so on


@dataclass(frozen=True)
class Export:
    """Runs to export, the folder to write, and what runs do not store."""

    entries: Sequence[RunEntry]
    texts: TextSource
    out: Path
    organization: str | None = None
    """Name of the organization that ran the evaluation, for `eee`."""
    relationship: str = "third_party"
    """Of the organization to the model's developer, in the words of Every Eval Ever."""
    dataset: str | None = None
    """The benchmark's id on the hub (owner/name), for `hub` and `eee`."""
    task: str | None = None
    """The benchmark's task there, for `hub`."""


def rows_of(entry: RunEntry, texts: TextSource) -> Iterator[Plain]:
    """Yield a row per sample: `records(by="sample")`, prompt, right answer and what was read."""
    record, samples = sealed_record(entry), read_samples(entry.path)
    prompts, answers = texts.prompts(entry.spec, samples), texts.answers(entry.spec, samples)
    for row in sample_rows(record, entry.path):
        answer = answers.get(row["id"])
        yield {
            **row,
            "prompt": prompts.get(row["id"]),
            "gold": answer and answer.gold,
            "extracted": answer and answer.extracted,
        }


def graded_record(entry: RunEntry) -> tuple[RunRecord, MeanScore]:
    """Return the record of a complete run and its score; DllmBenchError without one."""
    record = sealed_record(entry)
    if record.score is None:
        raise DllmBenchError(f"Run {record.spec.short} has no score; choose a graded run.")
    return record, record.score


def frame(export: Export) -> Any:
    """Return the samples of all runs as a table of pandas, each column of one type."""
    import pandas as pd

    rows = [row for entry in export.entries for row in rows_of(entry, export.texts)]
    return pd.DataFrame(rows).apply(of_one_type)


def to_parquet(export: Export) -> Iterator[Path]:
    """Write `samples.parquet`, for pandas and all readers of Arrow."""
    yield write_atomic(export.out / "samples.parquet", frame(export).to_parquet(index=False))


def to_csv(export: Export) -> Iterator[Path]:
    """Write `samples.csv`, for spreadsheets."""
    yield write_atomic(export.out / "samples.csv", frame(export).to_csv(index=False))


def to_hf_dataset(export: Export) -> Iterator[Path]:
    """Write a folder for `datasets.load_from_disk`."""
    from datasets import Dataset  # takes a second to import

    Dataset.from_pandas(frame(export), preserve_index=False).save_to_disk(export.out)
    yield export.out


def to_lm_eval(export: Export) -> Iterator[Path]:
    """Write a results folder in lm-eval's layout: per model, a file of results and one of samples.

    All metrics of the run (TPF, TPS, forwards) are listed with the scores.
    """
    for entry in export.entries:
        record = sealed_record(entry)
        spec = record.spec
        folder = export.out / slug(f"{spec.model.name}-{spec.folder}")
        moment = datetime.fromtimestamp(record.sealed_at, UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
        results = json.dumps(lm_eval_results(record), indent=2)
        yield write_atomic(folder / f"results_{moment}.json", results)
        samples = lm_eval_samples(record, rows_of(entry, export.texts))
        path = folder / f"samples_{slug(spec.benchmark.name)}_{moment}.jsonl"
        yield write_atomic(path, "".join(f"{json.dumps(one)}\n" for one in samples))


def lm_eval_results(record: RunRecord) -> Plain:
    """Return the content of lm-eval's `results_*.json`."""
    spec, task = record.spec, record.spec.benchmark.name
    metric, key = primary_of(record)
    scores: Plain = {"alias": task}
    if record.score:
        scores[f"{metric},{key}"] = record.score.mean
        scores[f"{metric}_stderr,{key}"] = standard_error(record)
    scores |= {f"{name},none": value for name, value in measured(record).items()}
    count = len(record.columns["id"])
    return {
        "results": {task: scores},
        "group_subtasks": {task: []},
        "configs": {task: {"task": task, **spec.benchmark}},
        "versions": {task: spec.inputs.get("dataset", "")[:8]},
        "n-shot": {task: spec.benchmark.shots},
        "higher_is_better": {task: {metric: True}},
        "n-samples": {task: {"original": count, "effective": count}},
        "config": {
            "model": "dllm_bench",
            "model_args": {"model": spec.model.name, "decoder": spec.decoder},
            "batch_size": spec.batch,
            "limit": spec.limit,
            "random_seed": spec.seed,
            "dllm_bench": {"run": spec.identity_hash, **record.environment},
        },
        "date": record.sealed_at,
        "model_name": f"{spec.model.name}-{spec.label}",
    }


def measured(record: RunRecord) -> dict[str, float]:
    """Return the run's metrics that have a value."""
    return {name: value for name, value in record.summary.items() if value is not None}


def primary_of(record: RunRecord) -> tuple[str, str]:
    """Return metric and filter that the run's score is, as lm-eval names them."""
    metric, _, key = (record.spec.benchmark.primary or Metric).partition(",")
    return metric, key or Filter


def standard_error(record: RunRecord) -> float:
    """Return the standard error of the mean score over the items, as lm-eval estimates it."""
    values = list(record.values.values())
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def lm_eval_samples(record: RunRecord, rows: Iterator[Plain]) -> Iterator[Plain]:
    """Yield the lines of lm-eval's `samples_*.jsonl`."""
    metric, key = primary_of(record)
    for number, row in enumerate(rows):
        yield {
            "doc_id": number,
            "doc": {name: row[name] for name in ("id", "prompt", "gold")},
            "target": row["gold"],
            "arguments": {"gen_args_0": {"arg_0": row["prompt"], "arg_1": {}}},
            "resps": [[row["text"]]],
            "filtered_resps": [row["extracted"]],
            "filter": key,
            "metrics": [metric],
            metric: row["value"],
        }


def to_aup(export: Export) -> Iterator[Path]:
    """Write a file of d3LLM's AUP leaderboard: benchmark -> method -> [TPF, score in percent]
    pairs.

    A method is a decoder with a model. The points of its curve are its runs over a sweep of a
    threshold. TPF counts tokens up to the end of the text, as the leaderboard's scripts do.
    Raises DllmBenchError for runs without TPF or score, and for runs of one benchmark over
    different items.
    """
    curves: dict[str, dict[str, list[list[float]]]] = {}
    items: dict[str, tuple[str, set[str]]] = {}  # items of each benchmark's first run
    for entry in export.entries:
        record = sealed_record(entry)
        spec, tpf, found = record.spec, record.summary.get("tpf/emitted"), set(record.values)
        task, method = spec.benchmark.name, f"{spec.label}-{spec.model.name}"
        if record.score is None or tpf is None:
            raise DllmBenchError(
                f"Run {spec.short} has no score or no tokens per forward; choose graded runs of "
                "models that are decoded here."
            )
        first, expected = items.setdefault(task, (spec.short, found))
        if found != expected:
            raise DllmBenchError(
                f"Runs {first} and {spec.short} of {task} have {len(expected)} and {len(found)} "
                "different graded items; choose runs over the same items."
            )
        point = [round(tpf, 4), round(100 * record.score.mean, 2)]
        insort(curves.setdefault(task, {}).setdefault(method, []), point)
    text = yaml.safe_dump(curves, sort_keys=False, default_flow_style=None)
    yield write_atomic(export.out / AUP_FILE, text)


def to_hub(export: Export) -> Iterator[Path]:
    """Write the scores, in percent, to `.eval_results/NAME.yaml` of a model's repository."""
    if not export.dataset or "/" not in export.dataset or not export.task:
        raise DllmBenchError(
            f"--to hub was given --dataset {export.dataset} and --task {export.task}; give "
            "--dataset OWNER/NAME and --task ID as the eval.yaml of that data set has them."
        )
    for entry in export.entries:
        record, score = graded_record(entry)
        result = EvalResultEntry(
            dataset_id=export.dataset,
            task_id=export.task,
            value=round(100 * score.mean, 2),
            date=datetime.fromtimestamp(record.sealed_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            notes=f"dllm-bench, decoder {record.spec.label}, n = {score.n}"
            f"{f', {record.ungraded}' if record.ungraded else ''}",
        )
        path = export.out / ".eval_results" / f"{slug(record.spec.label)}-{record.spec.short}.yaml"
        text = yaml.safe_dump(eval_result_entries_to_yaml([result]), sort_keys=False)
        yield write_atomic(path, text)


# --- Every Eval Ever ------------------------------------------------------------------------------


def to_eee(export: Export) -> Iterator[Path]:
    """Write the files of each run; the same record gives the same bytes.

    DllmBenchError for a run without a score, and if the organization is not named.
    """
    for entry in export.entries:
        record, score = graded_record(entry)
        name, model, sealed_at = record.spec.benchmark.name, model_id(record.spec), record.sealed_at
        shared = {"schema_version": SCHEMA_VERSION, "evaluation_id": f"{name}/{model}/{sealed_at}"}
        # with the time of sealing, which keeps the same run of two labs apart
        uuid = UUID(hex=digest([record.identity_hash, sealed_at])[:32], version=4)
        place = "/".join(["data", *map(slug, (name, *model.split("/", 1))), str(uuid)])
        whole = {**shared, **eee_evaluation(record, score, model, export)}
        samples = eee_samples(record, model, rows_of(entry, export.texts))
        lines = [f"{json.dumps({**shared, **sample})}\n" for sample in samples]
        if lines:
            path, text = f"{place}_samples.jsonl", "".join(lines)
            yield write_atomic(export.out / path, text)
            checksum = hashlib.sha256(text.encode()).hexdigest()
            file = {"file_path": path, "checksum": checksum, "total_rows": len(lines)}
            whole["detailed_evaluation_results"] = {**CONSTANT["file"], **file}
        yield write_atomic(export.out / f"{place}.json", json.dumps(whole, indent=2) + "\n")


def model_id(spec: RunSpec) -> str:
    """Return OWNER/NAME: the id on the hub; dllm-bench/NAME if the model ships, else
    unknown/NAME."""
    from dllm_bench.models.sources import is_hub_id

    path = spec.model.path or ""
    owner = LIBRARY if path.startswith(ASSETS) else "unknown"
    return path if is_hub_id(path) else f"{owner}/{slug(spec.model.name)}"


def eee_evaluation(record: RunRecord, score: MeanScore, model: str, export: Export) -> Plain:
    """Return the content of a run's `UUID.json` but its ids and the reference to its samples."""
    version = str(record.environment.get("dllm_bench") or __version__)
    started = record.sessions[0].started_at if record.sessions else record.sealed_at
    return {
        "evaluation_timestamp": str(started),
        "retrieved_timestamp": str(record.sealed_at),
        "source_metadata": {
            **CONSTANT["source"],
            "source_organization_name": export.organization,
            "evaluator_relationship": export.relationship,
        },
        "eval_library": {"name": LIBRARY, "version": version},
        "model_info": model_info(record.spec, model, version),
        "evaluation_results": [eee_result(record, score, export.dataset)],
    }


def model_info(spec: RunSpec, model: str, version: str) -> Plain:
    """Return the model, and who controlled its deployment."""
    served, owner = spec.model.is_served, model.split("/")[0]
    engine = {"name": LIBRARY, "version": version}
    details = {
        "deployment_type": "unknown" if served else "self_deployed",
        "model_availability": "unknown" if owner == "unknown" else "open_weights",
        **as_details(spec.inputs),
    }
    return {
        "name": spec.model.name,
        "id": model,
        "developer": owner,
        "inference_engine": {"name": spec.model.engine or "unknown"} if served else engine,
        "additional_details": details,
    }


def eee_result(record: RunRecord, score: MeanScore, dataset: str | None) -> Plain:
    """Return the primary score with its interval, how it is computed, and how the texts were
    decoded."""
    spec, name = record.spec, record.spec.benchmark.name
    metric, key = primary_of(record)
    source = {"source_type": "hf_dataset", "hf_repo": dataset}
    if not dataset:  # the benchmark's data are in this package
        source = {"source_type": "other", "source_id": name}
        source["source_version"] = str(spec.inputs.get("dataset", ""))
    return {
        **result_names(record),
        "source_data": {"dataset_name": name, **source},
        "metric_config": {
            "metric_id": f"{name}.{metric}" if metric == Metric else metric,
            "metric_name": metric,
            "metric_parameters": {"filter": key},
            **CONSTANT["metric"],
        },
        "score_details": {
            "score": score.mean,
            "details": as_details({**record.scores, **measured(record)}),
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
        "generation_config": generation_config(record),
    }


def generation_config(record: RunRecord) -> Plain:
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


def result_names(record: RunRecord) -> Plain:
    """Return the name of the evaluation, and the id that joins a run's samples with its score."""
    name, (metric, key) = record.spec.benchmark.name, primary_of(record)
    return {"evaluation_name": name, "evaluation_result_id": f"{name}:{metric},{key}"}


def as_details(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values in the schema's form for additional details: text as it is, anything else as
    JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


def eee_samples(record: RunRecord, model: str, rows: Iterator[Plain]) -> Iterator[Plain]:
    """Yield the lines of `UUID_samples.jsonl` but their shared ids.

    The schema requires a grade and a prompt: samples without a grade, or whose prompt is not known
    on this machine, are left out.
    """
    for row in rows:
        if row["prompt"] is None or row["value"] is None:
            continue
        asked = {"raw": row["prompt"], "reference": [row["gold"]] if row["gold"] else []}
        # hashed as by all converters to this schema
        hashed = json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()
        read = {"extracted_value": row["extracted"], "extraction_method": primary_of(record)[1]}
        read |= CONSTANT["answer"]
        seconds = {} if row["seconds"] is None else {"latency_ms": 1000 * row["seconds"]}
        counts = {name: row[name] for name in COUNTS if row.get(name) is not None}
        yield {
            "model_id": model,
            **result_names(record),
            "sample_id": row["id"],
            "sample_hash": hashlib.sha256(hashed).hexdigest(),
            "interaction_type": "single_turn",
            "input": asked,
            "output": {"raw": [row["text"]]},
            "answer_attribution": [] if row["extracted"] is None else [read],
            "evaluation": {"score": float(row["value"]), "is_correct": row["value"] == 1},
            "performance": {**seconds, "additional_details": as_details(counts)},
            "metadata": {"verdict": row["verdict"]},
        }
