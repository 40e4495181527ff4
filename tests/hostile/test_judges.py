"""No program that only pretends is judged right, and none harms more than itself.

The task is a function `f` with `f(x) == 2 * x + 1`. Every program of `pretending.yaml` tries to be
judged right without solving it, or to break its judge; one without an `f` gets one that returns
None. It is judged in all ways, see `JUDGES`. What a judged process sends arrives as it is, and no
frames pass or break the judge. A sample whose grading fails gets no score, and another try. An
answer that cannot be read is a wrong one with its reason, and soon.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import random
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pytest

from dllm_bench.benchmarks import bounded, sandbox
from dllm_bench.benchmarks.bounded import UnreadableAnswerError, call_bounded
from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.benchmarks.sandbox import Limits, ProgramOutcome
from dllm_bench.benchmarks.sandbox.child import check, codec
from dllm_bench.benchmarks.sandbox.child.answer import LENGTH
from dllm_bench.benchmarks.sandbox.child.codec import HEAD, decode, encode
from dllm_bench.benchmarks.sandbox.child.supervise import FAILURES, AnswerEnded, JudgedProcess
from dllm_bench.benchmarks.tasks import code_scorers, korbench, livecodebench, math_answers
from dllm_bench.core.benchmark import JUDGE_ERROR, SampleScore
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from tests.benchmark_helpers import Bench, evalplus_benchmark, gold, lm_eval_benchmark
from tests.tiers import covering

WRONG = "\ndef f(x):\n    return None\n"
GROUPS = read_yaml(Path(__file__).with_name("pretending.yaml"))
PARTS, TASK = GROUPS.pop("parts"), GROUPS.pop("task")
GROUPS["builtins"] = {
    name: f"import builtins\nbuiltins.{name} = {value}"
    for name, value in GROUPS["builtins"].items()
}
GROUPS["equal"] = {
    name: f"class Same({name}):\n$EQUAL\n\ndef f(x):\n    return Same({given})\n"
    for name, given in GROUPS["equal"].items()
}


def programs(group: str, start: str = "", end: str = "") -> dict[str, str]:
    every = {name: Template(text).substitute(PARTS) for name, text in GROUPS[group].items()}
    return {name: f"{start}{text}{end}" for name, text in every.items()}


def during_call(source: str) -> str:
    """Return a program that runs the statements when it is called."""
    call = "def f(x):\n    exec(SOURCE, globals())\n    import os\n    os._exit(0)\n"
    return f"{call}SOURCE = {source!r}"


CHANNEL = PARTS["CHANNEL"] + "\n"
PROGRAMS: Mapping[str, str] = {
    f"{group}: {name}": source if "def f(" in source else source + WRONG
    for group in ("builtins", "patches", "searches", "channel", "equal", "returns", "forged")
    for name, source in programs(group, CHANNEL if group == "forged" else "").items()
}
SLOW: Mapping[str, str] = programs("slow")
BREAKING: Mapping[str, str] = {
    **{name: CHANNEL + during_call(source) for name, source in programs("breakers").items()},
    **programs("nameless", CHANNEL, WRONG),
}
"""Programs that send what a judge might break over, which must be wrong, not without a grade."""
LIMITS = Limits(cpu_s=1, wall_s=6.0, memory_mb=512)
REFERENCE = TASK["reference"]
STAGES = {"base": [[3], [4]], "plus": [[0.5], [-1]]}
DRILL_S = 8.0


def by_inputs(program: str, **changes: Any) -> ProgramOutcome:
    asked = {"reference": REFERENCE, "entry_point": "f", "min_time_s": 1.0, "time_factor": 4.0}
    return sandbox.examine(program, sandbox.compare_calls(STAGES, {**asked, **changes}), LIMITS)


def by_statements(program: str) -> ProgramOutcome:
    """Judge a program as HumanEval and MBPP are judged."""
    return sandbox.examine(
        program, code_scorers.Tests(TASK["check"], REFERENCE, ("f",)).examiner, LIMITS
    )


def by_pieces(program: str) -> ProgramOutcome:
    """Judge a program as item 367 of MBPP is judged."""
    pieces = code_scorers.Tests(TASK["pieces"], REFERENCE).pieces
    examiner = sandbox.Examiner("check", {"pieces": pieces})
    return sandbox.examine(program, examiner, LIMITS)


def by_output(program: str) -> ProgramOutcome:
    """Judge a program as LiveCodeBench judges those that read standard input."""
    outcome = sandbox.execute(f"{program}\nprint(f(int(input())))\n", LIMITS, "4\n")
    right = outcome.verdict == "ended" and livecodebench.same_output(outcome.stdout, "9\n")
    return replace(outcome, verdict="passed") if right else outcome


CALLS = {"inputs": by_inputs, "statements": by_statements, "pieces": by_pieces}
JUDGES = {**CALLS, "output": by_output}


@pytest.mark.parametrize("judge", JUDGES)
def test_the_reference_is_judged_right(judge: str) -> None:
    assert JUDGES[judge](REFERENCE).verdict == "passed"
    block = f"{REFERENCE}\nif __name__ == '__main__':\n    raise SystemExit\n"
    assert (JUDGES[judge](block).verdict == "passed") == (judge in CALLS)


@pytest.mark.parametrize(("name", "judge"), covering(9, product(PROGRAMS, JUDGES), often=5))
def test_no_pretending_program_is_judged_right(name: str, judge: str) -> None:
    began = time.monotonic()
    outcome = JUDGES[judge](f"{REFERENCE}\n{PROGRAMS[name]}")
    assert outcome.verdict not in ("passed", "judge_error")
    assert "base" not in {words[0] for words in outcome.reports if words[1:2] == ("passed",)}
    assert time.monotonic() - began < DRILL_S


@pytest.mark.parametrize(("name", "judge"), covering(7, product(BREAKING, CALLS), often=5))
def test_what_cannot_be_read_is_wrong_and_not_without_a_grade(name: str, judge: str) -> None:
    began = time.monotonic()
    outcome = CALLS[judge](f"{REFERENCE}\n{BREAKING[name]}")
    assert outcome.verdict not in ("passed", "ended", "judge_error")
    assert time.monotonic() - began < DRILL_S


def test_a_comparison_without_end_is_wrong() -> None:
    """The kernel ends the judging process inside of one call of C; that is no fault of its own."""
    colliding = "def f(x):\n    return [i * (2**61 - 1) for i in range(200_000)]"
    outcome = by_inputs(colliding, rule="same_set", reference="def f(x):\n    return [x]")
    assert outcome.verdict == "failed"
    assert outcome.detail == "its results took too much to read or compare (SIGXCPU)"
    helper = REFERENCE.replace("x + 1", "x + 1 if x else 1")
    tests = code_scorers.Tests("assert set(f(3)) == {7}", helper, ("f",))
    assert sandbox.examine(colliding, tests.examiner, LIMITS).verdict == "failed"


@pytest.mark.parametrize("body", ["return 1 / 0", "while True: pass", "time.sleep(9)"])
def test_a_judge_that_breaks_by_itself_gives_no_grade(body: str, monkeypatch) -> None:
    """Before anything is read of the program: its reference does not run to its end."""
    monkeypatch.setattr(sandbox, "BACKSTOP_S", 3 - LIMITS.wall_s)
    reference = f"import time\ndef f(x):\n    {body}"
    assert by_inputs(REFERENCE, reference=reference).verdict == "judge_error"


@pytest.mark.parametrize("judge", ["inputs", "statements"])
@pytest.mark.parametrize("name", covering(5, SLOW))
def test_time_is_bounded_asleep_or_not(name: str, judge: str) -> None:
    outcome = JUDGES[judge](f"{REFERENCE}\n{SLOW[name]}\n")
    assert outcome.verdict == "timeout" and outcome.seconds < DRILL_S


# --- frames of a judged process: values arrive as they are, none pass or break the judge ----------

EXACT: list[Any] = [
    None, True, False, 0, -1, 255, -(10**50), 10**400, 1.5, -0.0, math.inf, 2j, "", "ä\ud800\n",
    b"\0", bytearray(b"y"), [], [1, [2.0, None]], (1,), {"2"}, frozenset({3}), {"a": [1], 2: ()},
    range(1, 9, 2), Fraction(1, 3),
]  # fmt: skip


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_builtin_values_arrive_as_they_are(value: Any) -> None:
    found = decode(encode(value))
    assert type(found) is type(value) and found == value and repr(found) == repr(value)


HOLDING = [(Counter("aab"), {"a": 2, "b": 1}), (OrderedDict(x=1), {"x": 1})]
HOLDING += [(np.float64(0.5), codec.OtherFloat(0.5)), (np.int64(3), 3)]
HOLDING += [(Decimal("0.5"), Fraction(1, 2))]


@pytest.mark.parametrize(("value", "arrives"), HOLDING)
def test_other_values_arrive_as_what_they_hold(value: Any, arrives: Any) -> None:
    found = decode(encode(value))
    assert (type(found), found) == (type(arrives), arrives)


def test_what_is_no_value_equals_nothing() -> None:
    assert list(decode(encode(iter("ab")))) == list(decode(encode(deque("ab")))) == ["a", "b"]
    assert isinstance(decode(encode(object())), codec.Opaque)
    array = decode(encode(np.eye(2)))
    assert isinstance(array, codec.Array) and array.members == [[1, 0], [0, 1]]
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(codec.UnreadableValueError, match="too deeply"):
        encode(endless)
    with pytest.raises(codec.UnreadableValueError):
        decode(b"l\0\0\0\1" * 1000)


# --- a fuzz of frames -----------------------------------------------------------------------------

SECRET = "what the judged process does not know"
RULES = ("equal", "same_value", "same_set")
ENDINGS = {*FAILURES, "timeout", "crashed"}
VALUES: list[Any] = [*EXACT, math.nan, iter([1]), object()]
KINDS: list[Any] = "value passed ended failed memory refused judge_error end".split()
KINDS += ["", b"passed", 1]
TAGS = b"NbifFcsyBoltSzdarqI?\0"


class FrameSource(JudgedProcess):
    """A judged process that has sent some bytes and ended well; its frames may come early."""

    def stop(self, grace_s: float = 0.0) -> int:
        return 0

    def _send(self, data: bytes) -> None: ...

    def _refuse_early(self) -> None: ...

    def _clock(self) -> tuple[float, float]:
        return 0.0, 0.0


@contextmanager
def sent(data: bytes) -> Iterator[FrameSource]:
    results, write = os.pipe()
    os.write(write, data)
    os.close(write)
    yield FrameSource(0, -1, results, -1, {"cpu_s": 1.0, "wall_s": 60.0})
    os.close(results)


def random_value(rng: random.Random) -> bytes:
    """Return a tree of tags with random lengths and contents, mostly of the right form."""
    tag, count = bytes([rng.choice(TAGS)]), rng.choice([0, 1, 2, 3, 8, 2**32 - 1])
    if tag in b"ltSzdarqI":
        return HEAD.pack(tag, count) + b"".join(random_value(rng) for _ in range(min(count, 3)))
    return HEAD.pack(tag, count) + rng.randbytes(min(count, 16))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, taken out or repeated."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 1 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at:end]
            case _:
                changed[at:at] = changed[at:end]
    return bytes(changed[:4096])


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH, "big") + data


def streams(rng: random.Random) -> Iterator[bytes]:
    """Endless bytes of one or two frames: well formed, random inside, and damaged anywhere."""
    whole = [encode((kind, value)) for kind in KINDS for value in VALUES]
    whole += [encode((kind, "", [])) for kind in KINDS]
    while True:
        content = rng.choice(whole)
        yield framed(content) + framed(rng.choice(whole))
        yield framed(mutated(rng, content))
        yield mutated(rng, framed(content))
        yield framed(encode(("value",))[:-4] + random_value(rng))
        yield framed(HEAD.pack(b"t", 2) + encode(rng.choice(KINDS)) + random_value(rng))
        yield framed(random_value(rng))
        yield rng.randbytes(rng.randrange(64))


def judged(data: bytes, rule: str) -> tuple[str, str]:
    """(verdict, detail) of the bytes in place of the results of two calls."""
    payload = {"rule": rule, "entry_point": "f", "atol": 0.0}
    with sent(data) as source:
        return check.judge(source, [([3], SECRET, 0.0), ([4], SECRET, 0.0)], [1.0, 1.0], payload)


def loaded(data: bytes) -> tuple[str, str]:
    """(ending, detail) of the bytes in place of the word that the program has ended."""
    with sent(data) as source:
        try:
            return source.load(1.0)
        except AnswerEnded as error:
            failure, detail = error.args
            return failure, detail


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.drill)])
def test_no_frames_pass_and_none_break_the_judge(count: int) -> None:
    source, seen = streams(random.Random(count)), set()
    for index in range(count):
        data = next(source)
        verdict, detail = judged(data, RULES[index % len(RULES)])
        assert verdict in ENDINGS, (data, verdict)
        ending, why = loaded(data)
        assert ending in {*ENDINGS, "ended"}, (data, ending)
        assert type(detail) is type(why) is str and len(detail) < 300
        seen.add(ending)
    assert seen >= {*FAILURES, "ended"}


def test_the_right_values_pass_the_same_way() -> None:
    assert judged(framed(encode(("value", SECRET))) * 2, "equal") == ("passed", "")
    assert loaded(framed(encode(("ended", "", ["f"])))) == ("ended", "")


# --- samples whose grading fails ------------------------------------------------------------------

SETTINGS = "benchmark.max_new_tokens=32 benchmark.allow_code_execution=true"
RUN = f"run model=tiny-llada benchmark=minicode limit=2 {SETTINGS}"
BROKEN = ProgramOutcome("judge_error", "", 0.0, "the process that judges ended with status -9")


def break_judge(patch: pytest.MonkeyPatch, where: Callable[[int, str], bool]) -> None:
    """Let the judge break where a condition of the number of the call and of the program holds."""
    whole, calls = sandbox.examine, itertools.count()

    def examine(program: str, *args: Any) -> ProgramOutcome:
        return BROKEN if where(next(calls), program) else whole(program, *args)

    patch.setattr(sandbox, "examine", examine)


def test_a_broken_judge_gives_no_score_to_its_own_sample_alone(monkeypatch) -> None:
    benchmark = evalplus_benchmark("minicode", limit=4)
    texts = gold(benchmark)
    victim = next(iter(texts))
    texts[victim] = "    return 'victim'\n"
    break_judge(monkeypatch, lambda call, program: "victim" in program)
    scores = benchmark.score(texts)
    assert scores.pop(victim).verdict == "judge_error"
    assert {score.verdict for score in scores.values()} == {"correct"}


def test_a_run_seals_within_the_limit_and_grades_again(monkeypatch, tmp_path, command) -> None:
    break_judge(monkeypatch, lambda call, program: call % 2 == 0)
    error = command(RUN, code=2)
    assert "At most 0 samples may fail to be graded and grading failed for 1 of 2" in error
    with monkeypatch.context() as patch:
        break_judge(patch, lambda call, program: True)
        error = command(f"{RUN} max_judge_errors=null", code=2)
    assert "At least one sample must be graded and grading failed for 2" in error
    assert not list(tmp_path.glob("runs/**/record.json"))
    (texts,) = tmp_path.glob("runs/**/samples.jsonl")
    assert len(texts.read_text().splitlines()) == 2
    shown = command(f"{RUN} --max-judge-errors 1")
    assert "judge_error 1" in shown and "n = 1, 1 not graded)" in shown
    monkeypatch.undo()
    assert "judge_error 1" in command(RUN)
    assert "n = 1)" in command(f"{RUN} --retry-errors limit=1"), "of the items that were asked for"
    assert "judge_error" not in command(f"{RUN} --retry-errors")
    assert "not graded" not in command(RUN)


def test_grading_again_replaces_no_grade_by_none(monkeypatch, tmp_path, command) -> None:
    command(RUN)
    (record,) = tmp_path.glob("runs/**/record.json")
    before = record.read_bytes()
    break_judge(monkeypatch, lambda call, program: call == 0)
    name = record.parent.name.rpartition("-")[2]
    said = command(f"rescore {name} allow_code_execution=true", code=2)
    assert "grading failed for 1 of 2" in said and record.read_bytes() == before


@pytest.mark.parametrize("ends", ["exit 125", "exec sleep 60"])
def test_a_container_tool_that_does_not_work_is_an_error(
    ends, monkeypatch, tmp_path, command
) -> None:
    """The tool is there and its service is not, or hangs; what it says stands in the error."""
    tool = tmp_path / "docker"
    tool.write_text(f"#!/bin/sh\necho Cannot connect to the Docker daemon. >&2\n{ends}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sandbox, "KILL_S", 0.1)
    monkeypatch.setattr(sandbox, "BACKSTOP_S", -8.0)  # the wall time is 10 s
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, "docker")
    sandbox.container_tool.cache_clear()
    assert "Cannot connect to the Docker daemon" in command(RUN, code=2)
    assert not list(tmp_path.glob("runs/**/record.json"))
    assert list(tmp_path.glob("runs/**/samples.jsonl"))
    sandbox.container_tool.cache_clear()


# --- answers that cannot be read ------------------------------------------------------------------

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
        ("MemoryError", call_bounded, exec, "bytearray(2**40)"),
        ("time or False", math_answers.verified, "$9^{9^{9^{9}}}$", "$3$"),  # it has two limits
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
    with pytest.raises(DllmBenchError, match="TypeError.*dllm-bench needs"):
        call_bounded(operator.index, "7")
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
