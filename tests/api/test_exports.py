"""Exported runs, read by the programs that they are for."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from uuid import UUID
from zipfile import ZipFile

import pandas as pd
import pytest
import yaml
from datasets import load_from_disk
from huggingface_hub import parse_eval_result_entries
from jsonschema import Draft7Validator
from lm_eval.utils import get_results_filenames, get_sample_results_filenames, make_table

import dllm_bench as db
from dllm_bench.cli.main import main
from dllm_bench.store.record import RunRecord

SCHEMAS = sorted(Path(sys.prefix, "schemas").glob("every_eval_ever-*.whl"))  # see the Makefile


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord]:
    folder = tmp_path_factory.mktemp("results")
    settings = {"hardware": "cpu", "limit": 3, "benchmark.max_new_tokens": 32}
    return folder, db.run("tiny-llada", "fast_dllm", "minigsm", results=folder, **settings)


def exported(run: tuple[Path, RunRecord], out: Path, form: str, *arguments: str) -> int:
    """arguments: further runs, and options."""
    results, record = run
    where = ("--results", str(results), "--out", str(out))
    return main(["export", record.spec.short, *arguments, "--to", form, *where])


@pytest.mark.parametrize("form", ["parquet", "csv", "hf-dataset"])
def test_samples_come_with_prompt_answers_and_grade(form, run, tmp_path) -> None:
    assert exported(run, tmp_path / form, form) == 0
    if form == "parquet":
        found = pd.read_parquet(tmp_path / form / "samples.parquet")
    elif form == "csv":
        found = pd.read_csv(tmp_path / form / "samples.csv", keep_default_na=False)
    else:
        found = load_from_disk(str(tmp_path / form)).to_pandas()
    record = run[1]
    assert list(found["id"]) == record.columns["id"]
    assert list(found["value"]) == record.columns["value"]
    assert found["prompt"].str.startswith("Question: ").all()
    right = found.gold.str.split().str[-1] == found.extracted
    assert list(right) == [value == 1 for value in record.columns["value"]]


def test_lm_eval_reads_its_form(run: tuple[Path, RunRecord], tmp_path: Path) -> None:
    assert exported(run, tmp_path, "lm-eval") == 0
    record, (folder,) = run[1], tmp_path.iterdir()
    names = [str(path) for path in folder.iterdir()]
    (results,), (samples,) = get_results_filenames(names), get_sample_results_filenames(names)
    found = json.loads(Path(results).read_text())
    table = make_table(found)
    assert record.score and "exact_match" in table and f"{record.score.mean:.4f}" in table
    assert found["results"]["minigsm"]["tpf/emitted,none"] == record.summary["tpf/emitted"]
    lines = [json.loads(line) for line in Path(samples).read_text().splitlines()]
    assert [line["exact_match"] for line in lines] == record.columns["value"]
    assert all(line["target"] and line["resps"][0][0] for line in lines)


def test_the_hub_reads_its_form(run, tmp_path, capsys) -> None:
    assert exported(run, tmp_path, "hub", "--dataset", "minigsm", "--task", "default") == 2
    assert "--dataset OWNER/NAME" in capsys.readouterr().err
    assert exported(run, tmp_path, "hub", "--dataset", "me/minigsm", "--task", "default") == 0
    (file,) = (tmp_path / ".eval_results").iterdir()
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    score = run[1].score
    assert (entry.dataset_id, entry.task_id) == ("me/minigsm", "default")
    assert score and entry.value == pytest.approx(100 * score.mean, abs=0.01)


def test_every_eval_ever_has_the_numbers_of_the_run_and_fits_its_schemas(run, tmp_path) -> None:
    assert exported(run, tmp_path, "eee") == 2
    assert exported(run, tmp_path, "eee", "--organization", "us") == 0
    record, folder = run[1], tmp_path / "data" / "minigsm" / "dllm-bench" / "tiny-llada"
    (whole,), (lines,) = folder.glob("*.json"), folder.glob("*.jsonl")
    assert UUID(whole.stem).version == 4 and lines.name == f"{whole.stem}_samples.jsonl"
    found, text = json.loads(whole.read_text()), lines.read_text()
    samples = [json.loads(line) for line in text.splitlines()]
    assert {sample["evaluation_id"] for sample in samples} == {found["evaluation_id"]}
    assert {sample["model_id"] for sample in samples} == {found["model_info"]["id"]}
    detail, (result,) = found["detailed_evaluation_results"], found["evaluation_results"]
    assert tmp_path / detail["file_path"] == lines and detail["total_rows"] == len(samples) == 3
    assert detail["checksum"] == hashlib.sha256(text.encode()).hexdigest()
    assert record.score and result["score_details"]["score"] == record.score.mean
    assert [one["evaluation"]["score"] for one in samples] == record.columns["value"]
    details = result["score_details"]["details"]
    assert json.loads(details["tpf/emitted"]) == record.summary["tpf/emitted"]
    assert str(tmp_path.parent) not in whole.read_text() + text  # no path of this machine
    if not SCHEMAS:
        pytest.skip("every-eval-ever's wheel is not below .venv/schemas")
    with ZipFile(SCHEMAS[-1]) as wheel:
        names = (f"every_eval_ever/schemas/{n}" for n in ("eval", "instance_level_eval"))
        texts = (wheel.read(f"{name}.schema.json") for name in names)
        of_run, of_sample = map(Draft7Validator, map(json.loads, texts))
    of_run.validate(found)
    for sample in samples:
        of_sample.validate(sample)
    del found["evaluation_results"][0]["metric_config"]
    assert not of_run.is_valid(found)


def test_the_aup_leaderboard_has_a_curve_of_a_sweep(run, tmp_path, capsys) -> None:
    """As d3LLM's data files: task -> method -> pairs of TPF and score in percent."""
    results, fast = run
    settings = {"hardware": "cpu", "benchmark.max_new_tokens": 32}
    settings |= {"decoder.select.strict": True, "decoder.select.tau": 1.0}
    slow, short = (
        db.run("tiny-llada", name, "minigsm", results=results, limit=limit, **settings)
        for name, limit in (("fast_dllm", 3), ("credit", 1))
    )
    assert exported(run, tmp_path, "aup", slow.spec.short) == 0
    found = yaml.safe_load((tmp_path / "data_dllm_bench.yaml").read_text())
    assert list(found) == ["minigsm"] and len(found["minigsm"]) == 1
    for point, one in zip(found["minigsm"]["fast_dllm-tiny-llada"], (slow, fast), strict=True):
        assert one.score
        tpf, score = one.summary["tpf/emitted"], 100 * one.score.mean
        assert point == [pytest.approx(tpf, abs=1e-4), pytest.approx(score, abs=0.01)]
    assert exported(run, tmp_path, "aup", short.spec.short) == 2
    assert "choose runs over the same items" in capsys.readouterr().err
