"""Run tests that need objects of the judged program, a statement at a time, in its own process.

This program runs in the supervisor's process (`execution.examine`) and keeps the expected values
here: of `assert EXPRESSION == LITERAL` the judged process gets the expression alone and sends its
value. Other statements, which prepare the tests, run there as they are.
"""

from __future__ import annotations

from dllm_bench.benchmarks.sandbox.child.supervise import AnswerError

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from dllm_bench.benchmarks.sandbox.child.supervise import JudgedProcess


def main(
    payload: Sequence[tuple[str, tuple[Any, ...]]],
    report: Callable[..., None],
    answer: JudgedProcess,
) -> tuple[str, str]:
    """Load the program, then run the pieces; return (verdict, detail).

    payload: (source, (expected value of this expression,) or () for a statement).
    """
    ended = answer.load(answer.cpu_s)
    if ended[0] != "ended":
        return ended
    try:
        for source, expected in payload:
            mode = "eval" if expected else "exec"
            got = answer.call("", (source, mode), answer.cpu_s)
            if expected and not got == expected[0]:  # noqa: SIM201 (as the test has it)
                return "failed", f"AssertionError: {source}"
    except AnswerError as error:
        failure, detail = error.args
        return failure, detail
    return "passed", ""
