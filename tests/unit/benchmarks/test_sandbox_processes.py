"""Drills for the sandbox: no program affects other processes, or outlives the one that runs it.

Every way the kernel has to send a signal, limits and memory of other processes, rights of root.
"""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from dllm_bench.benchmarks import sandbox
from dllm_bench.benchmarks.sandbox import Limits, child_source
from dllm_bench.benchmarks.sandbox.child import supervise
from tests.unit.benchmarks.sandbox_drills import drill, needs, nothing_is_left  # noqa: F401


@pytest.mark.parametrize("target", ["os.getppid()", "-1", "the test itself"])
def test_nobody_else_can_be_killed(target: str) -> None:
    needs("seccomp")
    pid = os.getpid() if target == "the test itself" else target
    assert drill(f"import os, signal; os.kill({pid}, signal.SIGKILL)").verdict == "refused"


BEHIND_KILL = """
import ctypes, fcntl, os, resource, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def signal_with_data():
    about = ctypes.create_string_buffer(128)
    struct.pack_into("iii", about, 0, 0, 0, -1)  # as sigqueue(3) does
    if libc.syscall({"x86_64": 129, "aarch64": 138}[os.uname().machine], VICTIM, 9, about):
        raise OSError(ctypes.get_errno(), "refused")
def owner_of_a_pipe():
    read, write = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, VICTIM)
    fcntl.fcntl(read, 10, 9)  # F_SETSIG
    fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(write, b"x")
def limits_of_another():
    resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (8, 8))
def memory_of_nobody():
    libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    if libc.shmget(0, 1 << 30, 0o1600) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""


@pytest.mark.parametrize(
    "way", ["signal_with_data", "owner_of_a_pipe", "limits_of_another", "memory_of_nobody"]
)
def test_no_other_way_leads_to_others_or_past_the_memory_limit(way: str) -> None:
    needs("seccomp")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        outcome = drill(f"VICTIM = {victim.pid}\n{BEHIND_KILL}\n{way}()")
        victim.communicate(b"\n")
    assert outcome.verdict == "refused"
    assert victim.returncode == 0


OTHERS = """
import ctypes, os
libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
attributes = (ctypes.c_uint32 * 12)(48, 5)  # size, SCHED_IDLE
nodes = (ctypes.c_ulong * 1)(1)
def number(x86_64, aarch64, *args):
    if libc.syscall({"x86_64": x86_64, "aarch64": aarch64}[os.uname().machine], *args) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""
CHANGES = {
    "sched_setaffinity": "os.sched_setaffinity(parent, {min(os.sched_getaffinity(0))})",
    "sched_setscheduler": "os.sched_setscheduler(parent, os.SCHED_IDLE, os.sched_param(0))",
    "sched_setparam": "os.sched_setparam(parent, os.sched_param(0))",
    "sched_setattr": "number(314, 274, parent, attributes, 0)",
    "setpriority": "os.setpriority(os.PRIO_PROCESS, parent, 19)",
    "setpriority of a user": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "ioprio_set": "number(251, 30, 1, parent, 3 << 13)",
    "ioprio_set of a user": "number(251, 30, 3, os.getuid(), 3 << 13)",
    "migrate_pages": "number(256, 238, parent, 1, nodes, nodes)",
    "move_pages": "number(279, 239, parent, 0, None, None, None, 0)",
    "kcmp": "number(312, 272, parent, os.getpid(), 0, 0, 0)",
    "pidfd_open": "os.pidfd_open(parent)",
    "prlimit": "import resource; resource.prlimit(parent, resource.RLIMIT_NOFILE, (8, 8))",
    "request_key": "number(249, 218, b'user', b'name', None, 0)",
}
"""What changes a process of the same user -> the call, on the supervisor, which is one."""


@pytest.mark.parametrize("name", CHANGES)
def test_no_call_changes_another_process_of_the_user(name: str) -> None:
    needs("seccomp")
    outcome = drill(f"{OTHERS}\n{CHANGES[name]}")
    assert outcome.verdict == "refused"
    assert "Errno 1]" in outcome.detail


