"""Items: read from the published files, equal in the hub's form, with partial files named;
lm-eval's prompts and metrics of likelihoods."""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import pickle
import shutil
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from dllm_bench.api.compose import compose
from dllm_bench.api.lm_eval_model import DllmBenchLM, generator
from dllm_bench.benchmarks import items
from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.benchmarks.lm_eval import LikelihoodBenchmark
from dllm_bench.benchmarks.prompts import SETS, PromptsBenchmark
from dllm_bench.benchmarks.tasks import readers, sources
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Likelihood
from dllm_bench.models.load import load_text_codec
from dllm_bench.paths import read_yaml
from dllm_bench.store.inputs import model_spec
from tests.benchmark_helpers import (
    Bench,
    each_kind,
    encode,
    lm_eval_benchmark,
    lm_eval_likelihood,
    stock_config,
)

KNOWN = read_yaml(Path(__file__).with_name("gold.yaml"))


@pytest.mark.parametrize(
    ("source", "split", "size"),
    [(source, *one) for source, sizes in KNOWN["sizes"].items() for one in sizes.items()],
)
def test_all_items_are_read_with_ids_of_their_own(source, split, size, real_data: Path) -> None:
    ids = [row["id"] for row in sources.rows(source, split, str(real_data))]
    assert len(ids) == len(set(ids)) == size
    assert all(key.startswith(f"{source}/{split}") for key in ids)


@pytest.mark.parametrize("source", ["squad_v2", "drop", "livecodebench"])
def test_a_part_of_a_set_names_itself(source, real_data, caplog) -> None:
    split = "release_v1" if source == "livecodebench" else "dev"
    sources.rows.cache_clear()
    with caplog.at_level(logging.WARNING):
        rows = sources.rows(source, split, str(real_data))
    assert "only a part of split" in caplog.text
    assert all(row["id"].startswith(f"{source}/{split}.") for row in rows)


def test_korbench_has_five_equal_categories(real_data: Path) -> None:
    rows = sources.rows("korbench", "test", str(real_data))
    assert set(Counter(row["category"] for row in rows).values()) == {250}
    asked = lm_eval_benchmark("korbench", "accuracy,none", data_dir=str(real_data))
    text = next(one.prompt for one in asked.requests(encode) if "/cipher/" in one.id)
    assert "### Cipher Rule:\n\n**Encryption Rules:**" in text and text.endswith("### Answer:\n")
    assert {row["id"]: row["answer"] for row in rows}["korbench/test/cipher/1"] == "[[N]]"


def test_an_incomplete_set_is_one_sentence(real_data: Path, tmp_path: Path) -> None:
    shutil.copytree(real_data / "korbench/cipher", tmp_path / "korbench/cipher")
    with pytest.raises(DllmBenchError, match="counterfactual/rule.jsonl"):
        sources.rows("korbench", "test", str(tmp_path))
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "valid.jsonl").write_text("{}\n")
    with pytest.raises(DllmBenchError, match="piqa/valid-labels.lst"):
        sources.rows("piqa", "validation", str(tmp_path))


def test_squad_from_the_hub_s_shape(real_data: Path) -> None:
    """Columns of answers, as on the hub, give the same rows apart from plausible spans."""
    rows = readers.read_squad(real_data / "squad_v2" / "dev-v2.0.Normans-Rhine.json")
    answered = next(row for row in rows if row["answers"])
    answers = {"text": answered["answers"], "answer_start": [0]}
    hub = {**answered, "id": answered["number"], "answers": answers}
    assert readers.convert_squad(hub) == answered
    assert sum(not row["answers"] for row in rows) == 320
    assert all(row["plausible"] for row in rows if not row["answers"])


def test_drop_reads_numbers_dates_and_spans() -> None:
    answers = KNOWN["drop answers"]
    columns = {key: [answer[key] for answer in answers[1:]] for key in answers[0]}
    for given in (answers[1:], columns):
        row = {"passage": "p", "question": "q", "answer": answers[0], "validated_answers": given}
        assert readers.convert_drop(row)["answers"] == [["3"], ["a", "b"], ["4 May 1900"]]


def test_hidden_tests_are_read_and_classes_are_not_loaded() -> None:
    hidden = json.dumps([{"input": "3", "output": "4", "testtype": "stdin"}])

    def packed(value: Any) -> str:
        return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()

    def tests(**more: str) -> Any:
        return json.loads(
            readers.convert_livecodebench({**KNOWN["livecodebench"], **more})["tests"]
        )

    for text in (hidden, packed(hidden)):
        assert tests(private_test_cases=text) == [["1", "2"], ["3", "4"]]
    assert tests() == [["1", "2"]]
    with pytest.raises(DllmBenchError, match=r"would load \w+.getcwd"):
        tests(private_test_cases=packed(os.getcwd))


def test_shots_come_from_a_split_that_is_there(real_data: Path) -> None:
    data = {"data_dir": str(real_data)}
    lm_eval_benchmark("squad_v2", "exact,none", split="dev", **data).check()
    with pytest.raises(DllmBenchError, match=r"train-v2.0.json.*paths.data"):
        lm_eval_benchmark("squad_v2", "exact,none", split="dev", shots=1, **data).check()
    mmlu = lm_eval_benchmark("mmlu", "exact_match,get_response", shots=2, **data)
    with pytest.raises(DllmBenchError, match="2 few-shot examples and has 0"):
        mmlu.dataset_hash()
    with pytest.raises(DllmBenchError, match="original files only"):
        lm_eval_benchmark("korbench", "accuracy,none").check()


