"""The supervisor's side of a sandboxed child: call a judged program and bound the time it takes.

The supervisor is the parent process of the judged one. It alone holds expected values and the
channel for verdicts, and it never runs the program.

The rule of this package: nothing that the judged process sends is a verdict. A frame from it is a
value, which the supervisor compares with expected values that only it holds; or a failure, one of
`FAILURES`; or, once, the message that the program has ended. That message is no verdict either: a
program whose functions are called is judged by their results, and one that only runs ("ended") by
its output. Every other frame, and a frame before its request, is the failure "failed". A result
that cannot be read or compared within bounds (bytes, members, digits and depth in `codec`, CPU
seconds in `bootstrap`) is graded as wrong, because an error of the judge must not leave a sample
without a grade.

Time is measured as on an idle machine: CPU seconds, or elapsed seconds minus those in which the
program waited for a processor. So sleeping counts and a busy machine does not.
"""

from __future__ import annotations

import marshal
import os
import select
import time

from dllm_bench.benchmarks.sandbox.child.answer import DETAIL, LENGTH
from dllm_bench.benchmarks.sandbox.child.codec import UnreadableValueError, decode

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

SIGKILL, SIGXCPU = 9, 24
POLL_S = 0.05
GRACE_S = 0.2
"""How long a process may take to end after it closed its channel."""
PIPE_BUF = 4096
"""Bytes that a pipe takes at once where it takes any."""
FAILURES = ("failed", "memory", "refused")
"""Failures that a judged process may report about its own program."""
MAX_FRAME = 64 << 20
"""Bytes of the largest result that is read."""


class AnswerError(Exception):
    """A call failed; the program goes on. Arguments: failure, detail."""


class AnswerEnded(BaseException):
    """The judged process has ended or has to be stopped. Arguments: failure, detail."""


