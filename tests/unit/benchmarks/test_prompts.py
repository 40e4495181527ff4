"""Benchmarks: prompts are the standard ones, in one order; what cannot work is reported at once.

Prompts are compared with lm-eval's own task files, read from the installed package.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
import yaml
from jinja2 import Template

from dllm_bench.benchmarks import code_answers, sandbox
from dllm_bench.benchmarks.evalplus import PROBLEM_SETS, _download
from dllm_bench.benchmarks.items import is_reachable, local_data_only
from dllm_bench.benchmarks.tasks import sources, text_scorers
from dllm_bench.core.benchmark import Turns
from dllm_bench.core.errors import DllmBenchError
from tests.benchmark_helpers import COMPLETION, Bench, encode, evalplus_benchmark, lm_eval_benchmark
from tests.unit.benchmarks.test_originals import functions_of, stock_task


def prompts(benchmark: Bench) -> list[str]:
    return [request.prompt for request in benchmark.requests(encode)]


def test_humaneval_prompts_are_the_items_own(real_data: Path) -> None:
    benchmark = lm_eval_benchmark("humaneval", COMPLETION, limit=5, data_dir=str(real_data))
    assert prompts(benchmark) == [item["prompt"] for item in benchmark.items]


def stock_yaml(path: str) -> dict[str, Any]:
    """Return a task file of lm-eval without its functions, whose modules need a network."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: None)
    text = (Path(inspect.getfile(lm_eval.tasks)).parent / path).read_text()
    found: dict[str, Any] = yaml.load(text, Loader)
    return found


def test_mbpp_prompts_are_lm_eval_s_own(real_data: Path) -> None:
    stock, shots = stock_yaml("mbpp/mbpp.yaml"), functions_of("mbpp/utils.py")
    question, answer = Template(stock["doc_to_text"]), Template(stock["doc_to_target"])

    def ask(doc: Mapping[str, Any]) -> str:
        return question.render(**doc) + "\n"

    examples = "".join(
        ask(shot) + answer.render(**shot) + "\n\n" for shot in shots["list_fewshot_samples"]()
    )
    ours = lm_eval_benchmark("mbpp", COMPLETION, shots=3, limit=4, data_dir=str(real_data))
    assert prompts(ours) == [examples + ask(item) for item in ours.items]


@pytest.mark.parametrize(("task", "shots"), [("humaneval_instruct", 0), ("mbpp_instruct", 3)])
@pytest.mark.parametrize("template", ["plain", "chat", "chat_multiturn"])
def test_begun_answers_are_lm_eval_s_own(task, shots, template, real_data) -> None:
    source = task.partition("_")[0]
    stock = stock_yaml(f"{source}/{task}.yaml")
    kept = ("task", "doc_to_text", "doc_to_target", "gen_prefix", "target_delimiter")
    ours = lm_eval_benchmark(
        task,
        "pass@1,instruct" if shots == 0 else "pass@1,extract_code",
        shots=shots,
        limit=3,
        template=template,
        data_dir=str(real_data),
    )
    few = [
        {**row, "is_fewshot": True} for row in sources.rows("mbpp", "prompt", str(real_data))[:3]
    ]
    rows = sources.dataset(source=source, split="test", limit=3, data_dir=str(real_data))["test"]
    config = {
        **{key: stock[key] for key in kept if key in stock},
        "doc_to_target": stock.get("doc_to_target", ""),
        "output_type": "generate_until",
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": rows},
        "dataset_kwargs": {},
        "num_fewshot": shots,
        "fewshot_config": {"sampler": "first_n", "samples": few},
    }
    theirs = stock_task(config)
    for request, item in zip(ours.requests(encode), ours.items, strict=True):
        doc = dict(item)
        wanted = theirs.fewshot_context(
            doc,
            shots,
            apply_chat_template=template != "plain",
            fewshot_as_multiturn=template == "chat_multiturn",
            chat_template=lambda turns, add_generation_prompt: (turns, add_generation_prompt),
            gen_prefix=theirs.doc_to_prefix(doc),
        )
        if template == "plain":
            assert request.prompt == wanted
            continue
        turns, starts_a_turn = wanted  # type: ignore[misc]
        assert (json.loads(request.prompt), starts_a_turn) == (turns, False)
        assert turns[-1]["role"] == "assistant" and turns[-1]["content"].count("```python") == 1


