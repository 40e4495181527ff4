"""Runs, records, comparisons and tables from Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import pytest

import dllm_bench as db
from dllm_bench.cli.main import main
from dllm_bench.core.benchmark import Benchmark, Encode, SampleScore
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.runs.progress import summary
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store
from tests.api.models import loaded

SETTINGS = {"hardware": "cpu", "limit": 2, "benchmark.max_new_tokens": 32}


class Letters(Benchmark):
    """Right if the text holds the letter that was asked for."""

    name = "letters"

    def requests(self, encode: Encode) -> Sequence[Request]:
        return [Request(key, tuple(encode(f"Say {key}: ")), 32) for key in "ab"]

    def dataset_hash(self) -> str:
        return "ab"

    def score(self, texts: Mapping[str, str]) -> Mapping[str, SampleScore]:
        return {key: SampleScore(float(key in text), "", {}) for key, text in texts.items()}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunRecord]]:
    """Return two thresholds of one decoder."""
    folder = tmp_path_factory.mktemp("results")
    taus = ({"decoder.select.tau": tau} for tau in (0.5, 0.9))
    made = [
        db.run("tiny-llada", "fast_dllm", "minigsm", results=folder, **SETTINGS, **tau)
        for tau in taus
    ]
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
    settings = {**SETTINGS, "limit": 1}
    record = db.run("tiny-llada", decoder, "minigsm", results=tmp_path, **settings)
    stored = Store(tmp_path / "runs").record(record.spec)
    assert stored is not None and len(stored.warnings) == (text is not None)
    if text:
        assert re.search(text, stored.warnings[0])
    shown = [line for line in summary(stored) if line.startswith("warning: ")]
    assert shown == [f"warning: {warning}" for warning in stored.warnings]


def test_a_run_is_the_run_of_the_command_line(sweep: tuple[Path, list[RunRecord]]) -> None:
    folder, (first, _) = sweep
    command = [f"{name}={value}" for name, value in SETTINGS.items()]
    choice = ["decoder=fast_dllm", "decoder.select.tau=0.5", f"paths.results={folder}", *command]
    assert main(["run", *choice]) == 0
    assert len(db.records(folder)) == 2
    decoder = db.decoder("fast_dllm", **{"select.tau": 0.5})
    again = db.run("tiny-llada", decoder, "minigsm", results=folder, **SETTINGS)
    assert again.identity_hash == first.identity_hash


def test_records_are_a_table_a_sweep_can_be_read_from(sweep, tmp_path) -> None:
    folder, made = sweep
    runs = db.records(folder).set_index("decoder.select.tau").sort_index()
    assert list(runs.index) == [0.5, 0.9]
    assert list(runs["tpf/committed"]) == [one.summary["tpf/committed"] for one in made]
    samples = db.records(folder, by="sample")
    assert len(samples) == 4 and samples.text.str.len().gt(0).all()
    for name, frame in (("runs", runs.reset_index()), ("samples", samples)):
        frame.to_parquet(tmp_path / name)
        assert len(pd.read_parquet(tmp_path / name)) == len(frame)
    with pytest.raises(DllmBenchError, match="by='sample'"):
        db.records(folder, by="token")  # type: ignore[arg-type]


def test_two_runs_are_compared_by_record_or_hash(sweep: tuple[Path, list[RunRecord]]) -> None:
    folder, (first, second) = sweep
    result = db.compare(first, second.spec.short, results=folder)
    assert "select.tau" in str(result)
    assert result.scores[0].n == 2
    metrics = result.to_pandas()
    name = "fast_dllm select.tau=0.5"
    assert metrics.loc["tpf/committed", name] == first.summary["tpf/committed"]
    with pytest.raises(DllmBenchError, match="name two or more"):
        db.compare(first)


def test_why_a_sample_is_wrong_can_be_seen(sweep, capsys) -> None:
    folder, (first, _) = sweep
    assert main(["show", first.spec.short, "--sample", "0", "--results", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("prompt:\nQuestion: ")
    gold, _, rest = shown.partition("right answer:")[2].partition("read from the text: ")
    is_right = gold.split()[-1] == rest.split()[0]
    rows = rest.partition("all gradings:\n")[2].splitlines()[:2]
    names = ["exact_match,flexible-extract", "exact_match,strict-match"]
    assert sorted(row.split()[0] for row in rows) == names
    strict = next(row.split() for row in rows if "strict" in row)
    assert strict[1:] == [str(int(is_right)), rest.split()[0]]
    verdict = "correct (1.0)" if is_right else first.columns["verdict"][0] + " (0.0)"
    assert f"verdict: {verdict}" in rest


def test_an_evaluation_of_objects_gives_the_numbers_of_the_run(sweep) -> None:
    _, (first, _) = sweep
    decoder = db.decoder("fast_dllm", **{"select.tau": 0.5})
    record = db.evaluate(loaded("tiny-llada"), decoder, "minigsm", limit=2, max_new_tokens=32)
    assert record.values == first.values
    assert record.summary["tpf/committed"] == first.summary["tpf/committed"]
    assert record.score == first.score


def test_an_own_benchmark_is_evaluated() -> None:
    record = db.evaluate(loaded("tiny-llada"), "fast_dllm", Letters(), batch=2)
    assert record.score is not None and record.score.n == 2
