"""Compare a function with a reference on given inputs, inside a sandboxed child.

This is a program for `execution.execute`, which calls its `main`; it is never imported. Expected
values come from the reference solution, which runs here first, or are given where there is none. As
in EvalPlus, a result is right if it equals the expected one, or is close to it where the problem
gives a tolerance (relative 1e-7, absolute `atol`, 1e-6 for floats without one), or satisfies the
problem's own rule (`RULES`: sets, several right answers). `main` reports (stage, verdict, detail)
for each stage; a stage ends at its first wrong result.
"""

from __future__ import annotations

import marshal
import math
import os
import signal
import sys
import time

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Rule = Callable[[Any, Any, Sequence[Any], float], bool]
    Case = tuple[Sequence[Any], Any, float]  # inputs, expected result, seconds of the reference

RTOL = 1e-7
FLOAT_ATOL = 1e-6


class OutOfTime(BaseException):
    """A call used up its CPU time."""


def is_floats(value: Any) -> bool:
    """Whether a value is a float or a non-empty sequence of floats."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(v, float) for v in value)
    return isinstance(value, float) or str(getattr(value, "dtype", "")).startswith("float")


def close(got: Any, want: Any, atol: float) -> bool:
    """Element-wise |got - want| <= atol + RTOL * |want| over numbers and nested sequences."""
    if hasattr(want, "tolist"):
        got, want = got.tolist(), want.tolist()
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(close, got, want, [atol] * len(want)))
    if got == want:
        return True
    return abs(got - want) <= atol + RTOL * abs(want)


def equal(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """The usual rule: equality, else closeness within a tolerance if there is one."""
    same = got == want
    if hasattr(same, "all"):
        same = bool(same.all())
    tolerance = atol or (FLOAT_ATOL if is_floats(want) else 0)
    if same or not tolerance:
        return bool(same)
    return type(got) is type(want) and close(got, want, tolerance)


def same_value(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Equality without tolerance; a tuple equals the list of its members."""
    return as_lists(got) == want


def as_lists(value: Any) -> Any:
    """The value with lists in place of tuples, as JSON has them."""
    return [as_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def same_set(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Equality of sets: order and repetition do not count."""
    return set(got) == set(want)


def same_presence(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Only whether there is a result counts, not which (regular expression tasks)."""
    return (
        got == (want is not None)
        if isinstance(got, bool)
        else (got is not None) == (want is not None)
    )


def anything(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Always right: the problem has no answer that can be checked."""
    return True


def equal_or_zero(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Equality, or the result zero."""
    return got == 0 or equal(got, want, inputs, atol)


def root(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """The result is a zero of the polynomial with coefficients inputs[0] (constant first)."""
    return abs(sum(c * math.pow(got, i) for i, c in enumerate(inputs[0]))) <= atol


def pyramid_surface(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Equality, or the area if the height is read as that of the apex over the base."""
    base, height = inputs
    area = round(base**2 + 2 * base * math.sqrt((base / 2) ** 2 + height**2))
    return abs(got - area) <= atol or equal(got, want, inputs, atol)


def digit_distance(got: Any, want: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Equality, or the distance if the numbers are padded with zeros to the same width."""
    one, two = map(str, inputs)
    width = max(len(one), len(two))
    pairs = zip(one.zfill(width), two.zfill(width), strict=True)
    return got == sum(abs(int(a) - int(b)) for a, b in pairs) or equal(got, want, inputs, atol)


RULES: dict[str, Rule] = {
    f.__name__: f
    for f in (
        equal, same_value, same_set, same_presence, anything, equal_or_zero, root, pyramid_surface,
        digit_distance,
    )
}  # fmt: skip


def out_of_time(signum: int, frame: object) -> None:
    """Signal handler of the CPU timer."""
    raise OutOfTime


def timed(function: Callable[..., Any], inputs: Sequence[Any], limit_s: float) -> tuple[Any, float]:
    """(result, CPU seconds) of one call; OutOfTime after `limit_s` CPU seconds."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    began = time.process_time()
    try:
        return function(*inputs), time.process_time() - began
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def load(source: str | bytes, entry_point: str) -> Callable[..., Any]:
    """The function that a program defines, or a method of its class `Solution`."""
    space: dict[str, Any] = {"__name__": "__solution__"}
    exec(compile(source, "<solution>", "exec", dont_inherit=True), space)
    owner, _, method = entry_point.rpartition(".")
    function: Callable[..., Any] = getattr(space[owner](), method) if owner else space[method]
    return function


def judge(
    function: Callable[..., Any], rule: Rule, cases: Sequence[Case], payload: dict[str, Any]
) -> tuple[str, str]:
    """(passed, timeout, memory or failed; the first reason) over the cases of a stage."""
    for i, (inputs, want, seconds) in enumerate(cases):
        try:
            limit_s = max(payload["min_time_s"], payload["time_factor"] * seconds)
            got, _ = timed(function, inputs, limit_s)
            if not rule(got, want, inputs, payload["atol"]):
                return "failed", f"wrong result for input {i}"
        except OutOfTime:
            return "timeout", f"input {i}"
        except MemoryError:
            return "memory", f"input {i}"
        except BaseException as error:
            return "failed", f"{type(error).__name__} for input {i}"
    return "passed", ""


def expected(payload: dict[str, Any]) -> dict[str, list[Case]]:
    """Stage -> [(inputs for the solution, expected result, CPU seconds of the reference)].

    Inputs are loaded twice: a function may change its arguments. Without a reference the stages
    hold (inputs, result) and every call may take `min_time_s`.
    """
    if payload["reference"] is None:
        given = marshal.loads(payload["stages"])
        return {name: [(args, want, 0.0) for args, want in given[name]] for name in given}
    reference = load(payload["reference"], payload["entry_point"])
    used, fresh = (marshal.loads(payload["stages"]) for _ in range(2))
    return {
        name: [
            (again, *timed(reference, inputs, payload["reference_s"]))
            for inputs, again in zip(used[name], fresh[name], strict=True)
        ]
        for name in used
    }


def main(payload: dict[str, Any], report: Callable[..., None]) -> None:
    """Work out the expected values, then run the solution; everything printed is discarded."""
    signal.signal(signal.SIGPROF, out_of_time)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.set_int_max_str_digits(0)
    stages = expected(payload)
    report("reference", "passed", "")
    try:
        function = load(payload["solution"], payload["entry_point"])
    except BaseException as error:
        report("load", "failed", type(error).__name__)
        return
    for name, cases in stages.items():
        report(name, *judge(function, RULES[payload["rule"]], cases, payload))
