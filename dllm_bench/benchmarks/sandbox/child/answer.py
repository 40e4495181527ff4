"""The judged side of a sandboxed child: run a model's program and send what its calls return.

This process contains the program and its inputs, but never an expected value or a verdict, so a
malicious program can only change what is sent. Everything that goes out is a frame (length, then a
value in the form of `codec`): the isolation steps taken, how the program ended, and one result per
call. `supervise` is the receiver.
"""

from __future__ import annotations

import errno
import marshal
import os
import sys

from dllm_bench.benchmarks.sandbox.child.codec import encode

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DENIED = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS)
LENGTH = 8
"""Bytes in front of a frame."""
DETAIL = 200
"""Characters of an error that are kept."""


def send(channel: int, value: object) -> None:
    """Write one frame."""
    data = encode(value)
    data = len(data).to_bytes(LENGTH, "big") + data
    while data:
        data = data[os.write(channel, data) :]


def receive(channel: int) -> bytes:
    """Read one frame's content; empty at the end."""
    parts, missing = [], int.from_bytes(os.read(channel, LENGTH), "big")
    while missing:
        parts.append(os.read(channel, missing))
        missing -= len(parts[-1])
    return b"".join(parts)


def failure(error: BaseException) -> tuple[str, str]:
    """Return (failure of `sandbox.ProgramVerdict`, what happened) of a program that raised
    `error`."""
    if isinstance(error, MemoryError):
        return "memory", ""
    denied = isinstance(error, OSError) and error.errno in DENIED
    return "refused" if denied else "failed", f"{type(error).__name__}: {error}"[:DETAIL]


def execute(source: bytes, space: dict[str, Any]) -> BaseException | None:
    """Run the program in `space`; returns the exception it ended with."""
    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), space)
    except BaseException as error:
        return error
    return None


def find(space: dict[str, Any], name: str) -> Callable[..., Any]:
    """Return the function of this name, or the method of a new object for `Class.method`."""
    owner, _, method = name.rpartition(".")
    function: Callable[..., Any] = getattr(space[owner](), method) if owner else space[method]
    return function


def attempt(function: Callable[..., Any], *inputs: Any) -> tuple[str, Any]:
    """Return ("value", result) of one call, or the failure and the detail of its error."""
    try:
        return "value", function(*inputs)
    except BaseException as error:
        return failure(error)


def serve_calls(space: dict[str, Any], requests: int, results: int) -> None:
    """Answer requests (name, [inputs, ...]) with one frame per call, until there are no more.

    Without a name the inputs are (source, mode) of a piece of the tests, which runs in `space`.
    """

    def run(source: str, mode: str) -> Any:
        return eval(compile(source, "<tests>", mode, dont_inherit=True), space)

    while data := receive(requests):
        name, calls = marshal.loads(data)
        found = attempt(find, space, name) if name else ("value", run)
        for inputs in calls:
            reply = attempt(found[1], *inputs) if found[0] == "value" else found
            try:
                send(results, reply)
            except BaseException as error:  # a value that cannot be sent
                send(results, failure(error))


def main(job: dict[str, Any], requests: int, results: int) -> None:
    """Run the job's program; with `calls`, load it silently and serve calls of its functions."""
    space: dict[str, Any] = {"__name__": job["name"]}
    if job["calls"]:
        sys.set_int_max_str_digits(0)
    error = execute(job["program"], space)
    kind, detail = ("ended", "") if error is None else failure(error)
    try:  # noqa: SIM105 (contextlib costs start time)
        sys.stdout.flush()
    except (OSError, ValueError):
        pass
    send(results, (kind, detail, sorted(map(str, space)) if job["calls"] else []))
    if job["calls"] and error is None:
        serve_calls(space, requests, results)
