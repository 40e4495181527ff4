"""Benchmarks: prompts and scores are those of the packages that they come from; what cannot work is
reported at once.

lm-eval's own task files run over our copy of the items; EvalPlus's own checker grades the same
programs. Tasks that cannot be loaded without a network are compared part by part.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import lm_eval.tasks
import pytest
from datasets import Dataset
from jinja2 import Template
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from dllm_bench.benchmarks import code_answers, sandbox
from dllm_bench.benchmarks.evalplus import PROBLEM_SETS, _download
from dllm_bench.benchmarks.items import Item, local_data_only, text_of
from dllm_bench.benchmarks.tasks import math_answers, sources
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Likelihood
from dllm_bench.paths import read_yaml
from tests.benchmark_helpers import (
    COMPLETION,
    FLEXIBLE,
    GOLD,
    STRICT,
    Bench,
    each_kind,
    encode,
    evalplus_benchmark,
    gold,
    lm_eval_benchmark,
    lm_eval_likelihood,
    mean,
    number_of,
    stock_config,
)

STOCK = Path(inspect.getfile(lm_eval.tasks)).parent
CASES = read_yaml(Path(__file__).with_name("answers.yaml"))


def prompts(benchmark: Bench) -> list[str]:
    return [request.prompt for request in benchmark.requests(encode)]


def test_prompts_of_code_are_lm_eval_s_own(real_data: Path) -> None:
    bare = lm_eval_benchmark("humaneval", COMPLETION, limit=5, data_dir=str(real_data))
    assert prompts(bare) == [item["prompt"] for item in bare.items]
    stock = load_yaml(STOCK / "mbpp/mbpp.yaml", resolve_func=False)
    ask, answer = (Template(stock[f"doc_to_{part}"]).render for part in ("text", "target"))
    few = functions_of("mbpp/utils.py")["list_fewshot_samples"]()
    examples = "".join(f"{ask(shot)}\n{answer(shot)}\n\n" for shot in few)
    ours = lm_eval_benchmark("mbpp", COMPLETION, shots=3, limit=4, data_dir=str(real_data))
    assert prompts(ours) == [f"{examples}{ask(item)}\n" for item in ours.items]


@pytest.mark.parametrize(("task", "shots"), [("humaneval_instruct", 0), ("mbpp_instruct", 3)])
@pytest.mark.parametrize("template", ["plain", "chat", "chat_multiturn"])
def test_begun_answers_are_lm_eval_s_own(task, shots, template, real_data) -> None:
    source = task.partition("_")[0]
    stock = load_yaml(STOCK / f"{source}/{task}.yaml", resolve_func=False)
    kept = ("task", "doc_to_text", "doc_to_target", "gen_prefix", "target_delimiter")
    data = {"limit": 3, "data_dir": str(real_data)}
    primary = "pass@1,extract_code" if shots else "pass@1,instruct"
    ours = lm_eval_benchmark(task, primary, shots=shots, template=template, **data)
    few = [{**row, "is_fewshot": True} for row in sources.rows("mbpp", "prompt", str(real_data))]
    rows = sources.dataset(source=source, split="test", **data)["test"]
    config = {
        **{key: stock[key] for key in kept if key in stock},
        "doc_to_target": stock.get("doc_to_target", ""),
        "output_type": "generate_until",
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": rows},
        "dataset_kwargs": {},
        "num_fewshot": shots,
        "fewshot_config": {"sampler": "first_n", "samples": few[:3]},
    }
    theirs = ConfigurableTask(config=config)
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
            *words, example = item["prompt"].strip().strip('"').strip().split("\n")
            assert example.startswith("assert ")
            asked = "Your code should satisfy the following assertion:\n"
            wanted = f"{' '.join(words)} {asked}{example}"
            begun = "Here is a solution to this programming problem:\n```python\n"
            turns = [{"role": "user", "content": wanted}, {"role": "assistant", "content": begun}]
            assert json.loads(prompt) == turns if chat else prompt == f"{wanted}\n{begun}"
    answers = {key: f"{answer}\n```\nSo." for key, answer in gold(benchmark).items()}
    assert mean(replace(benchmark, hard_stop=("```",)).score(answers)) == 1


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
    code = {"limit": 1, "template": "chat"}
    (bare,) = json.loads(prompts(evalplus_benchmark("minicode", **code))[0])
    told = evalplus_benchmark("minicode", instruction="Do this.", **code)
    (turn,) = json.loads(prompts(told)[0])
    assert bare == {"role": "user", "content": told.items[0]["prompt"]}
    assert turn["content"] == f"Do this.\n```python\n{bare['content']}```\n"


@each_kind
def test_a_limit_takes_the_first_of_one_order(benchmark: Bench) -> None:
    made = (replace(benchmark, limit=limit).items for limit in (7, None))
    few, whole = ([item["id"] for item in items] for items in made)
    assert few == whole[:7] and len(set(whole)) == len(whole) == 1000
    assert whole != sorted(whole)
    assert {item.rpartition("/")[0] for item in whole} == {f"{benchmark.name}/test"}


def test_requests_carry_budget_stops_and_ids_and_are_made_when_asked_for() -> None:
    benchmark = lm_eval_benchmark("minigsm", stop=("Question:",), hard_stop=("[END]",))
    encoded = Mock(side_effect=encode)
    requests = benchmark.requests(encoded)
    assert (len(requests), encoded.call_count) == (1000, 0)
    first = requests[0]
    assert (first.max_new_tokens, first.stop) == (64, ("Question:", "[END]"))
    assert bytes(first.prompt_ids).decode() == first.prompt
    encoded.assert_called_once_with(first.prompt)
    assert [r.id for r in requests[2:4]] == [item["id"] for item in benchmark.items[2:4]]


@pytest.mark.parametrize(("kind", "name", "settings", "sentence"), CASES["refused"])
def test_what_would_fail_later_is_said_at_once(
    kind, name, settings, sentence, tmp_path, monkeypatch
) -> None:
    make = lm_eval_benchmark if kind == "lm_eval" else evalplus_benchmark
    benchmark = make(name, **settings)
    monkeypatch.delenv(sandbox.CONSENT_VARIABLE, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    # that no host is reached takes no time either
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    began = time.monotonic()
    with pytest.raises(DllmBenchError, match=sentence):
        benchmark.check()
    assert time.monotonic() - began < 1


def test_the_hub_is_asked_once_and_not_at_all_where_this_disk_is_meant(monkeypatch) -> None:
    offline = []

    def load_dataset(*asked: object, **more: object) -> None:
        offline.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "_load_from_hub", cache(sources._load_from_hub.__wrapped__))
    benchmark, not_here = lm_eval_benchmark("gsm8k"), r"cache.*download it with `--run`"
    for _ in range(2):
        with local_data_only(), pytest.raises(DllmBenchError, match=not_here):
            benchmark.dataset_hash()
        with pytest.raises(DllmBenchError, match=r"could not be loaded from the hub"):
            benchmark.dataset_hash()
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


# --- Dream's Sudoku and Countdown, on made-up files of their form ---------------------------------


@pytest.mark.parametrize(("task", "split", "name", "given", "answer", "begin"), CASES["dream"])
def test_prompts_are_dream_s(task, split, name, given, answer, begin, tmp_path: Path) -> None:
    """Eight examples, and what is asked up to its answer's first space."""
    file = tmp_path / "dream" / f"{name}.jsonl"
    file.parent.mkdir()
    file.write_text((json.dumps({"input": given[1:], "output": answer[1:]}) + "\n") * 10)
    asked = lm_eval_benchmark(task, "valid,none", split=split, data_dir=str(tmp_path))
    rule, *parts = asked.requests(encode)[0].prompt.split("\n\n")
    shown = f"Input:{given}\nOutput:"
    assert rule.startswith(begin) and len(asked.items) == 2
    assert parts == [*[shown + answer] * 8, shown + ("\n " if task == "sudoku_dream" else " ")]


