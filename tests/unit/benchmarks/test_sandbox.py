"""Drills for the sandbox: what a program may not do, each with its verdict and a time limit.

A drill that needs an isolation step of some kernels names the step, and is skipped elsewhere.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dllm_bench.benchmarks import sandbox
from dllm_bench.benchmarks.sandbox import Limits, execute
from dllm_bench.core.errors import DllmBenchError
from tests.unit.benchmarks.sandbox_drills import DRILL_S, drill, needs, nothing_is_left  # noqa: F401

SECRET = "DLLM_BENCH_TEST_SECRET"
THREADS = (
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1,)).start()"
)
DEAF = "signal.signal(signal.SIGXCPU, signal.SIG_IGN)"


def test_a_program_runs_and_its_output_is_kept() -> None:
    outcome = drill("print('two', 1 + 1)")
    assert (outcome.verdict, outcome.stdout, outcome.detail) == ("ended", "two 2\n", "")


@pytest.mark.parametrize(
    ("source", "verdict", "detail"),
    [
        ("assert 1 == 2", "failed", "AssertionError"),
        ("def f(:", "failed", "SyntaxError"),
        ("import sys; sys.exit(0)", "failed", "SystemExit"),
        ("import os; os._exit(0)", "failed", "left before its end"),
        ("import os; os.execv('/bin/true', ['true'])", "failed", "left before its end"),
        ("def f(): f()\nf()", "failed", "RecursionError"),
        ("a = '\\0'\n\0", "failed", "null bytes"),
        (THREADS, "failed", ""),
        ("while True: pass", "timeout", ""),
        (f"import signal\n{DEAF}\nwhile True: pass", "timeout", ""),
        ("x = bytearray(64 << 30)", "memory", ""),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", "memory", ""),
        ("import ctypes; ctypes.string_at(0)", "crashed", "SIGSEGV"),
    ],
)
def test_a_program_that_ends_badly_has_its_verdict(source: str, verdict: str, detail: str) -> None:
    outcome = drill(source, memory_mb=256) if "append" in source else drill(source)
    assert outcome.verdict == verdict
    assert detail in outcome.detail


@pytest.mark.parametrize(
    "source",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.socket(socket.AF_INET)",
        "import socket; socket.socket(socket.AF_UNIX)",
    ],
)
def test_processes_and_sockets_are_refused(source: str) -> None:
    needs("seccomp")
    assert drill(source).verdict == "refused"


def test_a_sleeping_program_ends_by_wall_time() -> None:
    outcome = drill("import time; time.sleep(60)", wall_s=0.5)
    assert (outcome.verdict, outcome.detail) == ("timeout", "wall time")
    assert 0.5 <= outcome.seconds < 1.5


def test_a_stopped_program_is_gone() -> None:
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    outcome = drill(source, wall_s=0.8)
    assert outcome.verdict == "timeout"
    with pytest.raises(ProcessLookupError):
        os.kill(int(outcome.stdout), 0)


def test_one_thread_may_start() -> None:
    source = (
        "import threading\nt = threading.Thread(target=print, args=('hi',)); t.start(); t.join()"
    )
    assert drill(source).stdout == "hi\n"


def test_files_outside_cannot_be_written(tmp_path: Path) -> None:
    needs("read_only_files", "landlock")
    target = tmp_path / "precious"
    target.write_text("kept")
    os.chmod(target, 0o666)
    assert drill(f"open({str(target)!r}, 'w').write('lost')").verdict == "refused"
    assert drill(f"import os; os.remove({str(target)!r})").verdict == "refused"
    assert target.read_text() == "kept"
    assert drill("open('/dev/shm/x', 'w')").verdict == "refused"


def test_the_working_directory_is_writable_private_and_small() -> None:
    source = "open('x', 'w').write('hi'); import os; print(os.listdir('.'), open('x').read())"
    assert drill(source).stdout == "['x'] hi\n"
    flood = "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()"
    outcome = drill(flood)
    assert outcome.verdict in ("failed", "crashed")
    assert drill("import os; print(os.listdir('.'))").stdout == "[]\n"


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "swordfish")
    seen = drill("import os; print(sorted(os.environ))").stdout
    assert set(eval(seen)) <= {"PYTHONHASHSEED", "LC_CTYPE", "__CF_USER_TEXT_ENCODING"}


def test_the_parents_environment_cannot_be_read() -> None:
    needs("namespaces", "landlock")
    pid = os.getpid()
    assert drill(f"print(open('/proc/{pid}/environ').read())").verdict == "refused"
    assert drill(f"open('/proc/{pid}/mem', 'rb')").verdict == "refused"


def test_files_of_the_user_cannot_be_read(tmp_path: Path) -> None:
    """A home directory or a checkout, readable for everybody, cannot be read from inside."""
    needs("landlock")
    secret = tmp_path / "home" / "token"
    secret.parent.mkdir(mode=0o755)
    secret.write_text("swordfish")
    os.chmod(secret, 0o644)
    os.chmod(tmp_path, 0o755)
    assert drill(f"open({str(secret)!r}).read()").verdict == "refused"
    assert drill(f"import os; os.listdir({str(secret.parent)!r})").verdict == "refused"
    assert drill(f"import os; os.listdir({str(Path.home())!r})").verdict == "refused"
    assert drill("import json, decimal; open('/etc/hosts').read()").verdict == "ended"


def test_installed_packages_are_read_only_where_asked_for() -> None:
    source = "import numpy; print(numpy.arange(3).sum())"
    assert drill(source).verdict == "failed"
    asked = execute(source, limits=Limits(packages=True, memory_mb=4096))
    assert (asked.verdict, asked.stdout) == ("ended", "3\n")


def test_a_program_reads_what_it_is_given() -> None:
    source = "import sys\nfirst = input()\nprint(first, sys.stdin.read().split())"
    outcome = execute(source, stdin="a b\n1 2\n3\n")
    assert outcome.stdout == "a b ['1', '2', '3']\n"
    assert execute("print(input())").detail.startswith("EOFError")
    assert execute("print(open(0).read())", stdin="ä").stdout == "ä\n"


def test_a_gigabyte_of_output_is_not_kept() -> None:
    """The program is stopped long before, and only the end of its output comes back."""
    source = "import sys\nfor _ in range(1 << 10): sys.stdout.write('x' * (1 << 20))"
    outcome = drill(source)
    assert (outcome.verdict, outcome.detail) == ("failed", "printed too much")
    assert len(outcome.stdout) <= Limits().kept_kb << 10
    long = execute("print('y' * 20_000)", limits=Limits(kept_kb=64))
    assert len(long.stdout) == 20_001


def test_time_used_comes_back() -> None:
    busy = drill("import time\nwhile time.process_time() < 0.1: pass")
    assert busy.verdict == "ended"
    assert busy.cpu_s >= 0.1


def test_files_are_few() -> None:
    needs("read_only_files")
    source = "for i in range(100_000): open(str(i), 'w').close()"
    outcome = drill(source, cpu_s=2, wall_s=2.9)
    assert (outcome.verdict, "No space left" in outcome.detail) == ("failed", True)


def test_the_shell_behind_ctypes_does_nothing(tmp_path: Path) -> None:
    needs("seccomp")
    target = tmp_path / "pwned"
    os.chmod(tmp_path, 0o777)
    call = f"ctypes.CDLL(None).system(b'touch {target}')"
    assert drill(f"import ctypes; assert {call} == 0").verdict == "failed"
    assert not target.exists()


def test_rights_do_not_come_back() -> None:
    needs("no_capabilities")
    source = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nassert libc.%s == 0"
    assert drill(source % "unshare(0x10000000)").verdict == "failed"
    assert drill(source % "mount(b'none', b'/', None, 0x1020, None)").verdict == "failed"
    status = drill("print(open('/proc/self/status').read())").stdout
    rights = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Cap"))
    assert {rights[name] for name in ("CapEff", "CapPrm", "CapInh")} == {"0" * 16}


def test_equal_programs_print_equal_sets() -> None:
    source = "print({'a', 'b', 'c', 'd', 'e', 'f'}, hash('x'))"
    assert drill(source).stdout == drill(source).stdout


def test_one_crash_does_not_touch_the_others() -> None:
    good, bad = "x = 1", "import ctypes; ctypes.string_at(0)"
    outcomes = sandbox.map_in_threads(execute, [good, bad, good, bad, good])
    assert [o.verdict for o in outcomes] == ["ended", "crashed", "ended", "crashed", "ended"]


def test_an_examiner_s_words_come_back() -> None:
    """Here stages of calls: the second one is wrong, and a third would not have been made."""
    stages = {"one": [([1], 2)], "two": [([1], 3)], "three": [([1], 2)]}
    payload = {
        "reference": None, "entry_point": "f", "stages": marshal.dumps(stages), "rule": "equal",
        "atol": 0.0, "min_time_s": 1.0, "time_factor": 0.0,
    }  # fmt: skip
    examiner = sandbox.Examiner("check", payload)
    outcome = sandbox.examine("def f(x): return x + 1", examiner, Limits())
    assert outcome.verdict == "failed"
    assert outcome.reports == (
        ("load", "ended", ""),
        ("one", "passed", ""),
        ("two", "failed", "wrong result for input 0"),
    )


def test_a_program_cannot_pass_by_writing_reports() -> None:
    source = """
