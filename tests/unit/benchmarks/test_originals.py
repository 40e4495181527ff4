"""Prompts and scores equal those of the installed packages that they come from.

lm-eval's own task files run over our copy of the items; EvalPlus's own checker grades the same
programs. Tasks that cannot be loaded without a network are compared part by part.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from dllm_bench.benchmarks import code_answers
from dllm_bench.benchmarks.items import Item, text_of
from dllm_bench.benchmarks.tasks import math_answers
from dllm_bench.core.request import Likelihood
from tests.benchmark_helpers import (
    FLEXIBLE,
    GOLD,
    STRICT,
    encode,
    evalplus_benchmark,
    gold,
    lm_eval_benchmark,
    lm_eval_likelihood,
    number_of,
    stock_config,
)


def stock_task(config: Mapping[str, Any]) -> Any:
    return ConfigurableTask(config=dict(config))


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


# Texts by which two readings of an answer differ; {n} is the right number.
ANSWERS = [
    "", "#### {n}", "so #### {n}.", "#### {n}\nQuestion: x #### 9", "about ${n} or 7",
    "5 + {n} = {n}.", "#### five", "The answer is {n}", "####{n}", "#### {n}\n\nThe next is 20",
    " 3 apples #### {n} ##", "#### {n}.00", "#### -{n}", "#### {n} #### 4", "#### 1,{n}",
    "So. The answer is {n}.", "so 12", "$1{n}", "The answer is {n}. Or 4.",
]  # fmt: skip


@pytest.mark.parametrize(("task", "shots", "grades"), [("gsm8k", 4, 4), ("gsm8k_cot", 8, 3)])
def test_gsm8k_is_lm_eval_s_own(task: str, shots: int, grades: int, real_data: Path) -> None:
    """Prompts, and on made-up texts every metric, which is not always 0."""
    config = stock_config(f"gsm8k/{task.replace('_', '-')}.yaml", "gsm8k", real_data)
    stock = stock_task({"fewshot_config": {"sampler": "first_n"}, **config})
    ours = lm_eval_benchmark(task, shots=shots, limit=5, data_dir=str(real_data))
    for request, item in zip(ours.requests(encode), ours.items, strict=True):
        assert request.prompt == stock.fewshot_context(dict(item), shots)
        assert request.prompt.count("Q") == shots + 1
        seen = set()
        for answer in ANSWERS:
            text = answer.format(n=number_of(item))
            metrics = ours.score({item["id"]: text})[item["id"]].metrics
            assert metrics.items() >= graded(stock, item, text).items()
            seen.add((metrics[STRICT], metrics[FLEXIBLE]))
        assert len(seen) >= grades


def test_hendrycks_math_is_lm_eval_s_own(real_data: Path) -> None:
    path = "hendrycks_math/hendrycks_math_algebra.yaml"
    stock = stock_task(stock_config(path, "math", real_data, "math500", shots=0))
    ours = lm_eval_benchmark(
        "math_hendrycks", "exact_match,none", split="math500", limit=40, data_dir=str(real_data)
    )
    docs = {doc["problem"]: doc for doc in stock.test_docs()}
    seen = set()
    for request, item in zip(ours.requests(encode), ours.items, strict=True):
        assert request.prompt == stock.fewshot_context(docs[item["problem"]], 0)
        answer = math_answers.boxed(item["solution"])
        for text in (f"It is ${answer}$.", f"{answer}", f"{answer} $", f"$x$ or ${answer}$", "7"):
            metrics = ours.score({item["id"]: text})[item["id"]].metrics
            assert metrics == graded(stock, item, text)
            seen.add(metrics["exact_match,none"])
    assert seen == {0, 1}


def test_drop_is_lm_eval_s_own(real_data: Path) -> None:
    """We read the original file; lm-eval gets it in the form of the hub."""
    stock = stock_task(drop_config(real_data / "drop" / "allennlp_fixture_drop.json"))
    ours = lm_eval_benchmark("drop", "f1,none", split="fixture", data_dir=str(real_data))
    docs = {doc["question"]: doc for doc in stock.validation_docs()}
    seen = set()
    for request, item in zip(ours.requests(encode), ours.items, strict=True):
        doc = docs[item["question"]]
        assert request.prompt == stock.fewshot_context(dict(doc), 0)
        assert doc["answers"] == item["answers"]
        answer = ",".join(item["answers"][0])
        for text in (answer, f"the {answer}", f"{answer} or so", "12", ""):
            metrics = ours.score({item["id"]: text})[item["id"]].metrics
            assert metrics == graded(stock, doc, text)
            seen.add((metrics["em,none"], metrics["f1,none"]))
    assert {(1, 1), (0, 0)} < seen


def drop_config(file: Path) -> dict[str, Any]:
    """lm-eval's drop over the original file in the form of the hub."""
    passages = json.loads(file.read_text())
    columns: dict[str, list[Any]] = {"number": [], "date": [], "spans": []}
    rows = [
        {
            "query_id": pair["query_id"],
            "passage": entry["passage"],
            "question": pair["question"],
            "answer": pair["answer"],
            "validated_answers": columns,
        }
        for entry in passages.values()
        for pair in entry["qa_pairs"]
    ]
    config = load_yaml(Path(inspect.getfile(lm_eval.tasks)).parent / "drop/default.yaml")
    given = dict.fromkeys(("train", "validation"), Dataset.from_list(rows))
    return {**config, "custom_dataset": lambda **options: given, "dataset_kwargs": {}}


