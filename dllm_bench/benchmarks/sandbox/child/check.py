"""Judge a program by what calls of its functions return, or by tests that are Python statements.

This program runs in the supervisor's process (`sandbox.examine`), where expected values stay.
`main` judges by what its payload holds.

A function is compared with a reference on given inputs. Expected values come from the reference
solution, which runs here, or are given where there is none. They and the results of the judged
process have passed through `codec`, so that only builtin values are compared. As in EvalPlus, a
result is right if it equals the expected one, or is close to it where the problem gives a tolerance
(relative 1e-7, absolute `atol`, 1e-6 for floats without one), or satisfies the problem's own rule
(`RULES`: sets, several right answers). It reports (stage, verdict, detail) for each stage up to the
first one that does not pass.

Tests run here: a function of the judged program is replaced by one that sends its arguments there
and gives back the result. Other names that a test uses (helper functions) come from the reference
solution, and must be defined by the judged program too. Tests that need objects of the judged
program run there, a statement at a time: of `assert EXPRESSION == LITERAL` it gets the expression
alone and sends its value, and other statements, which prepare the tests, run as they are.
"""

from __future__ import annotations

import marshal
import sys
import time

from dllm_bench.benchmarks.sandbox.child.answer import execute, failure, find
from dllm_bench.benchmarks.sandbox.child.codec import decode, encode
from dllm_bench.benchmarks.sandbox.child.supervise import AnswerEnded, AnswerError

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from dllm_bench.benchmarks.sandbox.child.supervise import JudgedProcess

    Rule = Callable[[Any, Any, Sequence[Any], float], bool]
    Case = tuple[Sequence[Any], Any, float]  # inputs, expected result, seconds of the reference

RTOL = 1e-7
FLOAT_ATOL = 1e-6
INFINITY = float("inf")


TASK_S = 60.0
"""EvalPlus's limit for all calls of a problem, where those of the calls are not less."""


def is_floats(value: Any) -> bool:
    """Return whether a value is a float or a non-empty sequence of floats."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(v, float) for v in value)
    return isinstance(value, float)


def close(got: Any, want: Any, atol: float) -> bool:
    """Return whether |got - want| <= atol + RTOL * |want| holds element by element;
    nothing is close to an infinity."""
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(close, got, want, [atol] * len(want)))
    if got == want:
        return True
    return abs(got - want) <= atol + RTOL * abs(want) < INFINITY


def equal(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Apply the usual rule: equality, else closeness within a tolerance if there is one."""
    same: bool = got == want
    tolerance = atol or (FLOAT_ATOL if is_floats(want) else 0)
    if same or not tolerance:
        return same
    return type(got) is type(want) and close(got, want, tolerance)


