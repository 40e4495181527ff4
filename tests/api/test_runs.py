"""Runs, records, comparisons and tables from Python, and what a notebook shows of them.

Exported runs are read by the programs that they are for. Models that are objects decode like ours,
stay as they were, and have runs like any other.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from datasets import load_from_disk
from huggingface_hub import parse_eval_result_entries
from jsonschema import Draft7Validator
from lm_eval.utils import get_results_filenames, get_sample_results_filenames, make_table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from torch import Tensor

import dllm_bench as db
from dllm_bench.api.compose import compose
from dllm_bench.api.runs import Table
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.trade_off import draw, looks, place_names
from dllm_bench.models.load import LoadedModel
from dllm_bench.runs.progress import summary
from dllm_bench.site.texts import TextSource
from dllm_bench.store.cache import on_this_machine
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store
from tests.api.models import PROMPTS, loaded, logits, transformers_object, wrapped

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


def test_why_a_sample_is_wrong_can_be_seen(runs, command) -> None:
    folder, (first, *_) = runs
    shown = command(f"show {first.spec.short} --sample 0 --results {folder}", here=False)
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
    record, names = runs[1][0], [str(path) for path in tmp_path.glob("*/*")]
    (results,), (samples,) = get_results_filenames(names), get_sample_results_filenames(names)
    found = json.loads(Path(results).read_text())
    rows = "".join(row for row in make_table(found).splitlines() if "exact_match" in row)
    assert record.score and record.score.mean in map(float, re.findall(r"\d+\.\d+", rows))
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


OF_OBJECT: dict[str, Any] = {"limit": 1, "benchmark.max_new_tokens": 32}


class OwnModule(torch.nn.Module):
    """tiny-llada within a module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers_object("tiny-llada").eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits


def run_of(model: str | LoadedModel, results: Path, **settings: Any) -> RunRecord:
    return db.run(model, "fast_dllm", "minigsm", results=results, **{**OF_OBJECT, **settings})


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord]:
    folder = tmp_path_factory.mktemp("results")
    return folder, run_of(wrapped(transformers_object("tiny-llada")), folder)