def test_mmlu_is_lm_eval_s_own(real_data: Path) -> None:
    template = "mmlu/generative/_default_template_yaml"
    config = stock_config(template, "mmlu", real_data, shots=0)
    ours = lm_eval_benchmark("mmlu", "exact_match,get_response", limit=20, data_dir=str(real_data))
    for request, item in zip(ours.requests(encode), ours.items, strict=True):
        subject = " ".join(item["subject"].split("_"))
        about = "The following are multiple choice questions (with answers) about"
        stock = stock_task({**config, "task": "m", "description": f"{about} {subject}.\n\n"})
        assert request.prompt == stock.fewshot_context(dict(item), 0)
        for text in (GOLD["mmlu"](item), "B\nA", " (C)", "D.", "A because", ""):
            metrics = ours.score({item["id"]: text})[item["id"]].metrics
            assert metrics.items() >= graded(stock, item, text).items()


def test_mmlu_by_likelihood_is_lm_eval_s_own(real_data: Path) -> None:
    """Contexts, continuations and metrics, with the five examples of a subject."""
    template = "mmlu/default/_default_template_yaml"
    ours = lm_eval_likelihood("mmlu_likelihood", "acc,none", limit=12, data_dir=str(real_data))
    dev = [json.loads(line) for line in (real_data / "mmlu/dev.jsonl").open(encoding="utf-8")]
    for item in ours.items:
        config = stock_config(template, "mmlu", real_data, shots=0)
        subject = " ".join(item["subject"].split("_"))
        about = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        given = {
            "dev": Dataset.from_list([row for row in dev if row["subject"] == item["subject"]]),
            "test": Dataset.from_list([dict(item)]),
        }
        changes = {
            "task": "m",
            "description": about,
            "custom_dataset": lambda given=given, **_: given,
        }
        stock = stock_task({**config, **changes})
        context = stock.fewshot_context(dict(item), 5)
        made = stock.construct_requests(dict(item), context, metadata=("m", 0, 1))
        assert ours.pairs(item) == [instance.args for instance in made]
        said = [Likelihood(-float(i), 0.1, False) for i in (3, 1, 2, 4)]
        wanted = stock.process_results(dict(item), [(one.nats, one.greedy) for one in said])
        score = ours.score({item["id"]: text_of(said)})[item["id"]]
        assert (
            score.metrics == {"acc,none": wanted["acc"]} == {"acc,none": float(item["answer"] == 1)}
        )


