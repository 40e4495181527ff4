"""Export what runs measured to the formats of other programs.

`EXPORTS` lists the formats: parquet, csv, a data set of `datasets`, lm-eval's results folder, the
data of d3LLM's AUP leaderboard; `to_hub` writes the results that the Hugging Face hub shows on a
model's page. The first four contain every sample with its prompt, right answer, extracted answer
and grade. Every Eval Ever's format is in `every_eval_ever`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from dllm_bench.api.comparison import sealed_record
from dllm_bench.api.runs import of_one_type, sample_rows
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.site.texts import TextSource
from dllm_bench.store.files import write_atomic
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import slug
from dllm_bench.store.store import RunEntry, read_samples

Plain = dict[str, Any]
Metric, Filter = "score", "none"  # lm-eval's names, for benchmarks without their own
AUP_FILE = "data_dllm_bench.yaml"  # the leaderboard's own files are data_llada.yaml and so on


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


def frame(entries: Sequence[RunEntry], texts: TextSource) -> Any:
    """Return the samples of all runs as a table of pandas, each column of one type."""
    import pandas as pd

    every = [row for entry in entries for row in rows_of(entry, texts)]
    return pd.DataFrame(every).apply(of_one_type)


def to_parquet(entries: Sequence[RunEntry], texts: TextSource, out: Path) -> Iterator[Path]:
    """Write `samples.parquet`, for pandas and all readers of Arrow."""
    yield write_atomic(out / "samples.parquet", frame(entries, texts).to_parquet(index=False))


def to_csv(entries: Sequence[RunEntry], texts: TextSource, out: Path) -> Iterator[Path]:
    """Write `samples.csv`, for spreadsheets."""
    yield write_atomic(out / "samples.csv", frame(entries, texts).to_csv(index=False))


def to_dataset(entries: Sequence[RunEntry], texts: TextSource, out: Path) -> Iterator[Path]:
    """Write a folder for `datasets.load_from_disk`."""
    from datasets import Dataset  # takes a second to import

    Dataset.from_pandas(frame(entries, texts), preserve_index=False).save_to_disk(out)
    yield out


def to_lm_eval(entries: Sequence[RunEntry], texts: TextSource, out: Path) -> Iterator[Path]:
    """Write a results folder in lm-eval's layout: per model, a file of results and one of samples.

    All metrics of the run (TPF, TPS, forwards) are listed with the scores.
    """
    for entry in entries:
        record = sealed_record(entry)
        spec, folder = record.spec, out / slug(f"{record.spec.model.name}-{record.spec.folder}")
        moment = datetime.fromtimestamp(record.sealed_at, UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
        results = json.dumps(lm_eval_results(record), indent=2)
        yield write_atomic(folder / f"results_{moment}.json", results)
        samples = lm_eval_samples(record, rows_of(entry, texts))
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
    measured = {name: value for name, value in record.summary.items() if value is not None}
    count = len(record.columns["id"])
    return {
        "results": {task: {**scores, **{f"{name},none": v for name, v in measured.items()}}},
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


def primary_of(record: RunRecord) -> tuple[str, str]:
    """Return metric and filter that the run's score is, as lm-eval names them."""
    metric, _, key = (record.spec.benchmark.primary or Metric).partition(",")
    return metric, key or Filter


def standard_error(record: RunRecord) -> float:
    """Return the standard error of the mean score over the items, as lm-eval estimates it."""
    values = list(record.values.values())
    mean, n = sum(values) / len(values), len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n) if n > 1 else 0.0


def lm_eval_samples(record: RunRecord, rows: Iterator[Plain]) -> Iterator[Plain]:
    """Yield the lines of lm-eval's `samples_*.jsonl`."""
    metric, key = primary_of(record)
    for number, row in enumerate(rows):
        doc = {name: row[name] for name in ("id", "prompt", "gold")}
        yield {
            "doc_id": number,
            "doc": doc,
            "target": row["gold"],
            "arguments": {"gen_args_0": {"arg_0": row["prompt"], "arg_1": {}}},
            "resps": [[row["text"]]],
            "filtered_resps": [row["extracted"]],
            "filter": key,
            "metrics": [metric],
            metric: row["value"],
        }


def to_aup(entries: Sequence[RunEntry], texts: TextSource, out: Path) -> Iterator[Path]:
    """Write a file of d3LLM's AUP leaderboard: benchmark -> method -> [TPF, score in percent]
    pairs.

    A method is a decoder with a model. The points of its curve are its runs over a sweep of a
    threshold. TPF counts tokens up to the end of the text, as the leaderboard's scripts do.
    Raises DllmBenchError for runs without TPF or score, and for runs of one benchmark over
    different items.
    """
    curves: dict[str, dict[str, list[list[float]]]] = {}
    items: dict[str, tuple[str, set[str]]] = {}  # items of each benchmark's first run
    for entry in entries:
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
        curves.setdefault(task, {}).setdefault(method, []).append(point)
    for methods in curves.values():
        for points in methods.values():
            points.sort()
    text = yaml.safe_dump(curves, sort_keys=False, default_flow_style=None)
    yield write_atomic(out / AUP_FILE, text)


def to_hub(
    entries: Sequence[RunEntry], out: Path, dataset: str | None, task: str | None
) -> Iterator[Path]:
    """Write the scores, in percent, to `.eval_results/NAME.yaml` of a model's repository.

    dataset: the hub's id of the benchmark; task: its task there. Their names are the hub's own.
    """
    if not dataset or not task:
        raise DllmBenchError(
            "--to hub was asked without the benchmark's name on the hub; add --dataset OWNER/NAME "
            "and --task ID, as the eval.yaml of that data set has them."
        )
    for entry in entries:
        record, score = graded_record(entry)
        result = EvalResultEntry(
            dataset_id=dataset,
            task_id=task,
            value=round(100 * score.mean, 2),
            date=datetime.fromtimestamp(record.sealed_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            notes=f"dllm-bench, decoder {record.spec.label}, n = {score.n}"
            f"{f', {record.ungraded}' if record.ungraded else ''}",
        )
        path = out / ".eval_results" / f"{slug(record.spec.label)}-{record.spec.short}.yaml"
        text = yaml.safe_dump(eval_result_entries_to_yaml([result]), sort_keys=False)
        yield write_atomic(path, text)


EXPORTS: Mapping[str, Callable[[Sequence[RunEntry], TextSource, Path], Iterator[Path]]] = {
    "parquet": to_parquet,
    "csv": to_csv,
    "hf-dataset": to_dataset,
    "lm-eval": to_lm_eval,
    "aup": to_aup,
}
"""Format -> the function that writes it."""
HUB = "hub"
