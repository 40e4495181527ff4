"""Exported runs, read by the programs that they are for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from datasets import load_from_disk
from huggingface_hub import parse_eval_result_entries
from lm_eval.utils import get_results_filenames, get_sample_results_filenames, make_table

import dllm_bench as db
from dllm_bench.cli.main import main
from dllm_bench.store.record import RunRecord


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord]:
    """A run of three items."""
    folder = tmp_path_factory.mktemp("results")
    settings = {"hardware": "cpu", "limit": 3, "benchmark.max_new_tokens": 32}
    return folder, db.run("tiny-llada", "fast_dllm", "minigsm", results=folder, **settings)


def exported(run: tuple[Path, RunRecord], out: Path, *arguments: str) -> int:
    results, record = run
    where = ("--results", str(results), "--out", str(out))
    return main(["export", record.spec.short, *where, "--to", *arguments])


@pytest.mark.parametrize("form", ["parquet", "hf-dataset"])
def test_samples_come_with_prompt_answers_and_grade(
    form: str, run: tuple[Path, RunRecord], tmp_path: Path
) -> None:
    assert exported(run, tmp_path / form, form) == 0
    if form == "parquet":
        found = pd.read_parquet(tmp_path / form / "samples.parquet")
    else:
        found = load_from_disk(str(tmp_path / form)).to_pandas()
    record = run[1]
    assert list(found["id"]) == record.columns["id"]
    assert list(found["value"]) == record.columns["value"]
    assert found["prompt"].str.startswith("Question: ").all()
    right = [
        gold.split()[-1] == read for gold, read in zip(found.gold, found.extracted, strict=True)
    ]
    assert right == [value == 1 for value in record.columns["value"]]


def test_lm_eval_reads_its_form(run: tuple[Path, RunRecord], tmp_path: Path) -> None:
    assert exported(run, tmp_path, "lm-eval") == 0
    record, (folder,) = run[1], tmp_path.iterdir()
    names = [str(path) for path in folder.iterdir()]
    (results,), (samples,) = get_results_filenames(names), get_sample_results_filenames(names)
    found = json.loads(Path(results).read_text())
    table = make_table(found)
    assert record.score is not None
    assert "exact_match" in table and f"{record.score.mean:.4f}" in table
    assert found["results"]["minigsm"]["tpf/emitted,none"] == record.summary["tpf/emitted"]
    lines = [json.loads(line) for line in Path(samples).read_text().splitlines()]
    assert [line["exact_match"] for line in lines] == record.columns["value"]
    assert all(line["target"] and line["resps"][0][0] for line in lines)


def test_the_hub_reads_its_form(
    run: tuple[Path, RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(run, tmp_path, "hub") == 2
    assert "--dataset OWNER/NAME" in capsys.readouterr().err
    assert exported(run, tmp_path, "hub", "--dataset", "me/minigsm", "--task", "default") == 0
    (file,) = (tmp_path / ".eval_results").iterdir()
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    record = run[1]
    assert record.score is not None
    assert (entry.dataset_id, entry.task_id) == ("me/minigsm", "default")
    assert entry.value == pytest.approx(100 * record.score.mean, abs=0.01)


def test_a_run_folder_of_somebody_else_is_graded_again(
    run: tuple[Path, RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, record = run
    shutil.copytree(results / "runs", tmp_path / "runs")
    assert main(["rescore", record.spec.short, "--results", str(tmp_path)]) == 0
    assert "0 of 3 samples changed" in capsys.readouterr().out


def test_an_unknown_form_names_the_forms(
    run: tuple[Path, RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(run, tmp_path, "parket") == 2
    assert "did you mean 'parquet'?" in capsys.readouterr().err
