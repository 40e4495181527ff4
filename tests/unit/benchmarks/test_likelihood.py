"""Benchmarks of likelihoods: items of files and of the hub, lm-eval's prompts and metrics.

The sets themselves are not at hand: a few made-up items in the form of the published files stand
for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from dllm_bench.api.compose import compose
from dllm_bench.api.lm_eval_model import DllmBenchLM, generator
from dllm_bench.benchmarks import items
from dllm_bench.benchmarks.lm_eval import LikelihoodBenchmark
from dllm_bench.benchmarks.tasks import sources
from dllm_bench.cli.main import main
from dllm_bench.core.request import Likelihood
from dllm_bench.models.load import load_text_codec
from dllm_bench.paths import read_yaml
from dllm_bench.store.inputs import model_spec
from tests.benchmark_helpers import encode, lm_eval_likelihood, stock_config

CASES = read_yaml(Path(__file__).with_name("likelihood.yaml"))
SETS: dict[str, dict[str, Any]] = CASES["sets"]


def as_published(task: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the hub as its published file has it."""
    if task == "piqa":
        return {key: row[key] for key in ("goal", "sol1", "sol2")}
    if task != "arc_easy":
        return row
    pairs = zip(*row["choices"].values(), strict=True)
    choices = [{"text": text, "label": label} for text, label in pairs]
    return {**row, "question": {"stem": row["question"], "choices": choices}}


def published(folder: Path) -> str:
    """Return the rows as files of the published form."""
    for task, given in SETS.items():
        file = folder / sources.PUBLISHED[task].files[given["split"]][0]
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps(as_published(task, row)) for row in given["rows"])
        file.write_text("\n".join(rows))
    labels = (str(row["label"]) for row in SETS["piqa"]["rows"])
    (folder / "piqa/valid-labels.lst").write_text("\n".join(labels))
    return str(folder)


def of(task: str, folder: Path) -> LikelihoodBenchmark:
    data = {"split": SETS[task]["split"], "data_dir": published(folder)}
    return lm_eval_likelihood(task, "acc,none", **data)


@pytest.mark.parametrize("task", SETS)
def test_files_and_hub_have_the_same_items(task: str, tmp_path: Path) -> None:
    read = sources.rows(task, SETS[task]["split"], published(tmp_path))
    hub = [sources.PUBLISHED[task].convert(dict(row)) for row in SETS[task]["rows"]]
    assert [{k: v for k, v in row.items() if k != "id"} for row in read] == hub


@pytest.mark.parametrize("task", SETS)
def test_contexts_continuations_and_metrics_are_lm_eval_s(task: str, tmp_path: Path) -> None:
    path, split, rows = SETS[task].values()
    given = dict.fromkeys(("train", "validation", "test"), Dataset.from_list(rows))
    config = {**stock_config(path, "minigsm", tmp_path), "custom_dataset": lambda **_: given}
    stock = ConfigurableTask(config=config)
    docs = list(stock.test_docs() if split == "test" else stock.validation_docs())
    ours = of(task, tmp_path)
    by_id = {item["id"]: item for item in ours.items}
    sorted_ids = [row["id"] for row in sources.rows(task, split, str(tmp_path))]
    for number, (name, doc) in enumerate(zip(sorted_ids, docs, strict=True)):
        made = stock.construct_requests(doc, stock.fewshot_context(doc, 0), metadata=("t", 0, 1))
        pairs = ours.pairs(by_id[name])
        assert pairs == [instance.args for instance in made]
        said = [Likelihood(-1.0 - (i + number) % len(pairs), 0.1, False) for i in range(len(pairs))]
        wanted = stock.process_results(doc, [(one.nats, one.greedy) for one in said])
        (score,) = ours.score({name: items.text_of(said)}).values()
        assert score.metrics == {f"{metric},none": value for metric, value in wanted.items()}
        assert score.verdict == ("correct" if wanted["acc"] else "wrong")
        (answer,) = ours.answers({name: items.text_of(said)}).values()
        assert (answer.gold == answer.extracted) == bool(wanted["acc"])