def test_two_shots_of_drop_stand_before_the_task(real_data: Path, tmp_path: Path) -> None:
    (tmp_path / "drop").mkdir()
    lines = (real_data / "drop/drop_v0_dev.first1000.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("train", lines[:2]), ("dev", lines[2:5])):
        (tmp_path / f"drop/drop_v0_{name}.jsonl").write_text("".join(part))
    settings = {"split": "dev", "shots": 2, "data_dir": str(tmp_path)}
    ours = lm_eval_benchmark("drop_opencompass", "accuracy,none", **settings)
    prompt = ours.requests(encode)[0].prompt
    assert prompt.startswith("You will be asked to read a passage and answer a question.\n\n---\n")
    assert (prompt.count("---\nPassage: "), prompt.count("\nAnswer: ")) == (3, 2)
    assert 'Think step by step, then write a line of the form "Answer: $ANSWER"' in prompt


@each_kind
def test_repeats_ask_the_same_item_under_ids_of_their_own(benchmark: Bench) -> None:
    once = [item["id"] for item in replace(benchmark, limit=4).items]
    requests = replace(benchmark, limit=4, repeats=3).requests(encode)
    assert [request.id for request in requests] == [f"{i}#{k}" for i in once for k in range(3)]
    assert [item_id_of(request.id) for request in requests[::3]] == once
    assert len({request.prompt for request in requests}) == 4
    assert [*map(item_id_of, ("mbpp/test/11", "a#b"))] == ["mbpp/test/11", "a#b"]


@pytest.mark.parametrize("name", sorted(SETS))
def test_prompt_sets_are_asked_and_not_graded(name: str, real_data: Path) -> None:
    asked = PromptsBenchmark("acceptance", name, 2048, data_dir=str(real_data))
    if name == "alpaca":
        with pytest.raises(DllmBenchError, match="alpaca.jsonl.*paths.data"):
            asked.check()
        return
    asked.check()
    first, *others = asked.requests(encode)
    assert 1 + len(others) == SETS[name]["cap"]
    (turn,) = json.loads(first.prompt)
    assert (turn["role"], first.max_new_tokens) == ("user", 2048)
    (score,) = asked.score({first.id: "anything"}).values()
    assert score.verdict == "not graded" and math.isnan(score.value)
    absent = PromptsBenchmark("acceptance", name, 2048)
    assert absent.dataset_hash() == asked.dataset_hash()  # stored runs are found without the file
    with pytest.raises(DllmBenchError, match="has no data directory"):
        absent.requests(encode)


def test_prompt_sets_are_shuffled_only_above_their_cap(real_data: Path) -> None:
    """DeepSpec shuffles before it cuts and leaves smaller sets as they are."""

    def lines(name: str) -> list[int]:
        made = PromptsBenchmark("acceptance", name, 8, data_dir=str(real_data))
        return [int(str(item["id"]).rpartition("/")[2]) for item in made.items]

    assert lines("aime25") == list(range(30)) and lines("gsm8k") != sorted(lines("gsm8k"))
    assert len(set(lines("gsm8k"))) == 500
    few = PromptsBenchmark("acceptance", "gsm8k", 8, limit=3, data_dir=str(real_data))
    assert [item["id"] for item in few.items] == [f"prompts/gsm8k/{n}" for n in lines("gsm8k")[:3]]


# --- benchmarks of likelihoods: a few made-up items in the form of the published files ------------


CASES = read_yaml(Path(__file__).with_name("likelihood.yaml"))
LIKELIHOODS: dict[str, dict[str, Any]] = CASES["sets"]


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
    for task, given in LIKELIHOODS.items():
        file = folder / sources.PUBLISHED[task].files[given["split"]][0]
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps(as_published(task, row)) for row in given["rows"])
        file.write_text("\n".join(rows))
    labels = (str(row["label"]) for row in LIKELIHOODS["piqa"]["rows"])
    (folder / "piqa/valid-labels.lst").write_text("\n".join(labels))
    return str(folder)


def of(task: str, folder: Path) -> LikelihoodBenchmark:
    data = {"split": LIKELIHOODS[task]["split"], "data_dir": published(folder)}
    return lm_eval_likelihood(task, "acc,none", **data)


@pytest.mark.parametrize("task", LIKELIHOODS)
def test_files_and_hub_have_the_same_items(task: str, tmp_path: Path) -> None:
    read = sources.rows(task, LIKELIHOODS[task]["split"], published(tmp_path))
    hub = [sources.PUBLISHED[task].convert(dict(row)) for row in LIKELIHOODS[task]["rows"]]
    assert [{k: v for k, v in row.items() if k != "id"} for row in read] == hub


@pytest.mark.parametrize("task", LIKELIHOODS)
def test_contexts_continuations_and_metrics_are_lm_eval_s(task: str, tmp_path: Path) -> None:
    path, split, rows = LIKELIHOODS[task].values()
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
