"""Gold answers are right and answers of other items are not, for every task, on real items.

A fixed sample of each task is graded; DLLM_BENCH_ALL_ITEMS=1 grades all items. Items that
a published grader gets wrong are listed, each with the reason.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.benchmarks.lm_eval import LmEvalBenchmark, task_file, task_names
from dllm_bench.paths import read_yaml
from tests.benchmark_helpers import GOLD, evalplus_benchmark, foreign, gold, lm_eval_benchmark, mean
from tests.tiers import covering

ALL = os.environ.get("DLLM_BENCH_ALL_ITEMS") == "1"
TEXTS, PROGRAMS, FOREIGN = (None, None, None) if ALL else (300, 8, 150)
KNOWN = read_yaml(Path(__file__).with_name("gold.yaml"))
SPLITS, CHANCE, WRONG_GOLD = (KNOWN[name] for name in ("splits", "chance", "wrong gold"))
ABSENT = ("sudoku_dream", "countdown_dream")  # see test_planning.py
TASKS = [task for task in task_names() if task_file(task)["output_type"] == "generate_until"]
"""Tasks whose answers are texts."""


def benchmark(task: str, data: Path) -> LmEvalBenchmark:
    """Return the task over the real items, with its first metric as the primary one."""
    file = task_file(task)
    primary = f"{file['metric_list'][0]['metric']},{file['filter_list'][0]['name']}"
    split = SPLITS.get(file["dataset_kwargs"]["source"], "test")
    limit = PROGRAMS if file.get("unsafe_code") else TEXTS
    return lm_eval_benchmark(task, primary, split=split, limit=limit, data_dir=str(data))


def test_every_task_has_gold_answers() -> None:
    assert set(TASKS) <= set(GOLD)


DAILY = ("gsm8k", "humaneval", "mbpp")


@pytest.mark.parametrize("task", [*DAILY, *covering(9, [t for t in TASKS if t not in DAILY])])
def test_gold_is_right_and_foreign_answers_are_not(task: str, real_data: Path) -> None:
    """Gold answers are right by every metric of the task."""
    asked = benchmark(task, real_data)
    if task in ABSENT:
        pytest.skip(f"no items of {task} in {real_data}")
    texts = gold(asked)
    scores = asked.score(texts)
    some = dict(list(foreign(texts).items())[:FOREIGN])
    lucky = asked.score(some)
    for metric in scores[next(iter(texts))].metrics:
        wrong = {key for key, score in scores.items() if score.metrics[metric] != 1}
        known = {**WRONG_GOLD.get(task, {}), **WRONG_GOLD.get(metric, {})}
        assert wrong == set(known) & set(texts), metric
        share = sum(score.metrics[metric] for score in lucky.values()) / len(lucky)
        assert share <= CHANCE.get(task, 0.02), metric


@pytest.mark.parametrize(
    ("dataset", "postprocess"),
    covering(2, [*product(("humaneval_plus", "mbpp_plus"), ("evalplus", "assembled", "lopa"))]),
)
def test_canonical_solutions_pass_base_and_plus_and_foreign_ones_do_not(
    dataset: str, postprocess: str, real_data: Path
) -> None:
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    asked = evalplus_benchmark(
        dataset, limit=PROGRAMS and PROGRAMS // 2, postprocess=postprocess, data_dir=str(real_data)
    )
    scores = asked.score(gold(asked))
    wrong = {key for key, score in scores.items() if score.metrics != {"base": 1, "plus": 1}}
    assert wrong == set(WRONG_GOLD.get(f"{dataset} {postprocess}", {})) & set(scores)
    assert mean(asked.score(foreign(gold(asked)))) == 0


def test_diffucoder_s_way_gives_the_same_program(real_data: Path) -> None:
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    settings: dict[str, Any] = {"limit": 4, "data_dir": str(real_data)}
    asked = evalplus_benchmark("humaneval_plus", postprocess="diffucoder", **settings)
    answers = {key: f"{text}```\nThat is it." for key, text in gold(asked).items()}
    assert mean(asked.score(answers)) == 1
