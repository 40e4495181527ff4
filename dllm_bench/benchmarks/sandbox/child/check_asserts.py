"""Run tests that are Python statements, with the functions they test in a judged process.

This program runs in the supervisor's process (`execution.examine`). The tests keep their expected
values here: a function of the judged program is replaced by one that sends its arguments there and
gives back the result. Other names that a test uses (helper functions) come from the reference
solution, and must be defined by the judged program too.
"""

from __future__ import annotations

from dllm_bench.benchmarks.sandbox.child.answer import execute, failure
from dllm_bench.benchmarks.sandbox.child.supervise import AnswerEnded, AnswerError

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
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
    """Load the program, then run the tests; return (verdict, detail)."""
    ended = answer.load(answer.cpu_s)
    if ended[0] != "ended":
        return ended
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
