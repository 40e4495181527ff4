"""Runs, records, comparisons and tables from Python, and what a notebook shows of them.

Exported runs are read by the programs that they are for.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from uuid import UUID
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pytest
import yaml
from datasets import load_from_disk
from huggingface_hub import parse_eval_result_entries
from jsonschema import Draft7Validator
from lm_eval.utils import get_results_filenames, get_sample_results_filenames, make_table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

import dllm_bench as db
from dllm_bench.api.runs import Table
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.trade_off import draw, looks, place_names
from dllm_bench.runs.progress import summary
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store
from tests.api.models import loaded

SETTINGS = {"hardware": "cpu", "limit": 2, "benchmark.max_new_tokens": 32}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunRecord]]:
    """Return two thresholds of one decoder, and another decoder."""
    folder = tmp_path_factory.mktemp("results")
    made = []
    for name, tau in (("fast_dllm", 0.5), ("fast_dllm", 0.9), ("credit", 0.9)):
        settings = {**SETTINGS, "decoder.select.tau": tau}
        made.append(db.run("tiny-llada", name, "minigsm", results=folder, **settings))
    return folder, made


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        ("d2f", "was trained with full attention, the decoder uses block_causal"),
        ("dream", "published for drawn tokens.*temperature 0"),
        ("fast_dllm", None),
    ],
)
def test_a_decoder_that_does_not_fit_warns_in_the_record(decoder, text, tmp_path) -> None:
    record = db.run("tiny-llada", decoder, "minigsm", results=tmp_path, **{**SETTINGS, "limit": 1})
    stored = Store(tmp_path / "runs").record(record.spec)
    assert stored is not None and len(stored.warnings) == (text is not None)
    if text:
        assert re.search(text, stored.warnings[0])
    shown = [line for line in summary(stored) if line.startswith("warning: ")]
    assert shown == [f"warning: {warning}" for warning in stored.warnings]


def test_a_run_is_the_run_of_the_command_line(runs) -> None:
    folder, (first, *_) = runs
    command = [f"{name}={value}" for name, value in SETTINGS.items()]
    choice = ["decoder=fast_dllm", "decoder.select.tau=0.5", f"paths.results={folder}", *command]
    assert main(["run", *choice]) == 0
    assert len(db.records(folder)) == 3
    decoder = db.decoder("fast_dllm", **{"select.tau": np.linspace(0.5, 1, 2)[0]})
    counted = {**SETTINGS, "limit": np.int64(2)}  # numbers as a sweep over an array has them
    again = db.run("tiny-llada", decoder, "minigsm", results=folder, **counted)
    assert again.identity_hash == first.identity_hash


def test_records_are_a_table_a_sweep_can_be_read_from(runs, tmp_path) -> None:
    folder, (*made, _) = runs
    rows = db.records(folder)
    swept = rows[rows.decoder == "fast_dllm"].set_index("decoder.select.tau").sort_index()
    assert list(swept.index) == [0.5, 0.9]
    assert list(swept["tpf/committed"]) == [one.summary["tpf/committed"] for one in made]
    samples = db.records(folder, by="sample")
    assert len(samples) == 6 and samples.text.str.len().gt(0).all()
    for name, frame in (("runs", rows), ("samples", samples)):
        frame.to_parquet(tmp_path / name)
        assert len(pd.read_parquet(tmp_path / name)) == len(frame)


def test_two_runs_are_compared_by_record_or_hash(runs) -> None:
    """Columns are named by the decoder, by settings where that is one, or by the hash."""
    folder, (first, second, credit) = runs
    result = db.compare(first, second.spec.short, results=folder)
    assert result.scores[0].n == 2
    metrics, names = result.to_pandas(), ["fast_dllm select.tau=0.5", "fast_dllm select.tau=0.9"]
    assert list(metrics) == names
    assert metrics.loc["tpf/committed", names[0]] == first.summary["tpf/committed"]
    heads, hashes, *_ = str(result).splitlines()
    assert all(name in heads for name in names) and first.spec.short in hashes
    assert list(db.compare(second, credit).to_pandas()) == ["fast_dllm", "credit"]
    other = replace(first, spec=replace(first.spec, seed=1, batch=2))
    alike = [f"fast_dllm {one.spec.short}" for one in (first, other)]
    assert list(db.compare(first, other).to_pandas()) == alike


def test_why_a_sample_is_wrong_can_be_seen(runs, capsys) -> None:
    folder, (first, *_) = runs
    assert main(["show", first.spec.short, "--sample", "0", "--results", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("prompt:\nQuestion: ")
    gold, _, rest = shown.partition("right answer:")[2].partition("read from the text: ")
    answer = rest.split()[0]
    is_right = gold.split()[-1] == answer
    rows = rest.partition("all gradings:\n")[2].splitlines()[:2]
    graded = {name: values for name, *values in map(str.split, rows)}
    assert graded.keys() == {"exact_match,flexible-extract", "exact_match,strict-match"}
    assert graded["exact_match,strict-match"] == [str(int(is_right)), answer]
    verdict = "correct (1.0)" if is_right else first.columns["verdict"][0] + " (0.0)"
    assert f"verdict: {verdict}" in rest


def test_an_evaluation_of_objects_gives_the_numbers_of_the_run(runs) -> None:
    _, (first, *_) = runs
    decoder = db.decoder("fast_dllm", **{"select.tau": 0.5})
    size = {"limit": 2, "max_new_tokens": 32, "batch": 2}
    record = db.evaluate(loaded("tiny-llada"), decoder, "minigsm", **size)
    assert record.summary["tpf/committed"] == first.summary["tpf/committed"]
    assert (record.values, record.score) == (first.values, first.score)


HOSTILE = "<script>alert(1)</script>"


def test_short_forms_are_one_line(runs) -> None:
    folder, (record, other, _) = runs
    (completion,) = db.generate(loaded("tiny-llada"), "2 + 2 =", "fast_dllm", 32)
    for shown, part in (
        (completion, "forwards)"),
        (record, "fast_dllm, tiny-llada on minigsm: score"),
        (db.table("lopa/table5", results=folder), "Table(lopa/table5, "),
        (db.compare(record, other), "RunComparison(fast_dllm"),
    ):
        assert part in repr(shown) and len(repr(shown)) < 200 and "\n" not in repr(shown)


def test_a_facet_may_be_called_none(monkeypatch) -> None:
    monkeypatch.setattr("dllm_bench.api.runs.as_csv", lambda _: "cache,low\nNone,\nNA,1\n")
    frame = Table(Mock()).to_pandas()
    assert list(frame.cache) == ["None", "NA"] and list(frame.low.isna()) == [True, False]


def test_a_notebook_shows_a_view_that_escapes(runs) -> None:
    _, (record, other, _) = runs
    hostile = replace(record, spec=replace(record.spec, label=HOSTILE))
    for shown in (hostile, db.compare(hostile, other)):
        assert HOSTILE not in shown._repr_html_() and "&lt;script&gt;" in shown._repr_html_()
    assert "<table" in record._repr_html_()


def test_a_trade_off_is_drawn_from_stored_runs(runs, tmp_path) -> None:
    folder, made = runs
    picture = db.trade_off("tiny-llada", "minigsm", results=folder)
    assert sorted(picture.to_pandas()["run"]) == sorted(one.spec.short for one in made)
    assert picture.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in picture.save(tmp_path / "a.svg").read_bytes()
    assert "<img" in picture._repr_html_() and repr(picture).startswith("Picture(tiny-llada on")
    with pytest.raises(DllmBenchError, match=r"ends in .png or .svg"):
        picture.save(tmp_path / "a.pdf")


def test_names_do_not_overlap_and_the_front_is_drawn() -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    decoders = ("vanilla", "fast_dllm", "credit", "lopa_dream", "klass", "mine")
    rows = [(name, 4 + 0.05 * i, 95 - i, 90 - i, 97, True) for i, name in enumerate(decoders)]
    points = pd.DataFrame(rows, columns=["decoder", "speed", "score", "low", "high", "front"])
    draw(ax, points)
    figure.draw_without_rendering()
    unnamed = place_names(ax, points)
    figure.draw_without_rendering()
    names = [one for one in ax.texts if isinstance(one, Annotation)]
    assert {name.get_text() for name in names} | unnamed == set(decoders) and len(names) >= 4
    boxes = [Text.get_window_extent(name) for name in names]
    assert not any(box.count_overlaps(boxes[:index]) for index, box in enumerate(boxes))
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith("front")]
    assert list(line.get_xdata()) == sorted(points.speed)


def test_a_decoder_has_the_colour_of_its_family() -> None:
    found = looks(["lopa", "lopa_dream", "fast_dllm", "mine"])
    assert found["lopa"].colour == found["lopa_dream"].colour != found["fast_dllm"].colour
    assert len({(look.colour, look.marker) for look in found.values()}) == 4


def test_acceptance_has_a_row_per_position(runs) -> None:
    record = runs[1][0]
    rounds = [[[3, 2, 3], [2, 0, 1]], [[0, 0, 1]]]
    found = db.acceptance(replace(record, columns={**record.columns, "rounds": rounds}))
    assert list(found.position) == [1, 2, 3] and list(found.survival) == [0.5, 0.5, 0.0]
    none = replace(record, columns={**record.columns, "rounds": [[[0, 0, 1]], [[0, 0, 1]]]})
    assert db.acceptance(record).empty and db.acceptance(none).empty


def test_figures_and_claims_are_read_from_stored_runs(runs, tmp_path, monkeypatch) -> None:
    """Of two claims: to compose what all of them ask for takes as long as twenty runs."""
    folder, few = runs[0], ["lopa/tpf_gsm8k", "dspark/calibration"]
    monkeypatch.setattr("dllm_bench.claims.verdict.names_of", lambda kind: few)
    picture = db.figure("lopa/figure1", results=folder)
    assert "kind" in picture.to_pandas() and picture.save(tmp_path / "a.png").stat().st_size > 1000
    assert dict(db.verdicts("lopa", results=folder).verdict) == {"lopa/tpf_gsm8k": "not run"}


SCHEMAS = sorted(Path(sys.prefix, "schemas").glob("every_eval_ever-*.whl"))  # see the Makefile


def exported(runs: tuple[Path, list[RunRecord]], out: Path, form: str, *arguments: str) -> int:
    """arguments: further runs, and options."""
    results, (record, *_) = runs
    where = ("--results", str(results), "--out", str(out))
    return main(["export", record.spec.short, *arguments, "--to", form, *where])


@pytest.mark.parametrize("form", ["parquet", "csv", "hf-dataset"])
def test_samples_come_with_prompt_answers_and_grade(form, runs, tmp_path) -> None:
    assert exported(runs, tmp_path / form, form) == 0
    if form == "parquet":
        found = pd.read_parquet(tmp_path / form / "samples.parquet")
    elif form == "csv":
        found = pd.read_csv(tmp_path / form / "samples.csv", keep_default_na=False)
    else:
        found = load_from_disk(str(tmp_path / form)).to_pandas()
    record = runs[1][0]
    assert list(found["id"]) == record.columns["id"]
    assert list(found["value"]) == record.columns["value"]
    assert found["prompt"].str.startswith("Question: ").all()
    right = found.gold.str.split().str[-1] == found.extracted
    assert list(right) == [value == 1 for value in record.columns["value"]]


def test_lm_eval_reads_its_form(runs, tmp_path) -> None:
    assert exported(runs, tmp_path, "lm-eval") == 0
    record, (folder,) = runs[1][0], tmp_path.iterdir()
    names = [str(path) for path in folder.iterdir()]
    (results,), (samples,) = get_results_filenames(names), get_sample_results_filenames(names)
    found = json.loads(Path(results).read_text())
    table = make_table(found)
    assert record.score and "exact_match" in table and f"{record.score.mean:.4f}" in table
    assert found["results"]["minigsm"]["tpf/emitted,none"] == record.summary["tpf/emitted"]
    lines = [json.loads(line) for line in Path(samples).read_text().splitlines()]
    assert [line["exact_match"] for line in lines] == record.columns["value"]
    assert all(line["target"] and line["resps"][0][0] for line in lines)


def test_the_hub_reads_its_form(runs, tmp_path, capsys) -> None:
    assert exported(runs, tmp_path, "hub", "--dataset", "minigsm", "--task", "default") == 2
    assert "--dataset OWNER/NAME" in capsys.readouterr().err
    assert exported(runs, tmp_path, "hub", "--dataset", "me/minigsm", "--task", "default") == 0
    (file,) = (tmp_path / ".eval_results").iterdir()
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    score = runs[1][0].score
    assert (entry.dataset_id, entry.task_id) == ("me/minigsm", "default")
    assert score and entry.value == pytest.approx(100 * score.mean, abs=0.01)


def test_every_eval_ever_has_the_numbers_of_the_run_and_fits_its_schemas(runs, tmp_path) -> None:
    assert exported(runs, tmp_path, "eee") == 2
    assert exported(runs, tmp_path, "eee", "--organization", "us") == 0
    record, folder = runs[1][0], tmp_path / "data" / "minigsm" / "dllm-bench" / "tiny-llada"
    (whole,), (lines,) = folder.glob("*.json"), folder.glob("*.jsonl")
    assert UUID(whole.stem).version == 4 and lines.name == f"{whole.stem}_samples.jsonl"
    found, text = json.loads(whole.read_text()), lines.read_text()
    samples = [json.loads(line) for line in text.splitlines()]
    assert {sample["evaluation_id"] for sample in samples} == {found["evaluation_id"]}
    assert {sample["model_id"] for sample in samples} == {found["model_info"]["id"]}
    detail, (result,) = found["detailed_evaluation_results"], found["evaluation_results"]
    assert tmp_path / detail["file_path"] == lines and detail["total_rows"] == len(samples) == 2
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


def test_the_aup_leaderboard_has_a_curve_of_a_sweep(runs, tmp_path, capsys) -> None:
    """As d3LLM's data files: task -> method -> pairs of TPF and score in percent."""
    folder, (fast, slow, _) = runs
    results = shutil.copytree(folder, tmp_path / "results")
    more = {**SETTINGS, "limit": 1}
    short = db.run("tiny-llada", "vanilla", "minigsm", results=results, **more)
    copied = results, [fast]
    assert exported(copied, tmp_path, "aup", slow.spec.short) == 0
    found = yaml.safe_load((tmp_path / "data_dllm_bench.yaml").read_text())
    assert list(found) == ["minigsm"] and len(found["minigsm"]) == 1
    for point, one in zip(found["minigsm"]["fast_dllm-tiny-llada"], (slow, fast), strict=True):
        assert one.score
        tpf, score = one.summary["tpf/emitted"], 100 * one.score.mean
        assert point == [pytest.approx(tpf, abs=1e-4), pytest.approx(score, abs=0.01)]
    assert exported(copied, tmp_path, "aup", short.spec.short) == 2
    assert "choose runs over the same items" in capsys.readouterr().err