def test_mbpp_plus_as_a_request_has_lm_eval_s_wording(real_data: Path) -> None:
    settings: dict[str, Any] = {"limit": 3, "template": "instruct", "data_dir": str(real_data)}
    for chat in (True, False):
        benchmark = evalplus_benchmark("mbpp_plus", chat=chat, **settings)
        for prompt, item in zip(prompts(benchmark), benchmark.items, strict=True):
            lines = item["prompt"].strip().strip('"').strip().split("\n")
            assert lines[-1].startswith("assert ")
            asked = "Your code should satisfy the following assertion:\n"
            wanted = f"{' '.join(lines[:-1])} {asked}{lines[-1]}"
            begun = "Here is a solution to this programming problem:\n```python\n"
            if not chat:
                assert prompt == f"{wanted}\n{begun}"
                continue
            user, assistant = json.loads(prompt)
            assert user == {"role": "user", "content": wanted}
            assert assistant == {"role": "assistant", "content": begun}
    answers = {i["id"]: f"{i['canonical_solution']}\n```\nSo." for i in benchmark.items}
    ends = evalplus_benchmark("mbpp_plus", chat=True, hard_stop=("```",), **settings)
    assert {score.value for score in ends.score(answers).values()} == {1.0}


def test_chat_forms(real_data: Path) -> None:
    def form(**more: Any) -> str:
        settings: dict[str, Any] = {"shots": 2, "limit": 1, "data_dir": str(real_data), **more}
        return prompts(lm_eval_benchmark("gsm8k", **settings))[0]

    plain, single = form(), json.loads(form(template="chat"))
    turns = json.loads(form(template="chat_multiturn"))
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant", "user"]
    assert single == [{"role": "user", "content": plain}]
    assert turns[1]["content"] in plain
    assert turns[-1]["content"] == "Question:" + plain.rpartition("Question:")[2]
    assert form(template="chat_multiturn", chat=False) == plain


def test_code_in_a_chat_turn() -> None:
    (bare,) = json.loads(prompts(evalplus_benchmark("minicode", limit=1, template="chat"))[0])
    told = evalplus_benchmark("minicode", limit=1, template="chat", instruction="Do this.")
    (turn,) = json.loads(prompts(told)[0])
    assert bare == {"role": "user", "content": told.items[0]["prompt"]}
    assert turn["content"] == f"Do this.\n```python\n{bare['content']}```\n"


@pytest.mark.parametrize("kind", ["minigsm", "minicode"])
def test_a_limit_takes_the_first_of_one_order(kind: str) -> None:
    make = lm_eval_benchmark if kind == "minigsm" else evalplus_benchmark
    whole = [request.id for request in make(kind).requests(encode)]
    few = [request.id for request in make(kind, limit=7).requests(encode)]
    assert few == whole[:7]
    assert len(set(whole)) == len(whole) == 1000
    assert whole != sorted(whole)
    assert {item.rpartition("/")[0] for item in whole} == {f"{kind}/test"}


def test_requests_carry_budget_stops_and_ids() -> None:
    benchmark = lm_eval_benchmark("minigsm", stop=("Question:",), hard_stop=("[END]",))
    requests = benchmark.requests(encode)
    first = requests[0]
    assert (first.max_new_tokens, first.stop) == (64, ("Question:", "[END]"))
    assert bytes(first.prompt_ids).decode() == first.prompt
    assert [r.id for r in requests[2:4]] == [item["id"] for item in benchmark.items[2:4]]


def test_requests_are_made_when_asked_for() -> None:
    asked: list[str | Turns] = []

    def noting(prompt: str | Turns) -> list[int]:
        asked.append(prompt)
        return [1]

    requests = evalplus_benchmark("minicode").requests(noting)
    assert (len(requests), len(asked)) == (1000, 0)
    assert [requests[5].prompt] == asked


REFUSALS = [
    (
        lm_eval_benchmark("nonsense"),
        "no lm-eval task 'nonsense'; choose one of: .*the nearest of 39",
    ),
    (evalplus_benchmark("nonsense"), "There is no EvalPlus problem set 'nonsense'"),
    (lm_eval_benchmark("minigsm", "accuracy"), "There is no primary metric of 'minigsm'"),
    (lm_eval_benchmark("minigsm", template="xml"), "There is no template of 'minigsm'"),
    (lm_eval_benchmark("minigsm", split="dev"), "There is no split"),
    (evalplus_benchmark("minicode", shots=3), "asked for 3 few-shot examples"),
    (lm_eval_benchmark("gsm8k", data_dir="absent"), "reads gsm8k/test.jsonl.*paths.data=DIR"),
    (lm_eval_benchmark("gsm8k"), "no data directory.*paths.data=DIR"),
    (evalplus_benchmark("humaneval_plus", data_dir="absent"), "HumanEvalPlus.jsonl.*paths.data="),
    (evalplus_benchmark("minicode", allow_code_execution=False), "allow_code_execution=true"),
    (lm_eval_benchmark("mbpp", COMPLETION, data_dir="absent"), "reads mbpp/mbpp.jsonl"),
]