def graded(task: Any, doc: Item, text: str) -> dict[str, float]:
    """Return all metrics of lm-eval's own task for one text, as "<metric>,<filter>"."""
    instance = Instance("generate_until", dict(doc), ("", {}), 0, ("t", 0, 1), [text])
    task._instances = [instance]
    task.apply_filters()
    return {
        f"{metric},{name}": float(value)
        for name, answer in instance.filtered_resps.items()
        for metric, value in task.process_results(doc, [answer]).items()
    }


def compared(
    ours: Bench,
    stock: Callable[[Item], Any],
    texts: Callable[[Item], Sequence[str]],
    docs: Callable[[Item], Item] = dict,
    shots: int = 0,
) -> list[Mapping[str, float]]:
    """Check the prompt of every item, and the metrics of some texts for it; return the metrics.

    stock: lm-eval's own task for an item; docs: what the item is there.
    """
    found = []
    for request, item in zip(ours.requests(encode), ours.items, strict=True):
        assert request.prompt == stock(item).fewshot_context(dict(docs(item)), shots)
        for text in texts(item):
            metrics = ours.score({request.id: text})[request.id].metrics
            assert metrics.items() >= graded(stock(item), docs(item), text).items()
            found.append(metrics)
    return found


@pytest.mark.parametrize(("task", "shots", "grades"), [("gsm8k", 4, 4), ("gsm8k_cot", 8, 3)])
def test_gsm8k_is_lm_eval_s_own(task: str, shots: int, grades: int, real_data: Path) -> None:
    """Prompts, and on made-up texts every metric, which is not always 0."""
    config = stock_config(f"gsm8k/{task.replace('_', '-')}.yaml", "gsm8k", real_data)
    stock = ConfigurableTask(config={"fewshot_config": {"sampler": "first_n"}, **config})
    ours = lm_eval_benchmark(task, shots=shots, limit=5, data_dir=str(real_data))

    def texts(item: Item) -> list[str]:
        return [answer.format(n=number_of(item)) for answer in CASES["gsm8k"]]

    found = compared(ours, lambda item: stock, texts, shots=shots)
    assert len({(metrics[STRICT], metrics[FLEXIBLE]) for metrics in found}) >= grades


