"""Benchmarks, gold answers and lm-eval's own task files for the tests of `benchmarks`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks import base
from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.benchmarks.lm_eval import LmEvalBenchmark
from dllm_bench.benchmarks.tasks import data
from dllm_bench.core.protocols import SampleScore, Turns

STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"
COMPLETION, EXTRACTED = "pass@1,completion", "pass@1,extracted"
GOLD: Mapping[str, Callable[[base.Item], str]] = {
    "minigsm": lambda item: " " + item["answer"],
    "gsm8k": lambda item: " " + item["answer"],
    "humaneval": lambda item: item["canonical_solution"],
    "mbpp": lambda item: item["code"],
    "minicode": lambda item: item["canonical_solution"],
    "humaneval_plus": lambda item: item["canonical_solution"],
    "mbpp_plus": lambda item: item["canonical_solution"],
}
Bench = LmEvalBenchmark | EvalPlusBenchmark


def lm_eval_benchmark(task: str, primary: str = STRICT, **settings: Any) -> LmEvalBenchmark:
    return LmEvalBenchmark(task, task, 64, primary, allow_code_execution=True, **settings)


def evalplus_benchmark(dataset: str, **settings: Any) -> EvalPlusBenchmark:
    return EvalPlusBenchmark(dataset, dataset, 64, allow_code_execution=True, **settings)


def encode(prompt: str | Turns) -> list[int]:
    text = prompt if isinstance(prompt, str) else json.dumps(list(prompt))
    return list(text.encode())


def gold(benchmark: Bench) -> dict[str, str]:
    kind = benchmark.task if isinstance(benchmark, LmEvalBenchmark) else benchmark.dataset
    return {item["id"]: GOLD[kind](item) for item in benchmark.items}


def foreign(texts: Mapping[str, str]) -> dict[str, str]:
    """Every item gets the answer of the next one."""
    answers = list(texts.values())
    return dict(zip(texts, [*answers[1:], answers[0]], strict=True))


def mean(scores: Mapping[str, SampleScore]) -> float:
    return sum(score.value for score in scores.values()) / len(scores)


def stock_config(path: str, task: str, data_dir: Path) -> dict[str, Any]:
    """lm-eval's own task over our copy of the items."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(Path(inspect.getfile(lm_eval.tasks)).parent / path)
    config.pop("tag", None)
    shots = {"train": data.dataset(task, data_dir=str(data_dir), limit=40)["shots"]}
    items = {"test": data.dataset(task, data_dir=str(data_dir), limit=40)["test"]}
    return {**config, "custom_dataset": lambda **options: shots | items, "dataset_kwargs": {}}