def test_a_wrapped_model_gives_the_grades_of_its_checkpoint(stored, tmp_path) -> None:
    """And a loaded one the very run, which leaves the number of threads as it was."""
    _, record = stored
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        named = run_of("tiny-llada", tmp_path, hardware="cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert record.values == named.values
    assert record.summary["tpf/committed"] == named.summary["tpf/committed"]
    assert record.identity_hash != named.identity_hash
    assert run_of(loaded("tiny-llada"), tmp_path) == named
    assert len(db.records(tmp_path)) == 1


def test_a_run_of_an_object_is_looked_up_and_continued(stored) -> None:
    folder, record = stored
    model = wrapped(transformers_object("tiny-llada"))
    again = run_of(model, folder)
    assert (again.identity_hash, again.sealed_at) == (record.identity_hash, record.sealed_at)
    more = run_of(model, folder, limit=2)
    assert more.identity_hash == record.identity_hash and more.items == 2
    assert [session.samples for session in more.sessions] == [1, 1]


def test_a_trained_or_configured_object_is_another_run(stored, tmp_path: Path) -> None:
    module = transformers_object("tiny-llada")
    model, hashes = wrapped(module), [stored[1].identity_hash]
    with torch.no_grad():
        module.lm_head.weight[0, 0] += 1
    hashes.append(run_of(model, tmp_path).identity_hash)
    module.config.rms_norm_eps *= 2
    hashes.append(run_of(wrapped(module), tmp_path).identity_hash)
    assert len(set(hashes)) == 3


def test_a_function_is_told_apart_by_the_hash_that_is_given(tmp_path: Path) -> None:
    first, second = (run_of(wrapped(logits, weights_hash=one), tmp_path) for one in ("v1", "v2"))
    assert first.identity_hash != second.identity_hash
    assert run_of(wrapped(logits, weights_hash="v1"), tmp_path).sealed_at == first.sealed_at
    assert first.spec.model.name == "logits"


def test_the_source_of_an_own_module_is_in_its_run(tmp_path, monkeypatch) -> None:
    record = run_of(wrapped(OwnModule()), tmp_path)
    assert "pieces" in record.spec.inputs
    monkeypatch.setattr("dllm_bench.store.inputs.source_of", lambda made: {"file": "edited"})
    assert run_of(wrapped(OwnModule()), tmp_path).identity_hash != record.identity_hash


COMMANDS = [
    *("status", "show RUN", "show RUN --sample 0", "compare RUN RUN", "rescore RUN", "runs verify"),
    *("export RUN --to parquet", "export RUN --to csv", "export RUN --to lm-eval"),
    "export RUN --to eee --organization me",
    pytest.param("report --runs RUN", marks=pytest.mark.drill),  # it renders every table
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_read_a_run_of_an_object(command, stored, tmp_path, monkeypatch, capsys) -> None:
    folder, record = stored
    monkeypatch.chdir(tmp_path)
    assert main([*command.replace("RUN", record.spec.short).split(), "--results", str(folder)]) == 0
    assert "dllm-bench:" not in capsys.readouterr().err


def test_the_tokens_of_an_object_are_shown_by_its_tokenizer(stored, monkeypatch, tmp_path) -> None:
    """Also by another process; elsewhere, and without a tokenizer that can be stored, as ids."""
    _, record = stored
    ids = loaded("tiny-llada").encode("3 + 4 =")
    assert TextSource(compose).decode(record.spec)(ids) == loaded("tiny-llada").text.decode(ids)
    assert TextSource(compose).decode(replace(record.spec, inputs={}))(ids) == str(ids)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert TextSource(compose).decode(record.spec)(ids) == str(ids)


def test_an_object_called_like_a_model_does_not_read_that_model(tmp_path: Path) -> None:
    module = transformers_object("tiny-llada")
    module.config.name_or_path = "tiny-qwen3"
    record = run_of(wrapped(module), tmp_path)
    assert record.spec.model.name == "tiny-qwen3"
    assert "path" not in on_this_machine("model", record.spec.model, compose)


def flags(module: Any) -> list[Any]:
    """Everything that decoding could have changed."""
    attention = [vars(layer.self_attn).get("is_causal") for layer in module.model.layers]
    return [*attention, module.config.to_dict(), [part.training for part in module.modules()]]


@pytest.mark.parametrize("decoder", ["fast_dllm_dual", "lopa_dream"])
def test_a_transformers_object_decodes_like_our_own_and_stays_as_it_was(decoder: str) -> None:
    module, own = transformers_object("tiny-llada"), loaded("tiny-llada")
    before, ids = flags(module), torch.tensor([own.encode(PROMPTS[0])])
    causal = module(input_ids=ids).logits
    model = wrapped(module)
    for batch in (1, 2):
        theirs = db.generate(model, PROMPTS, decoder, 32, batch=batch)
        ours = db.generate(own, PROMPTS, decoder, 32, batch=batch)
        assert [one.sample.ids for one in theirs] == [one.sample.ids for one in ours]
        assert [len(one.trace) for one in theirs] == [len(one.trace) for one in ours]
    assert flags(module) == before and torch.equal(module(input_ids=ids).logits, causal)


def test_nothing_that_was_kept_is_reused_once_an_object_was_trained() -> None:
    module, made = transformers_object("tiny-qwen3"), {"attention": "causal", "mask_token": None}
    decoder = db.decoder("ar", **{"cache.reuse": "exact"})
    model = wrapped(module, **made)

    def cached() -> int:
        return db.generate(model, PROMPTS[0], decoder, 4)[0].trace.forwards[0].cached

    assert (cached(), cached() > 0) == (0, True)
    with torch.no_grad():
        module.lm_head.weight.add_(1)
    assert cached() == 0


def test_a_function_decodes_like_the_model_behind_it() -> None:
    model = wrapped(logits)
    theirs = db.generate(model, PROMPTS, "lopa_dream", 32)
    ours = db.generate(loaded("tiny-llada"), PROMPTS, "lopa_dream", 32)
    assert [one.sample.ids for one in theirs] == [one.sample.ids for one in ours]
    assert "without a cache" in repr(model)