def test_hendrycks_math_is_lm_eval_s_own(real_data: Path) -> None:
    path = "hendrycks_math/hendrycks_math_algebra.yaml"
    stock = ConfigurableTask(config=stock_config(path, "math", real_data, "math500", shots=0))
    data = {"split": "math500", "limit": 40, "data_dir": str(real_data)}
    ours = lm_eval_benchmark("math_hendrycks", "exact_match,none", **data)
    docs = {doc["problem"]: doc for doc in stock.test_docs()}

    def texts(item: Item) -> list[str]:
        answer = math_answers.boxed(item["solution"])
        return [f"It is ${answer}$.", f"{answer}", f"{answer} $", f"$x$ or ${answer}$", "7"]

    found = compared(ours, lambda item: stock, texts, lambda item: docs[item["problem"]])
    assert {metrics["exact_match,none"] for metrics in found} == {0, 1}


def test_drop_is_lm_eval_s_own(real_data: Path) -> None:
    """We read the original file; lm-eval gets it in the form of the hub."""
    stock = ConfigurableTask(config=drop_config(real_data / "drop" / "allennlp_fixture_drop.json"))
    ours = lm_eval_benchmark("drop", "f1,none", split="fixture", data_dir=str(real_data))
    docs = {doc["question"]: doc for doc in stock.validation_docs()}
    assert all(docs[item["question"]]["answers"] == item["answers"] for item in ours.items)

    def texts(item: Item) -> list[str]:
        answer = ",".join(item["answers"][0])
        return [answer, f"the {answer}", f"{answer} or so", "12", ""]

    found = compared(ours, lambda item: stock, texts, lambda item: docs[item["question"]])
    assert {(1, 1), (0, 0)} < {(metrics["em,none"], metrics["f1,none"]) for metrics in found}


