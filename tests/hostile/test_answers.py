"""Hostile answers: each that cannot be read is a wrong one with its reason, and soon."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dllm_bench.benchmarks import bounded
from dllm_bench.benchmarks.bounded import UnreadableAnswerError, call_bounded
from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.benchmarks.tasks import korbench, math_answers
from dllm_bench.core.benchmark import JUDGE_ERROR, SampleScore
from dllm_bench.core.errors import DllmBenchError
from tests.benchmark_helpers import Bench, evalplus_benchmark, lm_eval_benchmark

CPU_S = 3
"""Of a text; the import of lm-eval takes two."""
RETURNED = {
    "attributes": "a" + ".b" * 1000,
    "brackets": "(" * 5000,
    "operators": "1" + "+1" * 20_000,
    "a lone surrogate": "'\ud800'",
    "digits": "1" * 100_000,
    "a null byte": "'\0'",
}
TOO_LONG = {"too long": "1" * (bounded.MAX_CHARACTERS + 1)}
ANSWERS = {name: f"    return {text}\n" for name, text in RETURNED.items()} | TOO_LONG
TEXTS = {"digits": "#### " + "1" * 300_000, "a lone surrogate": "#### \ud800"} | TOO_LONG
PRIMARY = {"minigsm": "exact_match,strict-match", "miniread": "exact,strict-match"}


def wrong(benchmark: Bench, by_name: dict[str, str]) -> dict[str, SampleScore]:
    """Return the scores of the texts, after checking that each is wrong and has a grade."""
    texts = {item["id"]: text for item, text in zip(benchmark.items, by_name.values(), strict=True)}
    scores = dict(zip(by_name, benchmark.score(texts).values(), strict=True))
    assert [score.value for score in scores.values()] == [0.0] * len(texts)
    assert JUDGE_ERROR not in {score.verdict for score in scores.values()}
    assert scores["a lone surrogate"].verdict == "unreadable (characters)"
    assert scores["too long"].verdict == "unreadable (length)"
    if isinstance(benchmark, EvalPlusBenchmark):
        assert set(benchmark.answers(texts)) == set(texts)
        assert len(list(benchmark.samples(texts))) == len(texts)
    return scores


@pytest.mark.parametrize("postprocess", ["assembled", "evalplus", "diffucoder", "lopa"])
def test_a_program_that_cannot_be_read_is_wrong(postprocess: str) -> None:
    limit = len(ANSWERS)
    scores = wrong(evalplus_benchmark("minicode", postprocess=postprocess, limit=limit), ANSWERS)
    if postprocess in ("evalplus", "diffucoder"):
        assert scores["attributes"].verdict == "unreadable (RecursionError)"
        assert scores["attributes"].metrics == {"base": 0.0, "plus": 0.0}


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of their own, with few CPU seconds for each text."""
    monkeypatch.setattr(bounded, "_IDLE", [])
    start = f"from dllm_bench.benchmarks import bounded as b; b.MAX_CPU_S = {CPU_S}; b.serve()"
    monkeypatch.setattr(bounded, "START", start)


@pytest.mark.usefixtures("short_time")
@pytest.mark.parametrize("task", PRIMARY)
def test_a_text_that_cannot_be_read_is_wrong(task: str) -> None:
    scores = wrong(lm_eval_benchmark(task, PRIMARY[task], limit=len(TEXTS)), TEXTS)
    assert len({frozenset(score.metrics) for score in scores.values()}) == 1
    assert task != "minigsm" or scores["digits"].verdict == "unreadable (time)"


KILLED_BY = "import os; os.kill(os.getpid(), {})"


def reading(reader: Callable[..., Any], *given: Any) -> str:
    """Return what a reader finds, or the reason why it ends."""
    try:
        return str(reader(*given))
    except UnreadableAnswerError as error:
        return error.reason


@pytest.mark.usefixtures("short_time")
def test_seconds_memory_and_nesting_are_bounded_in_any_thread() -> None:
    cases = [
        ("time", call_bounded, re.fullmatch, "(a|aa|a?a)+b", "a" * 80),
        ("nesting", call_bounded, exec, KILLED_BY.format(11)),  # as a stack overflow does
        ("MemoryError", call_bounded, eval, "bytearray(2**40)"),
        ("time or False", math_answers.verified, "$3$", "$9^{9^{9^{9}}}$"),  # it has two limits
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda case: reading(*case[1:]), cases, timeout=60))
    assert all(one in case[0] for one, case in zip(found, cases, strict=True)), found
    asked = "__import__('os').getpid()"
    assert len({call_bounded(eval, asked) for _ in range(5)}) == 1, "one process reads all texts"


@pytest.mark.usefixtures("short_time")
def test_a_fault_of_the_machine_is_no_wrong_answer() -> None:
    with pytest.raises(DllmBenchError, match="ModuleNotFoundError: No module named 'not_here'"):
        call_bounded(exec, "import not_here")
    with pytest.raises(DllmBenchError, match="ended from outside"):
        call_bounded(exec, KILLED_BY.format(9))


@pytest.mark.parametrize(
    "part", ["a", "$", "\\text{", "\\textbf{", "\\boxed{", "sqrt[", "\\frac", "$\n", "sqrt[3]", "}"]
)
def test_the_normal_forms_take_linear_time(part: str) -> None:
    started = time.process_time()
    text = part * (200_000 // len(part))
    math_answers.plain(text)
    math_answers.loose(text)
    assert time.process_time() - started < 2


def score_korbench(text: str, doc: korbench.Doc) -> dict[str, float]:
    return korbench.score(doc, [text])


def test_long_numbers_are_read_within_bounds() -> None:
    doc = {"category": "operation", "rule_id": "23", "index": "5", "answer": "[[1]]"}
    assert reading(call_bounded, score_korbench, "[[" + "1" * 100_000 + "]]", doc) == "ValueError"