def test_one_s_own_files_and_limits_may_be_changed() -> None:
    source = (
        "import fcntl, resource\nresource.prlimit(0, resource.RLIMIT_NOFILE, (32, 32))\n"
        "with open('x', 'w') as file: fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print(fcntl.fcntl(0, fcntl.F_GETFD), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert drill(source).stdout == "0 (32, 32)\n"


def pythons() -> list[str]:
    """This Python, and the system's if it has the same version: `nobody` can read that one."""
    version = f"/usr/bin/python3.{sys.version_info.minor}"
    return [sys.executable, *([version] if os.access(version, os.X_OK) else [])]


@pytest.mark.parametrize("python", pythons())
def test_a_program_ends_with_who_runs_it(python: str) -> None:
    """The supervisor and the judged process; also where root becomes another user, which cancels
    the signal at the parent's death.
    """
    source = (
        f"import sys; sys.executable = {python!r}\n"
        "from dllm_bench.benchmarks.sandbox import execute\n"
        "from dllm_bench.benchmarks.sandbox import Limits\n"
        "execute('import time; time.sleep(9)', Limits(cpu_s=9, wall_s=9))"
    )
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    with subprocess.Popen([sys.executable, "-c", source], env=environment) as runner:
        if not Path(f"/proc/{runner.pid}/task/{runner.pid}/children").exists():
            runner.kill()
            pytest.skip("this system does not name children in /proc")
        found = [wait_for(lambda: children_of(runner.pid))[0]]
        found += wait_for(lambda: children_of(found[0]))
        wait_for(lambda: "S (sleeping)" in state(found[1]))
        time.sleep(0.5)  # until it has given up its rights and sleeps for good
        runner.kill()
    for pid in found:
        assert wait_for(lambda: state(pid) == "" or "Z" in state(pid))  # noqa: B023
    for left in Path(tempfile.gettempdir()).glob("dllm-bench-*"):
        left.rmdir()


def children_of(pid: int) -> list[int]:
    """Processes that a process started and that still run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state(pid: int) -> str:
    """Return the line of /proc with the state of a process, "" if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next(line for line in lines if line.startswith("State:"))


def wait_for(value: Callable[[], Any], seconds: float = 5.0) -> Any:
    """Wait until the value is true and return it."""
    until = time.monotonic() + seconds
    while not (found := value()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def test_root_gives_up_its_rights_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root has rights to give up")
    without = "\ndef namespaces():\n    raise OSError\nother_uid = namespaces\n"

    def changed(name: str) -> CodeType:
        source = child_source(name) + (without if name == "bootstrap" else "")
        return compile(source, name, "exec", dont_inherit=True)

    monkeypatch.setattr(sandbox, "child_program", changed)
    outcome = drill("print(open('/proc/self/status').read())")
    assert not {"namespaces", "other_uid"} & set(outcome.held)
    assert "CapEff:\t0000000000000000" in outcome.stdout


@pytest.mark.parametrize(("waited_s", "verdict"), [(9.5, None), (0.0, "timeout")])
def test_seconds_in_which_a_program_waits_for_a_processor_do_not_count(
    waited_s: float, verdict: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds pass in a call that may take one; the kernel says how many the machine took."""
    schedule, passed_s = tmp_path / "schedstat", [0.0]
    schedule.write_text("0 0 0")
    clock = SimpleNamespace(
        monotonic=lambda: passed_s[0], clock_gettime=lambda which: passed_s[0] / 100
    )
    monkeypatch.setattr(supervise, "time", clock)

    def step() -> bytes:
        passed_s[0] += 10
        schedule.write_text(f"0 {int(waited_s * 1e9)} 0")
        return b"done"

    with schedule.open("rb") as opened:
        limits = {"cpu_s": 2.0, "wall_s": 60.0}
        judged = supervise.JudgedProcess(1, -1, -1, opened.fileno(), limits)
        if verdict is None:
            assert judged._wait(step, 1.0) == b"done"
            return
        with pytest.raises(supervise.AnswerEnded) as ended:
            judged._wait(step, 1.0)
    assert ended.value.args[0] == verdict


def test_a_program_that_was_judged_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[str]()
    judge = sandbox._run
    monkeypatch.setattr(sandbox, "_run", lambda *given: runs.append(given[0]) or judge(*given))
    payload = {
        "min_time_s": 1.0,
        "time_factor": 4.0,
        "reference": "def f(x):\n    return x",
        "entry_point": "f",
        "stages": marshal.dumps({"base": [[1]], "plus": [[2]]}),
        "rule": "equal",
        "atol": 0.0,
    }
    examiner = sandbox.Examiner("check", payload, "__solution__", silent=True)
    other = sandbox.Examiner("check", {**payload, "reference": "def f(x):\n    return 3"})
    right, late = "def f(x):\n    return x", "def f(x):\n    while True: pass"
    for _ in range(2):
        assert sandbox.examine(right, examiner, Limits()).verdict == "passed"
        assert sandbox.examine(right, other, Limits()).verdict == "failed"
    assert len(runs) == 2
    for _ in range(2):
        assert sandbox.examine(late, examiner, Limits(cpu_s=1, wall_s=1.0)).verdict == "timeout"
    assert len(runs) == 4, "what a limit decided is judged again"