def drop_config(file: Path) -> dict[str, Any]:
    """lm-eval's drop over the original file in the form of the hub."""
    passages = json.loads(file.read_text())
    empty: dict[str, list[Any]] = {"number": [], "date": [], "spans": []}
    rows = [
        {key: pair[key] for key in ("query_id", "question", "answer")}
        | {"passage": entry["passage"], "validated_answers": empty}
        for entry in passages.values()
        for pair in entry["qa_pairs"]
    ]
    config = load_yaml(STOCK / "drop/default.yaml")
    given = dict.fromkeys(("train", "validation"), Dataset.from_list(rows))
    return {**config, "custom_dataset": lambda **options: given, "dataset_kwargs": {}}


def subject_task(config: dict[str, Any], item: Item, **changes: Any) -> ConfigurableTask:
    """Return lm-eval's own task of an item's subject."""
    subject = " ".join(item["subject"].split("_"))
    about = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    return ConfigurableTask(config={**config, "task": "m", "description": about, **changes})


def test_mmlu_is_lm_eval_s_own(real_data: Path) -> None:
    config = stock_config("mmlu/generative/_default_template_yaml", "mmlu", real_data, shots=0)
    ours = lm_eval_benchmark("mmlu", "exact_match,get_response", limit=6, data_dir=str(real_data))
    texts = "B\nA", " (C)", "D.", "A because", ""
    compared(ours, partial(subject_task, config), lambda item: (GOLD["mmlu"](item), *texts))


def test_mmlu_by_likelihood_is_lm_eval_s_own(real_data: Path) -> None:
    """Contexts, continuations and metrics, with the five examples of a subject."""
    config = stock_config("mmlu/default/_default_template_yaml", "mmlu", real_data, shots=0)
    ours = lm_eval_likelihood("mmlu_likelihood", "acc,none", limit=4, data_dir=str(real_data))
    dev = [json.loads(line) for line in (real_data / "mmlu/dev.jsonl").open(encoding="utf-8")]
    for item in ours.items:
        given = {
            "dev": Dataset.from_list([row for row in dev if row["subject"] == item["subject"]]),
            "test": Dataset.from_list([dict(item)]),
        }
        stock = subject_task(config, item, custom_dataset=lambda given=given, **_: given)
        context = stock.fewshot_context(dict(item), 5)
        made = stock.construct_requests(dict(item), context, metadata=("m", 0, 1))
        assert ours.pairs(item) == [instance.args for instance in made]
        said = [Likelihood(-float(i), 0.1, False) for i in (3, 1, 2, 4)]
        score = ours.score({item["id"]: text_of(said)})[item["id"]]
        assert score.metrics == {"acc,none": item["answer"] == 1}


def test_minerva_s_prompt_and_normal_form_are_lm_eval_s(real_data: Path) -> None:
    """lm-eval's module needs another antlr than Hydra; its functions are taken from its source."""
    stock = functions_of("minerva_math/utils.py")
    data = {"split": "math500", "shots": 4, "data_dir": str(real_data)}
    ours, ask = lm_eval_benchmark("math_minerva", "math_verify,none", **data), stock["doc_to_text"]
    shots = [f"{ask(shot)} {shot['solution']}" for shot in stock["list_fewshot_samples"]()]
    for request, item in zip(ours.requests(encode)[:5], ours.items, strict=False):
        assert older(request.prompt) == older("\n\n".join([*shots, ask(item)]))
    for item in ours.items:
        answer = math_answers.boxed(item["solution"]) or ""
        for text in (answer, f"${answer}$", f"x = {answer}", f"{answer} cm", f"${answer}.$"):
            assert math_answers.normalised(text) == stock["normalize_final_answer"](text)
        closing = f"Final Answer: The final answer is ${answer}$. I hope it is correct."
        for text in (closing, closing[:-24], answer):
            assert math_answers.final_answer(text) == stock["get_unnormalized_answer"](text)