def test_requests_have_an_option_per_choice(tmp_path: Path) -> None:
    """Spaces at a context's end belong to the continuation."""
    benchmark = of("arc_easy", tmp_path)
    for request, item in zip(benchmark.requests(encode), benchmark.items, strict=True):
        texts = [bytes(option.ids).decode() for option in request.options]
        assert texts == [f" {choice}" for choice in item["choices"]]
        assert request.max_new_tokens == max(map(len, texts))
    spaced = items.option_of("a b  ", "c", encode)
    assert (bytes(spaced.prompt_ids), bytes(spaced.ids)) == (b"a b", b"  c")


def test_a_continuation_of_a_chat_is_a_begun_answer() -> None:
    codec = load_text_codec(model_spec(compose(["model=tiny-dream-instruct"])["model"]))
    turns = [{"role": "user", "content": "Hello"}]
    option = items.option_of(turns, "Yes", codec.encode)
    assert (list(option.prompt_ids), codec.decode(option.ids)) == (codec.encode(turns), "Yes")
    later = items.option_of([*turns, {"role": "assistant", "content": "Y"}], "es", codec.encode)
    assert (*later.prompt_ids, *later.ids) == (*option.prompt_ids, *option.ids)


def test_stored_likelihoods_are_read_back_or_are_no_answer(tmp_path: Path) -> None:
    said = [Likelihood(-1.25, 0.5, True), Likelihood(float("-inf"), 0.0, False)]
    assert items.likelihoods_of(items.text_of(said)) == said
    benchmark = of("piqa", tmp_path)
    name = benchmark.items[0]["id"]
    right = items.text_of(said if benchmark.items[0]["gold"] == 0 else said[::-1])
    (score,) = benchmark.score({name: right}).values()
    assert score.verdict == "correct"
    too_large = right.replace("-1.25", "1" * 400)
    for text in (*CASES["unreadable"], too_large, "[" * 10**5):
        (score,) = benchmark.score({name: text}).values()
        assert (score.value, score.verdict) == (0.0, "no_answer")
        (answer,) = benchmark.answers({name: text}).values()
        assert answer.extracted == ""


def settings(folder: Path, *more: str) -> list[str]:
    data = published(folder / "data")
    own = ["model=tiny-llada", "benchmark=arc_easy", f"paths.data={data}", "hardware=cpu"]
    return [*own, f"paths.results={folder / 'results'}", "limit=2", *more]


def test_a_run_stores_likelihoods_and_their_errors(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("DLLM_BENCH_DATA", str(tmp_path / "data"))
    small = ("decoder=likelihood", "decoder.draws=8", "decoder.together=4")
    assert main(["run", *settings(tmp_path, *small)]) == 0
    (record,) = (tmp_path / "results").rglob("record.json")
    columns = json.loads(record.read_text())["columns"]
    assert all(error > 0 for error in columns["error_nats"])
    assert columns["verdict"][0] in ("correct", "wrong") and "score/acc,none" in columns
    capsys.readouterr()
    run, results = record.parent.name.rpartition("-")[2], str(tmp_path / "results")
    assert main(["show", run, "--sample", "0", "--results", results]) == 0
    shown = capsys.readouterr().out
    assert "all gradings:" in shown and "±" in shown
    assert main(["run", *settings(tmp_path, "decoder=likelihood_exact", "seed=3")]) == 0


@pytest.mark.parametrize(("more", "words"), CASES["refused"])
def test_a_decoder_that_cannot_is_refused(more, words, tmp_path, capsys) -> None:
    assert main(["run", *settings(tmp_path, *more)]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


def test_lm_eval_gets_the_likelihoods_of_the_decoder() -> None:
    given = ["model=tiny-llada", "decoder=likelihood", "decoder.draws=8", "decoder.together=8"]
    model, again = (DllmBenchLM(generator([*given, "hardware=cpu"])) for _ in range(2))
    pairs = [("Question: 2 + 3?\nAnswer:", said) for said in (" 5", " five")]
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found = model.loglikelihood(asked)
    assert all(nats < 0 and greedy is False for nats, greedy in found)
    assert again.loglikelihood(asked) == found
    rolling = Instance("loglikelihood_rolling", {}, ("Tom has 3 apples.",), 0)
    assert model.loglikelihood_rolling([rolling])[0] < 0
