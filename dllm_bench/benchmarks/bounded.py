"""Call a function that parses a model's text in a helper process, within bounds.

A text may be of any form: it can make a parser recurse, a regular expression or sympy run for
hours, a conversion raise. All texts are parsed (extraction, postprocessing, comparison with the
right answer) through `call_bounded`. A call that exceeds a bound, raises, or ends the helper
becomes an `UnreadableAnswerError`, which `unreadable` turns into the score of a wrong answer. If it
raises for an empty text too, a library is at fault, not the text, and a `DllmBenchError` says so.

A helper reads one text after the other and is started again only after a failure. Its limit is in
CPU seconds, counted by the system (SIGPROF), so it applies in any thread of the caller, inside of C
code, and on a busy machine. A helper never runs a model's code; the sandbox does.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import IO, Any, cast

from dllm_bench.core.benchmark import SampleScore
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import PACKAGE

MAX_CHARACTERS = 1_000_000
"""Of a text; 32,768 tokens are some 150,000."""
MAX_CPU_S = 30
"""For one text, the import of libraries by the first included."""
MAX_WALL_S = 600.0
"""After which a helper that computes nothing is given up."""
MAX_MEMORY = 4 * 2**30
"""Bytes that a helper may allocate."""
START = "from dllm_bench.benchmarks.bounded import serve; serve()"
FAULTS = (DllmBenchError, ImportError, OSError)
"""Errors caused by this machine or its settings; the text causes all others."""
ENDED = {
    signal.SIGPROF: ("time", f"reading it took more than {MAX_CPU_S} CPU seconds"),
    signal.SIGSEGV: ("nesting", "its nesting exceeded the stack"),
    signal.SIGABRT: ("abort", "its reader aborted"),
}
"""Signal by which a text ends its reader -> reason as a word, and as a clause."""


class UnreadableAnswerError(Exception):
    """A text cannot be read within the bounds.

    reason: a word; detail: a clause.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def unreadable(error: UnreadableAnswerError, metrics: Iterable[str]) -> SampleScore:
    """Return the score of a text that cannot be read: wrong, with the reason in its verdict."""
    zeros = dict.fromkeys(metrics, 0.0)
    return SampleScore(0.0, f"unreadable ({error.reason})", zeros, error.detail)


def call_bounded(function: Callable[..., Any], text: str, *arguments: Any) -> Any:
    """Run `function(text, *arguments)` in a helper process; UnreadableAnswerError if the text makes
    it fail, DllmBenchError if it fails for any text or on this machine.

    function: of a module; text: of a model; arguments and result: what JSON can hold.
    """
    _check_text(text)
    name = [function.__module__, function.__qualname__]
    request = json.dumps([*name, text, *arguments])
    try:
        reader = _IDLE.pop()
    except IndexError:
        reader = _Reader()
    kind, *result = reader.answer(request)
    _IDLE.append(reader)
    if kind == "value":
        return result[0]
    if kind == "unreadable":
        raise UnreadableAnswerError(*result)
    raise DllmBenchError(
        f"Answers were to be read with {'.'.join(name)}, which failed on this machine "
        f"({result[0]}); install the versions that dllm-bench needs, then repeat the command."
    )


def _check_text(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise UnreadableAnswerError(
            "length", f"it has {len(text)} characters, and {MAX_CHARACTERS} are read"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnreadableAnswerError("characters", "it holds lone surrogates") from None


class _Reader:
    """A helper process that answers one request at a time, each a line of JSON."""

    def __init__(self) -> None:
        paths = filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH")))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        self.requests = cast(IO[bytes], self.process.stdin)
        self.answers = cast(IO[bytes], self.process.stdout)
        if not self._line():
            self._end()
            raise DllmBenchError(
                f"A process that reads answers was to be started with {sys.executable}, and it "
                f"ended at once ({START!r}); check that Python and this package can be imported."
            )

    def answer(self, request: str) -> list[Any]:
        """Return the answer to a request, or what the end of the process says about its text."""
        with suppress(BrokenPipeError):
            self.requests.write(request.encode() + b"\n")
            self.requests.flush()
        line = self._line()
        if line.endswith(b"\n"):
            return list(json.loads(line))
        code = self._end()
        if -code not in ENDED:
            raise DllmBenchError(
                f"The process that reads answers was ended from outside (exit status {code}); "
                "give the same command again."
            )
        self.__init__()  # type: ignore[misc]
        return ["unreadable", *ENDED[signal.Signals(-code)]]

    def _line(self) -> bytes:
        ready = select.poll()
        ready.register(self.answers, select.POLLIN)
        return self.answers.readline() if ready.poll(1000 * MAX_WALL_S) else b""

    def _end(self) -> int:
        with suppress(OSError):
            self.requests.close()
        try:
            return self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


_IDLE: list[_Reader] = []
"""Readers that no thread uses at the moment."""
os.register_at_fork(after_in_child=_IDLE.clear)  # the pipes are the parent's


def serve() -> None:
    """Answer requests from standard input until it ends. This is the main function of a helper."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries may print
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_answer(*json.loads(line))).encode() + b"\n")
        answers.flush()


def _answer(module: str, name: str, text: str, *arguments: Any) -> list[Any]:
    """Return ["value", result], ["unreadable", reason, sentence] or ["fault", sentence]."""
    try:
        function = getattr(importlib.import_module(module), name)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        return ["value", function(text, *arguments)]
    except FAULTS as error:
        return ["fault", f"{type(error).__name__}: {error}"]
    except Exception as error:  # a text can raise any error in a parser
        kind = type(error).__name__
        with suppress(Exception):
            function("", *arguments)  # raises if the text is not at fault
            return ["unreadable", kind, f"reading it ended in {kind}: {str(error)[:200]}"]
        return ["fault", f"{kind}: {error}"]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