def older(prompt: str) -> str:
    """Return the prompt without two differences of lm-eval up to 0.4.9: a stray brace, TeX line
    breaks."""
    return prompt.replace("{5-x}}$.}", "{5-x}}$.").replace("\\\\\n", "\\\n")


def functions_of(path: str) -> dict[str, Any]:
    """Functions and tables of an lm-eval module that cannot be imported here."""
    tree = ast.parse((STOCK / path).read_text())
    wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.Assign)]
    kept = [n for n in wanted if "eval_logger" not in ast.unparse(n)[:30]]
    space: dict[str, Any] = {"re": re}
    annotations = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*annotations, *kept], []), path, "exec"), space)
    return space


@pytest.mark.parametrize(("answer", "program"), CASES["reopened"])
def test_a_fence_that_the_prompt_opened_is_read_as_lm_eval_does(answer: str, program: str) -> None:
    assert code_answers.reopened_block(answer) == program
    assert functions_of("mbpp/utils.py")["extract_code_blocks"](answer) == program


def changed(form: str, item: Item) -> str:
    """Return a program that is made of the problem's own solution."""
    nodes = ast.walk(ast.parse(item["prompt"] + item["canonical_solution"]))
    (own,) = [n for n in nodes if getattr(n, "name", "") == item["entry_point"]]
    names = ", ".join(argument.arg for argument in own.args.args)
    solution, inputs = item["canonical_solution"], item["base_input"]
    return form.format(arguments=names, solution=solution, inputs=inputs)


@pytest.mark.exhaustive
def test_twenty_mixed_programs_are_graded_as_by_evalplus(real_data, tmp_path, monkeypatch) -> None:
    """EvalPlus's checker runs in a process of its own, because it changes the process it is in."""
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HUMANEVAL_OVERRIDE_PATH", raising=False)
    ours = evalplus_benchmark("humaneval_plus", data_dir=str(real_data))
    plain = [i for i in ours.items if "\ndef " not in i["prompt"].split("def ", 1)[1]][:20]
    texts = {item["id"]: changed(form, item) for form, item in zip(cycle(CASES["changed"]), plain)}
    found = {key: score.metrics for key, score in ours.score(texts).items()}
    assert found == {i["id"]: by_evalplus(i, ours.program(i, texts[i["id"]])) for i in plain}
    assert {tuple(metrics.values()) for metrics in found.values()} == {(0, 0), (1, 0), (1, 1)}


def by_evalplus(problem: Item, solution: str) -> dict[str, float]:
    """EvalPlus's verdicts, with its own expected results."""
    from evalplus.eval import untrusted_check
    from evalplus.gen.util import trusted_exec

    name, passed = problem["entry_point"], list[bool]()
    for stage in ("base", "plus"):
        inputs = problem[f"{stage}_input"]
        reference = problem["prompt"] + problem["canonical_solution"]
        values, seconds = trusted_exec(reference, inputs, name, record_time=True)
        given = (inputs, name, values, problem["atol"], seconds)
        passed.append(untrusted_check("humaneval", solution, *given, fast_check=True)[0] == "pass")
    return {"base": float(passed[0]), "plus": float(all(passed))}


def test_a_samples_file_is_what_evalplus_reads(real_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    from evalplus.data import load_solutions

    ours = evalplus_benchmark("humaneval_plus", data_dir=str(real_data))
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(ours.samples(gold(ours))))
    read = {one["task_id"]: one["solution"] for one in load_solutions(str(file))}
    assert set(read) == {item["task_id"] for item in ours.items} and len(read) == 164
    assert all(compile(solution, key, "exec") for key, solution in read.items())