class JudgedProcess:
    """A judged process: calls of its functions, and how it ended."""

    def __init__(
        self, pid: int, requests: int, results: int, schedule: int, limits: dict[str, float]
    ) -> None:
        """Attach to a running process.

        requests, results: the supervisor's ends of the pipes; schedule: the open file
        /proc/PID/schedstat or -1; limits: `cpu_s` and `wall_s`.
        """
        self.pid, self.requests, self.results = pid, requests, results
        self.cpu_s = limits["cpu_s"]
        self.patience_s = limits["cpu_s"]
        """Seconds it may sleep, all calls together."""
        self.names: Sequence[str] = ()
        """Global names of the loaded program."""
        self.begin: Callable[[], None] = lambda: None
        """Called before the first frame that the program may have made is read."""
        self.stopped: AnswerEnded | None = None
        """The exception that ended all reading, even if it was caught."""
        self._schedule = schedule
        self._deadline = time.monotonic() + limits["wall_s"]
        self._slept_s = 0.0
        self._received = bytearray()
        self._status: int | None = None
        self._used_s = 0.0

    def held(self) -> tuple[str, ...]:
        """Return names of the isolation steps that the process took, sent before the program
        runs."""
        return tuple(map(str, decode(self._wait(self._frame, self.cpu_s))))

    def load(self, limit_s: float) -> tuple[str, str]:
        """Return ("ended", "") once the program itself has run, by its own account, or its
        failure."""
        self.begin()
        kind, detail, names = self._parts(limit_s, 3)
        if kind != "ended":
            return failure_of(kind, detail)
        if type(names) is not list or not all(type(name) is str for name in names):
            raise self._stop("failed", "unreadable names")
        self.names = names
        return "ended", ""

    def call(self, name: str, inputs: Sequence[Any], limit_s: float) -> Any:
        """Return the result of one call; AnswerError if it raises an exception."""
        return next(self.calls(name, [inputs], [limit_s]))

    def calls(
        self, name: str, inputs: Sequence[Sequence[Any]], limits_s: Sequence[float]
    ) -> Iterator[Any]:
        """Yield the results of calls of one function, each as soon as it is there."""
        request: Any = (name, inputs)
        if self.stopped:
            raise self.stopped
        if self._received or select.select([self.results], [], [], 0)[0]:
            self._refuse_early()
        self._send(marshal.dumps(request))
        for limit_s in limits_s:
            kind, result = self._parts(limit_s, 2)
            if kind != "value":
                raise AnswerError(*failure_of(kind, result))
            yield result

    def stop(self, grace_s: float = 0.0) -> int:
        """Reap the process, killed if it has not ended after `grace_s`; return its exit status."""
        until = time.monotonic() + grace_s
        while self._status is None:
            late = time.monotonic() >= until
            if late:
                os.kill(self.pid, SIGKILL)
            pid, status, usage = os.wait4(self.pid, 0 if late else os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                self._used_s = usage.ru_utime + usage.ru_stime
            else:
                time.sleep(grace_s / 100)
        return self._status

    def _send(self, data: bytes) -> None:
        left = bytearray(len(data).to_bytes(LENGTH, "big") + data)

        def written() -> bytes | None:
            if select.select([], [self.requests], [], POLL_S)[1]:
                try:
                    del left[: os.write(self.requests, left[:PIPE_BUF])]
                except BrokenPipeError as error:
                    raise self._ended() from error
            return None if left else b""

        self._wait(written, self.cpu_s)

    def _refuse_early(self) -> None:
        """Raise AnswerEnded for a result that is there before its call, or for the end."""
        while not self._received:
            self._frame()  # raises at the end of the channel
        raise self._stop("failed", "a result before its call")

    def _parts(self, limit_s: float, count: int) -> tuple[Any, ...]:
        """Return the members of the next frame, a tuple of `count`."""
        try:
            parts = decode(self._wait(self._frame, limit_s))
        except (UnreadableValueError, MemoryError) as error:
            raise self._stop("failed", f"unreadable result: {error}"[:DETAIL]) from error
        if type(parts) is not tuple or len(parts) != count:
            raise self._stop("failed", "unreadable result")
        return parts

    def _stop(self, failure: str, detail: str) -> AnswerEnded:
        """Return the exception that ends all reading, kept in `stopped`."""
        self.stopped = AnswerEnded(failure, detail)
        return self.stopped

    def _frame(self) -> bytes | None:
        """Return the content of the next frame, or None if it is not there yet."""
        if len(self._received) >= LENGTH:
            end = LENGTH + int.from_bytes(self._received[:LENGTH], "big")
            if end > MAX_FRAME:
                raise self._stop("failed", "a result is too large")
            if len(self._received) >= end:
                data = bytes(self._received[LENGTH:end])
                del self._received[:end]
                return data
        if select.select([self.results], [], [], POLL_S)[0]:
            chunk = os.read(self.results, 1 << 16)
            if not chunk:
                raise self._ended()
            self._received += chunk
        return None

    def _wait(self, step: Callable[[], bytes | None], limit_s: float) -> bytes:
        """Repeat `step` until it gives something; AnswerEnded when a limit is reached."""
        began = self._clock()
        while True:
            done = step()
            now = self._clock()
            cpu_s, passed_s = now[0] - began[0], now[1] - began[1]
            slept_s = max(0.0, passed_s - cpu_s)
            if cpu_s > limit_s:
                raise self._stop("timeout", "CPU time")
            asleep = passed_s > limit_s or self._slept_s + slept_s > self.patience_s
            if asleep or time.monotonic() > self._deadline:
                raise self._stop("timeout", "wall time")
            if done is not None:
                self._slept_s += slept_s
                return done

    def _clock(self) -> tuple[float, float]:
        """Return (CPU seconds of the process, seconds in which it did not wait for a processor)."""
        passed_s = time.monotonic()
        try:
            cpu_s = time.clock_gettime(~self.pid << 3 | 2)  # the id of clock_getcpuclockid(3)
            if self._schedule >= 0:
                passed_s -= int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9
        except OSError:
            cpu_s = passed_s
        return cpu_s, passed_s

    def _ended(self) -> AnswerEnded:
        """Return how a process ended that sends no more."""
        status = self.stop(GRACE_S)
        spent = self._used_s >= self.cpu_s
        if status == -SIGXCPU or (status == -SIGKILL and spent):
            return self._stop("timeout", "CPU time")
        if status < 0:
            from signal import Signals  # takes milliseconds to import, and is rarely needed

            return self._stop("crashed", Signals(-status).name)
        return self._stop("failed", f"left before its end with status {status}")


def failure_of(kind: object, detail: object) -> tuple[str, str]:
    """Return (failure, detail) of a failure that a judged process reports, whatever its form."""
    known = kind if type(kind) is str and kind in FAILURES else "failed"
    return known, detail[:DETAIL] if type(detail) is str else ""


def main(payload: object, report: Callable[..., None], answer: JudgedProcess) -> tuple[str, str]:
    """Run a program for its output; returns ("ended", "") or its failure."""
    return answer.load(answer.cpu_s)
