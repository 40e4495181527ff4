"""Items: read from the published files, equal in the hub's form, with partial files named."""

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

from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.benchmarks.prompts import SETS, PromptsBenchmark
from dllm_bench.benchmarks.tasks import readers, sources
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from tests.benchmark_helpers import Bench, each_kind, encode, lm_eval_benchmark

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