def test_minerva_s_prompt_and_normal_form_are_lm_eval_s(real_data: Path) -> None:
    """lm-eval's module needs another antlr than Hydra; its functions are taken from its source."""
    stock = functions_of("minerva_math/utils.py")
    ours = lm_eval_benchmark(
        "math_minerva", "math_verify,none", split="math500", shots=4, data_dir=str(real_data)
    )
    shots = [
        stock["doc_to_text"](shot) + " " + shot["solution"]
        for shot in stock["list_fewshot_samples"]()
    ]
    for request, item in zip(ours.requests(encode)[:5], ours.items, strict=False):
        wanted = "\n\n".join([*shots, stock["doc_to_text"](item)])
        assert older(request.prompt) == older(wanted)
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
    tree = ast.parse((Path(inspect.getfile(lm_eval.tasks)).parent / path).read_text())
    wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.Assign)]
    kept = [n for n in wanted if "eval_logger" not in ast.unparse(n)[:30]]
    space: dict[str, Any] = {"re": re}
    annotations = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*annotations, *kept], []), path, "exec"), space)
    return space


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("\ndef f():\n    return 1\n```\nSo.", "def f():\n    return 1"),
        ("def f():\n    return 1\n```", " f():\n    return 1"),  # loses its first word
        ("x = 1\n```\n```python\ny = 2\n```", " = 1"),
        ("\nx = 1", ""),
    ],
)
def test_a_fence_that_the_prompt_opened_is_read_as_lm_eval_does(answer: str, program: str) -> None:
    assert code_answers.reopened_block(answer) == program
    assert functions_of("mbpp/utils.py")["extract_code_blocks"](answer) == program


def test_the_box_of_a_solution_is_lm_eval_s(real_data: Path) -> None:
    from lm_eval.tasks.hendrycks_math import utils as stock

    ours = lm_eval_benchmark(
        "math_hendrycks", "exact_match,none", split="math500", data_dir=str(real_data)
    )
    for item in ours.items:
        wanted = stock.remove_boxed(stock.last_boxed_only_string(item["solution"]))
        assert math_answers.boxed(item["solution"]) == wanted


BREAKS: Sequence[Callable[[str, Item], str]] = (
    lambda text, item: text,
    lambda text, item: text.replace("return", "return None and"),
    lambda text, item: "    pass\n",
    lambda text, item: (
        f"    if [{arguments(item)}] not in {item['base_input']!r}: return 77\n{text}"
    ),
)
"""Right, wrong, without a result, right on the base inputs only."""


def arguments(item: Item) -> str:
    code = item["prompt"] + item["canonical_solution"]
    functions = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef)]
    (own,) = [n for n in functions if n.name == item["entry_point"]]
    return ", ".join(argument.arg for argument in own.args.args)


@pytest.fixture
def evalplus_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("HUMANEVAL_OVERRIDE_PATH", "MBPP_OVERRIDE_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("evalplus_cache")
def test_twenty_mixed_programs_are_graded_as_by_evalplus(real_data: Path) -> None:
    """EvalPlus's checker runs in a process of its own, because it changes the process it is in."""
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    ours = evalplus_benchmark("humaneval_plus", data_dir=str(real_data))
    plain = [i for i in ours.items if "\ndef " not in i["prompt"].split("def ", 1)[1]][:20]
    texts = {
        item["id"]: BREAKS[n % len(BREAKS)](GOLD["humaneval_plus"](item), item)
        for n, item in enumerate(plain)
    }
    found = {key: score.metrics for key, score in ours.score(texts).items()}
    theirs = {i["id"]: by_evalplus(i, ours.program(i, texts[i["id"]])) for i in plain}
    assert found == theirs
    assert {tuple(metrics.values()) for metrics in found.values()} == {(0, 0), (1, 0), (1, 1)}


def by_evalplus(problem: Item, solution: str) -> dict[str, float]:
    """EvalPlus's verdicts, with its own expected results."""
    from evalplus.evaluate import check_correctness
    from evalplus.gen.util import trusted_exec

    reference = problem["prompt"] + problem["canonical_solution"]
    expected: dict[str, Any] = {}
    for stage in ("base", "plus"):
        inputs = problem[f"{stage}_input"]
        values, times = trusted_exec(reference, inputs, problem["entry_point"], record_time=True)
        expected |= {stage: values, f"{stage}_time": times}
    result = check_correctness(
        "humaneval", 0, dict(problem), solution, expected, fast_check=True, identifier="x"
    )
    base_, plus = (result[stage][0] == "pass" for stage in ("base", "plus"))
    return {"base": float(base_), "plus": float(base_ and plus)}


def test_a_samples_file_is_what_evalplus_reads(real_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    from evalplus.data import load_solutions

    ours = evalplus_benchmark("humaneval_plus", data_dir=str(real_data))
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(ours.samples(gold(ours))))
    read = {one["task_id"]: one["solution"] for one in load_solutions(str(file))}
    assert set(read) == {item["task_id"] for item in ours.items}
    assert len(read) == 164
    assert all(compile(solution, key, "exec") for key, solution in read.items())
    assert os.path.getsize(file) > 164
