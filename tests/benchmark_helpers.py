"""Benchmarks, gold answers and lm-eval's own task files for the tests of `benchmarks`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.benchmarks.items import Item
from dllm_bench.benchmarks.lm_eval import LikelihoodBenchmark, LmEvalBenchmark
from dllm_bench.benchmarks.tasks import math_answers, sources
from dllm_bench.core.benchmark import SampleScore, Turns

STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"
COMPLETION = "pass@1,completion"
Answer = Callable[[Item], str]


def number_of(item: Item) -> str:
    return str(item["answer"]).split("#### ")[-1]


def minerva(item: Item) -> str:
    answer = math_answers.boxed(item["solution"])
    return (
        f"{item['solution']}\nFinal Answer: The final answer is ${answer}$. I hope it is correct."
    )


def korbench_answer(item: Item) -> str:
    """Return a right answer: one of the accepted ones, where the item lists several."""
    answer = str(item["answer"])
    if item["category"] != "puzzle":
        return answer
    inner = answer.strip("[] ")
    several = {"2": ",", "4": " ", "10": "\n"}.get(item["rule_id"])
    return f"[[{inner.split(several)[0].strip() if several else inner}]]"


def looked_up(item: Item) -> str:
    """Return a program that looks up the outputs of the tests: there are no reference solutions."""
    tests = json.loads(item["tests"])
    if not item["function"]:
        table = json.dumps(json.dumps(dict(tests)))
        code = f"import json, sys\nprint(json.loads({table})[sys.stdin.read()])"
        return f"```python\n{code}\n```"
    known = {json.dumps([*map(json.loads, g.split("\n"))]): json.loads(w) for g, w in tests}
    table = json.dumps(json.dumps(known))
    code = (
        f"import json\nclass Solution:\n    def {item['function']}(self, *args):\n"
        f"        return json.loads({table})[json.dumps(list(args))]"
    )
    return f"Some words.\n```python\n{code}\n```"


MINI = (
    "minigsm", "minimath", "miniread", "miniread_count", "minirule", "minirule_choice",
    "minirule_range", "ministory", "miniparallel", "minigsm_free", "minigsm_free_instruct",
    "sentences",
)  # fmt: skip
CODE = "humaneval humaneval_instruct humaneval_plus mbpp_plus minicode minicode_free".split()
GOLD: Mapping[str, Answer] = {
    **dict.fromkeys(MINI, lambda item: " " + item["answer"]),
    **dict.fromkeys(CODE, lambda item: item["canonical_solution"]),
    "gsm8k": lambda item: " " + item["answer"],
    "gsm8k_cot": lambda item: f" So. The answer is {number_of(item)}.",
    "gsm8k_opencompass": lambda item: f"It is \\boxed{{{number_of(item)}}}.",
    "math_minerva": minerva,
    "math_hendrycks": lambda item: f"${math_answers.boxed(item['solution'])}$",
    "math_opencompass": lambda item: item["solution"],
    "mmlu": lambda item: " " + "ABCD"[item["answer"]],
    "mmlu_opencompass": lambda item: "Well.\nANSWER: " + "ABCD"[item["answer"]],
    "squad_v2": lambda item: " " + (item["answers"] or ["unanswerable"])[0],
    "squad_v2_opencompass": lambda item: (item["answers"] or ["impossible to answer"])[0],
    "drop": lambda item: ",".join(item["answers"][0]),
    "drop_opencompass": lambda item: "Well.\nAnswer: " + " and ".join(item["answers"][0]),
    "korbench": korbench_answer,
    "livecodebench": looked_up,
    "humaneval_opencompass": lambda i: f"```\n{i['prompt']}{i['canonical_solution']}```",
    "mbpp": lambda item: item["code"],
    "mbpp_instruct": lambda item: f"\n{item['code']}\n```",
    **dict.fromkeys(("sudoku_dream", "countdown_dream"), lambda item: str(item["output"])),
}
Bench = LmEvalBenchmark | EvalPlusBenchmark


def lm_eval_benchmark(task: str, primary: str = STRICT, **settings: Any) -> LmEvalBenchmark:
    given = {"max_new_tokens": 64, "primary": primary, "allow_code_execution": True, **settings}
    return LmEvalBenchmark(name=task, task=task, **given)


def lm_eval_likelihood(task: str, primary: str, **settings: Any) -> LikelihoodBenchmark:
    return LikelihoodBenchmark(name=task, task=task, max_new_tokens=1, primary=primary, **settings)


def evalplus_benchmark(dataset: str, **settings: Any) -> EvalPlusBenchmark:
    given = {"max_new_tokens": 64, "allow_code_execution": True, **settings}
    return EvalPlusBenchmark(name=dataset, dataset=dataset, **given)


each_kind = pytest.mark.parametrize(
    "benchmark", [lm_eval_benchmark("minigsm"), evalplus_benchmark("minicode")]
)


def encode(prompt: str | Turns) -> list[int]:
    return list((prompt if isinstance(prompt, str) else json.dumps(list(prompt))).encode())


def gold(benchmark: Bench) -> dict[str, str]:
    kind = benchmark.task if isinstance(benchmark, LmEvalBenchmark) else benchmark.dataset
    return {item["id"]: GOLD[kind](item) for item in benchmark.items}


def foreign(texts: Mapping[str, str]) -> dict[str, str]:
    """Give every item the answer of the next one."""
    answers = list(texts.values())
    return dict(zip(texts, [*answers[1:], answers[0]], strict=True))


def mean(scores: Mapping[str, SampleScore]) -> float:
    return sum(score.value for score in scores.values()) / len(scores)


def stock_config(
    path: str, task: str, data_dir: Path, split: str = "test", shots: int = 8
) -> dict[str, Any]:
    """lm-eval's own task over our copy of the items."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(Path(inspect.getfile(lm_eval.tasks)).parent / path)
    config.pop("tag", None)
    ours = sources.dataset(
        source=task,
        shots_from="train" if shots else None,
        split=split,
        limit=40,
        data_dir=str(data_dir),
        shots_count=shots,
    )
    given = {"train": ours["shots"], "dev": ours["shots"], "test": ours["test"]}
    return {**config, "custom_dataset": lambda **options: given, "dataset_kwargs": {}}