def as_lists(value: Any) -> Any:
    """Return the value with lists in place of tuples, as JSON has them."""
    return [as_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def root(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Return whether the result is a zero of the polynomial with coefficients inputs[0] (constant
    first)."""
    from math import pow  # not needed by most programs

    return abs(sum(c * pow(got, i) for i, c in enumerate(inputs[0]))) <= atol


def pyramid_surface(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Accept an equal result, or the area if the height is read as that of the apex over the
    base."""
    from math import sqrt

    base, height = inputs
    area = round(base**2 + 2 * base * sqrt((base / 2) ** 2 + height**2))
    return abs(got - area) <= atol or equal(got, want, inputs, atol)


def digit_distance(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Accept an equal result, or the distance if the numbers are padded with zeros to the same
    width."""
    one, two = map(str, inputs)
    width = max(len(one), len(two))
    pairs = zip(one.zfill(width), two.zfill(width), strict=True)
    return got == sum(abs(int(a) - int(b)) for a, b in pairs) or equal(got, want, inputs, atol)


RULES: dict[str, Rule] = {
    "equal": equal,
    # without tolerance; a tuple equals the list of its members
    "same_value": lambda got, want, inputs, atol: as_lists(got) == want,
    # order and repetition do not count
    "same_set": lambda got, want, inputs, atol: set(got) == set(want),
    # only whether there is a result (regular expression tasks)
    "same_presence": lambda got, want, inputs, atol: (
        (got if isinstance(got, bool) else got is not None) == (want is not None)
    ),
    # the problem has no answer that can be checked
    "anything": lambda got, want, inputs, atol: True,
    "equal_or_zero": lambda got, want, inputs, atol: got == 0 or equal(got, want, inputs, atol),
    "root": root,
    "pyramid_surface": pyramid_surface,
    "digit_distance": digit_distance,
}


def load(source: str, entry_point: str) -> Callable[..., Any]:
    """Return the function that the reference solution defines."""
    space: dict[str, Any] = {"__name__": "__solution__"}
    error = execute(source.encode(), space)
    if error is not None:
        raise error
    return find(space, entry_point)


def expected(payload: dict[str, Any]) -> dict[str, list[Case]]:
    """Return stage -> [(inputs for the solution, expected result, CPU seconds of the reference)].

    Inputs are loaded twice: a function may change its arguments. Without a reference the stages
    hold (inputs, result) and every call may take `min_time_s`.
    """
    if payload["reference"] is None:
        given = marshal.loads(payload["stages"])
        return {name: [(args, want, 0.0) for args, want in given[name]] for name in given}
    reference = load(payload["reference"], payload["entry_point"])
    used, fresh = (marshal.loads(payload["stages"]) for _ in range(2))
    cases: dict[str, list[Case]] = {}
    for name in used:
        cases[name] = []
        for inputs, again in zip(used[name], fresh[name], strict=True):
            began = time.process_time()
            want = reference(*inputs)
            # as it would come from a judged process
            cases[name].append((again, decode(encode(want)), time.process_time() - began))
    return cases


def judge(
    answer: JudgedProcess, cases: Sequence[Case], limits_s: Sequence[float], payload: dict[str, Any]
) -> tuple[str, str]:
    """Return (verdict, detail) of the results for the cases of a stage, in order."""
    rule, done = RULES[payload["rule"]], 0
    try:
        results = answer.calls(payload["entry_point"], [case[0] for case in cases], limits_s)
        for got, (inputs, want, _) in zip(results, cases, strict=True):
            if not rule(got, want, inputs, payload["atol"]):
                return "failed", f"wrong result for input {done}"
            done += 1
    except (AnswerError, AnswerEnded) as error:
        verdict, detail = error.args
        return verdict, f"{detail} for input {done}"
    except Exception as error:  # a result that the rule cannot be applied to
        return "failed", f"{type(error).__name__} for input {done}"
    return "passed", ""


def compare_function(
    payload: dict[str, Any], report: Callable[..., None], answer: JudgedProcess
) -> tuple[str, str]:
    """Compute the expected values, compare the solution's results, and return (verdict, detail)."""
    sys.set_int_max_str_digits(0)
    stages = expected(payload)
    limits_s = {
        name: [max(payload["min_time_s"], payload["time_factor"] * case[2]) for case in cases]
        for name, cases in stages.items()
    }
    answer.patience_s = min(TASK_S, sum(map(sum, limits_s.values()))) + 1
    try:
        ended = answer.load(answer.cpu_s)
    except AnswerEnded as error:
        ended = error.args
    report("load", *ended)
    for name, cases in stages.items():
        if ended[0] in ("ended", "passed"):
            ended = judge(answer, cases, limits_s[name], payload)
            report(name, *ended)
    return ended


# --- tests ---------------------------------------------------------------------------------------


def remote(answer: JudgedProcess, name: str) -> Callable[..., Any]:
    """Return a function that is called in the judged process."""

    def call(*inputs: Any) -> Any:
        return answer.call(name, inputs, answer.cpu_s)

    return call


def run_tests(payload: dict[str, Any], answer: JudgedProcess) -> tuple[str, str]:
    """Run the tests here, with functions that are called in the judged process."""
    missing = sorted(set(payload["names"]) - set(answer.names))
    if missing:
        return "failed", f"NameError: name {missing[0]!r} is not defined"
    space: dict[str, Any] = {"__name__": "__main__"}
    execute(payload["reference"].encode(), space)
    space.update((name, remote(answer, name)) for name in payload["tested"])
    error = execute(payload["tests"].encode(), space)
    error = answer.stopped or error  # whatever the tests make of it
    if isinstance(error, AnswerError | AnswerEnded):
        return error.args
    return ("passed", "") if error is None else failure(error)


def run_there(
    pieces: Sequence[tuple[str, tuple[Any, ...]]], answer: JudgedProcess
) -> tuple[str, str]:
    """Run the pieces in the judged process.

    pieces: (source, (expected value of this expression,) or () for a statement).
    """
    try:
        for source, expected in pieces:
            mode = "eval" if expected else "exec"
            got = answer.call("", (source, mode), answer.cpu_s)
            if expected and not got == expected[0]:  # noqa: SIM201 (as the test has it)
                return "failed", f"AssertionError: {source}"
    except AnswerError as error:
        return error.args
    return "passed", ""


def main(
    payload: dict[str, Any], report: Callable[..., None], answer: JudgedProcess
) -> tuple[str, str]:
    """Compare a function with a reference, or load the program and run tests, or their `pieces`
    there; return (verdict, detail).
    """
    if "stages" in payload:
        return compare_function(payload, report, answer)
    ended = answer.load(answer.cpu_s)
    if ended[0] != "ended":
        return ended
    if "pieces" in payload:
        return run_there(payload["pieces"], answer)
    return run_tests(payload, answer)