import os
for channel in range(3, 64):
    try:
        os.write(channel, b"x\\tend\\tpassed\\t\\n")
    except OSError:
        pass
os._exit(0)
"""
    assert drill(source).verdict == "failed"


def test_what_this_machine_gives_is_taken() -> None:
    """The drills above skip a missing step; here each step that this machine can take must be."""
    held = set(sandbox.isolation())
    assert {"session", "limits", "empty environment"} <= held
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("namespaces and filters are Linux's, on x86_64 and aarch64")
    assert {"no_new_privileges", "seccomp"} <= held
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(444, None, ctypes.c_size_t(0), 1) > 0:  # the kernel's version of Landlock
        assert "landlock" in held
    tool = shutil.which("unshare")
    if tool and subprocess.run([tool, "-Urnm", "true"], capture_output=True).returncode == 0:
        assert {"namespaces", "read_only_files", "no_capabilities"} <= held


def test_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sandbox.CONSENT_VARIABLE, raising=False)
    with pytest.raises(
        DllmBenchError, match="allow_code_execution=true or DLLM_BENCH_ALLOW_CODE=1"
    ):
        sandbox.require_consent(False, "minicode")
    sandbox.require_consent(True, "minicode")
    monkeypatch.setenv(sandbox.CONSENT_VARIABLE, "1")
    sandbox.require_consent(False, "minicode")
