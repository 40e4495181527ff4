"""Run tests that are Python statements on a judged program.

This program runs in the supervisor's process (`execution.examine`), where expected values stay. The
tests run here: a function of the judged program is replaced by one that sends its arguments there
and gives back the result. Other names that a test uses (helper functions) come from the reference
solution, and must be defined by the judged program too. Tests that need objects of the judged
program run there, a statement at a time: of `assert EXPRESSION == LITERAL` it gets the expression
alone and sends its value, and other statements, which prepare the tests, run as they are.
"""

from __future__ import annotations

from dllm_bench.benchmarks.sandbox.child.answer import execute, failure
from dllm_bench.benchmarks.sandbox.child.supervise import AnswerEnded, AnswerError

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from dllm_bench.benchmarks.sandbox.child.supervise import JudgedProcess


def remote(answer: JudgedProcess, name: str) -> Callable[..., Any]:
    """Return a function that is called in the judged process."""

    def call(*inputs: Any) -> Any:
        return answer.call(name, inputs, answer.cpu_s)

    return call


def main(
    payload: dict[str, Any], report: Callable[..., None], answer: JudgedProcess
) -> tuple[str, str]:
    """Load the program, then run the tests, or their `pieces` there; return (verdict, detail)."""
    ended = answer.load(answer.cpu_s)
    if ended[0] != "ended":
        return ended
    return run_there(payload["pieces"], answer) if "pieces" in payload else run(payload, answer)


def run(payload: dict[str, Any], answer: JudgedProcess) -> tuple[str, str]:
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
        failure, detail = error.args
        return failure, detail
    return "passed", ""