@pytest.mark.parametrize(("benchmark", "sentence"), REFUSALS)
def test_what_would_fail_later_is_said_at_once(benchmark, sentence, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(sandbox.CONSENT_VARIABLE, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr("dllm_bench.benchmarks.items.is_reachable", lambda host: False)
    began = time.monotonic()
    with pytest.raises(DllmBenchError, match=sentence):
        benchmark.check()
    assert time.monotonic() - began < 1


def test_a_host_that_is_not_there_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    began = time.monotonic()
    assert not is_reachable("huggingface.co")
    assert time.monotonic() - began < 1


def test_the_hub_is_asked_once_and_not_at_all_where_this_disk_is_meant(monkeypatch) -> None:
    offline = []

    def load_dataset(*asked: object, **more: object) -> None:
        offline.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    sources._load_from_hub.cache_clear()
    benchmark = lm_eval_benchmark("gsm8k")
    try:
        for _ in range(2):
            with (
                local_data_only(),
                pytest.raises(DllmBenchError, match=r"cache.*download it with `--run`"),
            ):
                benchmark.dataset_hash()
            with pytest.raises(DllmBenchError, match=r"could not be loaded from the hub"):
                benchmark.dataset_hash()
    finally:
        sources._load_from_hub.cache_clear()
    assert offline == [True, False] and not datasets.config.HF_HUB_OFFLINE


def test_evalplus_downloads_nothing_where_this_disk_is_meant(tmp_path, monkeypatch) -> None:
    import evalplus.data.humaneval as theirs
    from evalplus.data import utils

    def fetch(url: str, file: str) -> None:
        Path(file).write_text('{"task_id": "HumanEval/0"}\n')

    monkeypatch.setattr(utils, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(theirs, "make_cache", fetch)
    download = PROBLEM_SETS["humaneval_plus"].download
    with local_data_only(), pytest.raises(DllmBenchError, match="was not downloaded"):
        _download("humaneval_plus", *download)
    assert theirs.make_cache is fetch and not list(tmp_path.iterdir())
    fetched = _download("humaneval_plus", *download)
    with local_data_only():
        assert _download("humaneval_plus", *download) == fetched


def test_programs_from_answers() -> None:
    prompt = 'def f():\n    """One."""\n'
    assert code_answers.assemble_program(prompt, "    return 1\n") == prompt + "    return 1\n"
    anew = code_answers.assemble_program(prompt, "```python\ndef f():\n    return 1\n```")
    assert code_answers.parses(anew)
    assert anew.endswith("\n\ndef f():\n    return 1")
    broken = prompt + "    return 1\n\nThat is it."
    assert code_answers.trim_unparsable_end(broken) == prompt + "    return 1\n\n"
    assert not code_answers.parses("def f(:")
    assert code_answers.trim_unparsable_end("def f(:") == "def f(:"


# --- Dream's Sudoku and Countdown, on made-up files of their form ---------------------------------


PUZZLE = "0020\n0034\n0400\n1000"
GRID = "4321\n2134\n3412\n1243"
NUMBERS, EQUATIONS = "29,16,42,23,74", "29-16=13,42-23=19"
COUNTDOWN = "3,4,5,35", "3+4=7,7*5=35"


def data(folder: Path) -> Path:
    """Ten rows of each file."""
    for name, row in (
        ("sudoku_4x4_10", {"input": PUZZLE, "output": GRID}),
        ("cd3_test", {"input": COUNTDOWN[0], "output": COUNTDOWN[1]}),
        ("cd4_test", {"input": NUMBERS, "output": EQUATIONS}),
    ):
        file = folder / "dream" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text((json.dumps(row) + "\n") * 10)
    return folder


def test_prompts_are_dream_s(tmp_path: Path) -> None:
    settings = {"data_dir": str(data(tmp_path))}
    sudoku = lm_eval_benchmark("sudoku_dream", "valid,none", split="n10", **settings)
    requests = sudoku.requests(encode)
    example = f"Input:\n{PUZZLE}\nOutput:\n{GRID}"
    assert len(requests) == 2
    rule, *parts = requests[0].prompt.split("\n\n")
    assert rule.startswith("Fill the positions where the values are 0 in a 4x4 grid")
    assert parts == [*[example] * 8, f"Input:\n{PUZZLE}\nOutput:\n "]
    for split, given, words in (
        ("cd3", COUNTDOWN, "Given 4 numbers, use +-*/ to operate over the first three numbers to "
         "achieve the last number."),
        ("cd4", (NUMBERS, EQUATIONS), "Given 5 numbers, use +-*/ to operate over the first four "
         "numbers to achieve the fifth number."),
    ):  # fmt: skip
        benchmark = lm_eval_benchmark("countdown_dream", "valid,none", split=split, **settings)
        rule, *parts = benchmark.requests(encode)[0].prompt.split("\n\n")
        assert rule == words
        shown = f"Input: {given[0]}\nOutput: {given[1]}"
        assert parts == [*[shown] * 8, f"Input: {given[0]}\nOutput: "]
    assert len(sources.rows("countdown_dream", "cd3", settings["data_dir"])) == 2


def test_expressions_are_worked_out_and_not_run() -> None:
    assert text_scorers.holds("3+4*5", "23")
    assert text_scorers.holds("7/2", "3.5")
    for expression in ("1+2**3", "1+2//1", "1+1 and exit()", "1+1" * 100, "1+f", "3"):
        assert not text_scorers.holds(expression, "9")
