"""Hostile answers: each that cannot be read is a wrong one with its reason, and soon."""

from __future__ import annotations

import os
import re
import threading
import time

import pytest

from dllm_bench.benchmarks import bounded
from dllm_bench.benchmarks.bounded import UnreadableAnswerError, call_bounded
from dllm_bench.benchmarks.tasks import korbench, math_answers
from dllm_bench.core.benchmark import JUDGE_ERROR
from dllm_bench.core.errors import DllmBenchError
from tests.benchmark_helpers import evalplus_benchmark, lm_eval_benchmark

CPU_S = 5
"""Of a text; the import of lm-eval takes two."""
DEEP = "    return a" + ".b" * 1000 + "\n"
ANSWERS = {
    "attributes": DEEP,
    "brackets": "    return " + "(" * 5000 + "\n",
    "operators": "    return 1" + "+1" * 20_000 + "\n",
    "a lone surrogate": "    return '\ud800'\n",
    "digits": "    return " + "1" * 100_000 + "\n",
    "a null byte": "    return '\0'\n",
    "too long": "#" * (bounded.MAX_CHARACTERS + 1),
}


@pytest.mark.parametrize("postprocess", ["assembled", "evalplus", "diffucoder", "lopa"])
def test_a_program_that_cannot_be_read_is_wrong(postprocess: str) -> None:
    benchmark = evalplus_benchmark("minicode", postprocess=postprocess, limit=len(ANSWERS))
    texts = {item["id"]: text for item, text in zip(benchmark.items, ANSWERS.values(), strict=True)}
    scores = benchmark.score(texts)
    assert [score.value for score in scores.values()] == [0.0] * len(ANSWERS)
    assert JUDGE_ERROR not in {score.verdict for score in scores.values()}
    by_name = dict(zip(ANSWERS, scores.values(), strict=True))
    assert by_name["a lone surrogate"].verdict == "unreadable (characters)"
    assert by_name["too long"].verdict == "unreadable (length)"
    if postprocess in ("evalplus", "diffucoder"):
        assert by_name["attributes"].verdict == "unreadable (RecursionError)"
        assert by_name["attributes"].metrics == {"base": 0.0, "plus": 0.0}
    assert set(benchmark.answers(texts)) == set(texts)
    assert len(list(benchmark.samples(texts))) == len(texts)


TEXTS = {
    "digits": "#### " + "1" * 300_000,
    "a lone surrogate": "#### \ud800",
    "too long": "1" * (bounded.MAX_CHARACTERS + 1),
}
PRIMARY = {"minigsm": "exact_match,strict-match", "miniread": "exact,strict-match"}


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of their own, with few CPU seconds for each text."""
    monkeypatch.setattr(bounded, "_IDLE", [])
    start = f"from dllm_bench.benchmarks import bounded as b; b.MAX_CPU_S = {CPU_S}; b.serve()"
    monkeypatch.setattr(bounded, "START", start)


@pytest.mark.usefixtures("short_time")
@pytest.mark.parametrize("task", PRIMARY)
def test_a_text_that_cannot_be_read_is_wrong(task: str) -> None:
    benchmark = lm_eval_benchmark(task, PRIMARY[task], limit=len(TEXTS))
    texts = {item["id"]: text for item, text in zip(benchmark.items, TEXTS.values(), strict=True)}
    scores = benchmark.score(texts)
    assert [score.value for score in scores.values()] == [0.0] * len(TEXTS)
    by_name = dict(zip(TEXTS, scores.values(), strict=True))
    assert by_name["a lone surrogate"].verdict == "unreadable (characters)"
    assert by_name["too long"].verdict == "unreadable (length)"
    assert len({frozenset(score.metrics) for score in scores.values()}) == 1
    if task == "minigsm":
        assert by_name["digits"].verdict == "unreadable (time)"


def endless(text: str) -> bool:
    """Match a pattern whose time doubles with each letter."""
    return bool(re.fullmatch(r"(a|aa|a?a)+b", text))


def ends_its_process(text: str) -> None:
    """End the process as a stack overflow does."""
    os.kill(os.getpid(), int(text))


def needs_memory(text: str) -> int:
    """Allocate more than a reader may have."""
    return len(bytearray(int(text)))


def lacks_a_package(text: str) -> None:
    """Import what is not installed."""
    raise ModuleNotFoundError(text)


def length(text: str) -> int:
    """Return the number of characters."""
    return len(text)


def process(text: str) -> int:
    """Return the process that reads."""
    return os.getpid()


@pytest.mark.usefixtures("short_time")
def test_seconds_memory_and_nesting_are_bounded_in_any_thread() -> None:
    reasons: dict[str, str] = {}

    def read(name: str, text: str) -> None:
        with pytest.raises(UnreadableAnswerError) as raised:
            call_bounded(globals()[name], text)
        reasons[name] = raised.value.reason

    cases = (("endless", "a" * 80), ("ends_its_process", "11"), ("needs_memory", str(2**40)))
    threads = [threading.Thread(target=read, args=case) for case in cases]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 60
    expected = {"endless": "time", "ends_its_process": "nesting", "needs_memory": "MemoryError"}
    assert reasons == expected
    assert call_bounded(length, "abc") == 3


@pytest.mark.usefixtures("short_time")
def test_one_process_reads_all_texts() -> None:
    assert len({call_bounded(process, str(i)) for i in range(5)}) == 1


@pytest.mark.usefixtures("short_time")
def test_a_fault_of_the_machine_is_no_wrong_answer() -> None:
    with pytest.raises(DllmBenchError, match="ModuleNotFoundError: sympy"):
        call_bounded(lacks_a_package, "sympy")
    with pytest.raises(DllmBenchError, match="ended from outside"):
        call_bounded(ends_its_process, "9")


@pytest.mark.usefixtures("short_time")
def test_math_verify_has_a_limit_in_every_thread() -> None:
    ended: list[str] = []

    def verify() -> None:
        try:
            ended.append(str(math_answers.verified("$3$", "$9^{9^{9^{9}}}$")))
        except UnreadableAnswerError as error:
            ended.append(error.reason)

    thread = threading.Thread(target=verify, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert ended


@pytest.mark.parametrize(
    "part", ["a", "$", "\\text{", "\\textbf{", "\\boxed{", "sqrt[", "\\frac", "$\n", "sqrt[3]", "}"]
)
def test_the_normal_forms_take_linear_time(part: str) -> None:
    started = time.process_time()
    text = part * (200_000 // len(part))
    math_answers.plain(text)
    math_answers.loose(text)
    assert time.process_time() - started < 2


def test_long_numbers_are_read_within_bounds() -> None:
    doc = {"category": "operation", "rule_id": "23", "index": "5", "answer": "[[1]]"}
    with pytest.raises(UnreadableAnswerError, match="ValueError"):
        call_bounded(score_korbench, "[[" + "1" * 100_000 + "]]", doc)


def score_korbench(text: str, doc: korbench.Doc) -> dict[str, float]:
    """KOR-Bench's score, with the text first."""
    return korbench.score(doc, [text])
