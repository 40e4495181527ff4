"""Drills for the sandbox: what a program may not do, each with its verdict and a time limit.

A drill that needs an isolation step of some kernels names the step, and is skipped elsewhere. The
tool of containers is a fake; a real one is used where it works.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import Mock

import pytest

from dllm_bench.benchmarks import sandbox
from dllm_bench.benchmarks.sandbox import Limits, ProgramOutcome, child_source, execute
from dllm_bench.benchmarks.sandbox.child import supervise
from dllm_bench.benchmarks.sandbox.child.supervise import AnswerEnded
from dllm_bench.benchmarks.tasks import code_scorers
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from tests.benchmark_helpers import evalplus_benchmark, gold, mean

DRILL_S = 3.0
DRILLS = read_yaml(Path(__file__).with_name("drills.yaml"))


@pytest.fixture(autouse=True)
def nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Check that no working directory of a drill is left, in a directory of the drill's own."""
    tmp_path_factory.getbasetemp()  # not to be made inside of the drill's own directory
    with tempfile.TemporaryDirectory(prefix="sandbox-tests-") as own:
        os.chmod(own, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", own)
        yield
        monkeypatch.undo()
        assert not list(Path(own).glob("dllm-bench-*"))


def drill(source: str, **limits: Any) -> ProgramOutcome:
    """Run a program under tight limits and check that it took no longer than DRILL_S."""
    began = time.monotonic()
    outcome = execute(source, limits=Limits(**{"cpu_s": 1, "wall_s": 2.0, **limits}))
    assert time.monotonic() - began < DRILL_S
    return outcome


def needs(*steps: str) -> None:
    """Skip the test if none of these isolation steps takes effect here."""
    if not set(steps) & set(sandbox.isolation()):
        pytest.skip(f"this kernel does not give {' or '.join(steps)}")


@pytest.mark.parametrize("printed", DRILLS["allowed"])
def test_a_program_may_use_what_is_its_own(printed: str) -> None:
    outcome = drill(DRILLS["allowed"][printed])
    assert (outcome.verdict, outcome.stdout, outcome.detail) == ("ended", printed, "")


@pytest.mark.parametrize(
    ("verdict", "source", "detail"),
    [(verdict, *one) for verdict, every in DRILLS["endings"].items() for one in every.items()],
)
def test_a_program_that_ends_badly_has_its_verdict(verdict: str, source: str, detail: str) -> None:
    outcome = drill(source, memory_mb=256) if "append" in source else drill(source)
    assert outcome.verdict == verdict and detail in outcome.detail


@pytest.mark.parametrize("source", DRILLS["refused"])
def test_a_program_reaches_no_process_no_network_and_not_its_parent(source: str) -> None:
    needs(*(("namespaces", "landlock") if "/proc" in source else ("seccomp",)))
    assert drill(source.format(pid=os.getpid())).verdict == "refused"


def test_a_sleeping_program_ends_by_wall_time_and_is_gone() -> None:
    outcome = drill("import os, time; print(os.getpid(), flush=True); time.sleep(60)", wall_s=0.8)
    assert (outcome.verdict, outcome.detail) == ("timeout", "wall time")
    assert 0.8 <= outcome.seconds < 1.8
    with pytest.raises(ProcessLookupError):
        os.kill(int(outcome.stdout), 0)


def test_files_outside_cannot_be_written(tmp_path: Path) -> None:
    needs("read_only_files", "landlock")
    target = tmp_path / "precious"
    target.write_text("kept")
    os.chmod(target, 0o666)
    assert drill(f"open({str(target)!r}, 'w').write('lost')").verdict == "refused"
    assert drill(f"import os; os.remove({str(target)!r})").verdict == "refused"
    assert (target.read_text(), drill("open('/dev/shm/x', 'w')").verdict) == ("kept", "refused")


def test_the_working_directory_is_small_and_private() -> None:
    flood = "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()"
    assert drill(flood).verdict in ("failed", "crashed")
    assert drill("import os; print(os.listdir('.'))").stdout == "[]\n"


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_BENCH_TEST_SECRET", "swordfish")
    seen = drill("import os; print(sorted(os.environ))").stdout
    assert set(eval(seen)) <= {*sandbox.VARIABLES, "LC_CTYPE", "__CF_USER_TEXT_ENCODING"}


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
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        assert drill(f"open({shared.name!r})").verdict == "refused"


def test_files_of_the_package_with_its_answers_are_hidden(monkeypatch) -> None:
    needs("read_only_files")
    monkeypatch.setattr(sandbox, "PACKAGE", Path(json.__file__).parent)
    assert drill("import json.decoder").detail.startswith("ModuleNotFoundError")


def test_installed_packages_are_read_only_where_asked_for() -> None:
    source = "import numpy; print(numpy.arange(3).sum())"
    assert drill(source).verdict == "failed"
    asked = execute(source, limits=Limits(packages=True, memory_mb=4096))
    assert (asked.verdict, asked.stdout) == ("ended", "3\n")
    assert asked.cpu_s > 0.02, "the time used comes back"
    threads = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
    assert execute(threads, limits=Limits(packages=True, memory_mb=4096)).stdout == "1\n"


def test_a_program_reads_what_it_is_given() -> None:
    source = "import sys\nfirst = input()\nprint(first, sys.stdin.read().split())"
    assert execute(source, stdin="a b\n1 2\n3\n").stdout == "a b ['1', '2', '3']\n"
    assert execute("print(input())").detail.startswith("EOFError")
    assert execute("print(open(0).read())", stdin="ä").stdout == "ä\n"


def test_a_megabyte_of_output_is_not_kept() -> None:
    """The program is stopped long before, and only the end of its output comes back."""
    assert len(drill("print('x' * (2 << 20))").stdout) <= Limits().kept_kb << 10
    assert len(execute("print('y' * 20_000)", limits=Limits(kept_kb=64)).stdout) == 20_001


def test_output_is_read_to_its_end_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program prints and ends between two looks; 1,024 files are open before its own."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1024):
            files.enter_context(open(os.devnull, "rb"))
        late = Mock(side_effect=lambda pause_ms: time.sleep(1) if late.call_count == 1 else [1])
        monkeypatch.setattr(sandbox.select, "poll", lambda: Mock(poll=late))
        assert drill("print('out')").stdout == "out\n"


def test_files_are_few() -> None:
    needs("read_only_files")
    outcome = drill("for i in range(100_000): open(str(i), 'w').close()", cpu_s=2, wall_s=2.9)
    assert (outcome.verdict, "No space left" in outcome.detail) == ("failed", True)


def test_rights_do_not_come_back() -> None:
    needs("no_capabilities")
    source = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nassert libc.%s == 0"
    assert drill(source % "unshare(0x10000000)").verdict == "failed"
    assert drill(source % "mount(b'none', b'/', None, 0x1020, None)").verdict == "failed"
    status = drill("print(open('/proc/self/status').read())").stdout
    rights = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Cap"))
    assert {rights[name] for name in ("CapEff", "CapPrm", "CapInh")} == {"0" * 16}


def test_one_crash_does_not_touch_the_others_and_equal_programs_print_equal_sets() -> None:
    good, bad = "print({'a', 'b', 'c', 'd', 'e', 'f'}, hash('x'))", "import os; os.abort()"
    outcomes = sandbox.map_in_threads(execute, [good, bad, good, bad, good])
    assert [o.verdict for o in outcomes] == ["ended", "crashed", "ended", "crashed", "ended"]
    assert len({o.stdout for o in outcomes[::2]}) == 1


def test_an_examiner_s_words_come_back() -> None:
    """Here stages of calls: the second one is wrong, and a third would not have been made."""
    stages = {"one": [([1], 2)], "two": [([1], 3)], "three": [([1], 2)]}
    asked = {"reference": None, "entry_point": "f", "min_time_s": 1.0, "time_factor": 0.0}
    examiner = sandbox.compare_calls(stages, asked)
    outcome = sandbox.examine("def f(x): return x + 1", examiner, Limits())
    found = [("load", "ended", ""), ("one", "passed", "")]
    assert outcome.verdict == "failed"
    assert outcome.reports == (*found, ("two", "failed", "wrong result for input 0"))


@pytest.mark.parametrize(("wanted", "right", "wrong"), DRILLS["results"])
def test_results_are_compared_as_in_evalplus(wanted: str, right: str, wrong: str) -> None:
    reference, *programs = (
        f"import numpy\ndef f(x):\n    return {r}" for r in (wanted, right, wrong)
    )
    asked = {"reference": reference, "entry_point": "f", "min_time_s": 1.0, "time_factor": 4.0}
    examiner, limits = sandbox.compare_calls({"base": [[0.5]]}, asked), code_scorers.LIMITS
    verdicts = [sandbox.examine(one, examiner, limits).verdict for one in programs]
    assert verdicts == ["passed", "failed"]


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


@pytest.mark.parametrize("change", DRILLS["changes"])
def test_no_call_changes_another_process_of_the_user(change: str) -> None:
    needs("seccomp")
    outcome = drill(DRILLS["before changes"] + DRILLS["changes"][change])
    assert outcome.verdict == "refused" and "Errno 1]" in outcome.detail


def pythons() -> list[str]:
    """This Python, and the system's if it has the same version: `nobody` can read that one."""
    version = f"/usr/bin/python3.{sys.version_info.minor}"
    return [sys.executable, *([version] if os.access(version, os.X_OK) else [])]


@pytest.mark.parametrize("python", pythons())
def test_a_program_ends_with_who_runs_it(python: str) -> None:
    """The supervisor and the judged process; also where root becomes another user, which cancels
    the signal at the parent's death.
    """
    source = f"import sys; sys.executable = {python!r}\n{DRILLS['who runs it']}"
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


def leave_out(monkeypatch: pytest.MonkeyPatch, *steps: str, more: str = "") -> None:
    """Let isolation steps fail, as on a kernel without them; `more` is added to their source."""
    without = "".join(f"\ndef {step}(*given):\n    raise OSError\n" for step in steps)

    def changed(name: str) -> CodeType:
        source = child_source(name) + (without + more if name == "bootstrap" else "")
        return compile(source, name, "exec", dont_inherit=True)

    monkeypatch.setattr(sandbox, "child_program", changed)


def test_root_gives_up_its_rights_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root has rights to give up")
    leave_out(monkeypatch, "namespaces", "other_uid")
    outcome = drill("print(open('/proc/self/status').read())")
    assert not {"namespaces", "other_uid"} & set(outcome.held)
    assert "CapEff:\t0000000000000000" in outcome.stdout


@pytest.mark.parametrize("python", pythons())
def test_the_supervisor_is_never_readable(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "namespaces", "landlock", more=DRILLS["late"])
    monkeypatch.setattr(sys, "executable", python)
    needs("seccomp")
    assert drill("import os; open(f'/proc/{os.getppid()}/mem', 'rb')").verdict == "refused"


def test_root_stays_root_where_nobody_cannot_read_the_packages(tmp_path, monkeypatch) -> None:
    *_, python = pythons()
    if os.geteuid() != 0 or python == sys.executable:
        pytest.skip("needs root, and a Python that nobody can read")
    tmp_path.chmod(0o700)
    packages = tmp_path / f"lib/python3.{sys.version_info.minor}/site-packages"
    for folder in (packages, tmp_path / "bin"):
        folder.mkdir(parents=True)
    (packages / "extra.py").touch()
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(python).parent}\n")
    (tmp_path / "bin/python").symlink_to(python)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    assert [drill("import extra", packages=p).verdict for p in (True, False)] == ["ended", "failed"]


def test_deep_folders_are_removed_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "namespaces")
    source = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    assert execute(source).verdict == "ended"


STOPPED = pytest.raises(AnswerEnded, match="timeout")


@pytest.mark.parametrize(("waited_s", "outcome"), [(9.5, nullcontext()), (0, STOPPED)])
def test_seconds_in_which_a_program_waits_for_a_processor_do_not_count(
    waited_s, outcome, tmp_path, monkeypatch
) -> None:
    """Ten seconds pass in a call that may take one; the kernel says how many the machine took."""
    schedule, passed_s = tmp_path / "schedstat", [0.0]
    schedule.write_text("0 0 0")
    monkeypatch.setattr(supervise.time, "monotonic", lambda: passed_s[0])
    monkeypatch.setattr(supervise.time, "clock_gettime", lambda which: passed_s[0] / 100)

    def step() -> bytes:
        passed_s[0] += 10
        schedule.write_text(f"0 {int(waited_s * 1e9)} 0")
        return b"done"

    with schedule.open("rb") as opened, outcome:
        judged = supervise.JudgedProcess(1, -1, -1, opened.fileno(), {"cpu_s": 2.0, "wall_s": 60.0})
        assert judged._wait(step, 1.0) == b"done"


def test_a_program_that_was_judged_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, judge = list[str](), sandbox._run
    monkeypatch.setattr(sandbox, "_run", lambda *given: runs.append(given[0]) or judge(*given))
    asked = {"entry_point": "f", "min_time_s": 1.0, "time_factor": 4.0}
    references = ({**asked, "reference": f"def f(x):\n    return {result}"} for result in "x3")
    right, other = (sandbox.compare_calls({"base": [[1]], "plus": [[2]]}, r) for r in references)
    program, late = "def f(x):\n    return x", "def f(x):\n    while True: pass"
    for _ in range(2):
        assert sandbox.examine(program, right, Limits()).verdict == "passed"
        assert sandbox.examine(program, other, Limits()).verdict == "failed"
    assert len(runs) == 2
    for _ in range(2):
        assert sandbox.examine(late, right, Limits(cpu_s=1, wall_s=0.3)).verdict == "timeout"
    assert len(runs) == 4, "what a limit decided is judged again"


# --- in a container -------------------------------------------------------------------------------
#
# The fake runs on this machine the command that follows the image's name, so everything but the
# container itself is real: the job, verdicts through the standard error, stopping.

IMAGE = "example/python"
FAKE = Path(__file__).with_name("fake_tool.txt").read_text()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put fakes of all tools first on the PATH; the file holds the arguments of their calls."""
    file = tmp_path / "calls"
    for name in sandbox.TOOLS:
        script = tmp_path / name
        script.write_text(FAKE.format(python=sys.executable, log=str(file), image=IMAGE))
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(sandbox.IMAGE_VARIABLE, IMAGE)
    monkeypatch.setenv("DLLM_BENCH_TEST_SECRET", "swordfish")
    sandbox.container_tool.cache_clear()
    yield file
    sandbox.container_tool.cache_clear()


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("tool", sorted(sandbox.TOOLS))
def test_a_program_runs_in_the_tool_asked_for(tool, log, monkeypatch) -> None:
    monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, tool)
    outcome = sandbox.execute("print(1 + 1)")
    assert (outcome.verdict, outcome.stdout) == ("ended", "2\n")
    (words,) = calls(log)
    said = " ".join(words)
    assert "swordfish" not in said
    closed = f"--read-only --rm --cap-drop=ALL --user={sandbox.NOBODY}"
    asked = "--containall --cleanenv --no-home" if tool == "apptainer" else closed
    for option in ("--network=none", *asked.split()):
        assert option.replace("=", " ") in said


def test_verdicts_come_back(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, "docker")
    quick = Limits(cpu_s=1, wall_s=3.0, memory_mb=512)
    for program, verdict, shown in DRILLS["in a container"]:
        found = sandbox.execute(program, limits=quick, stdin="given\n")
        assert (found.verdict, shown in found.detail + found.stdout) == (verdict, True), program


@pytest.mark.exhaustive
def test_a_program_that_hangs_is_killed_in_its_container(log, monkeypatch) -> None:
    monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, "podman")
    monkeypatch.setattr(sandbox, "BACKSTOP_S", 0.0)  # as if it could not stop its program itself
    patient = Limits(cpu_s=60, wall_s=3.0)  # the stand-in for podman has started by then
    outcome = sandbox.execute("import time; time.sleep(60)", limits=patient)
    assert (outcome.verdict, outcome.detail) == ("timeout", "wall time")
    started, killed = calls(log)
    assert killed == ["kill", started[started.index("--name") + 1]]


def test_a_benchmark_is_graded_the_same(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child programs are sent as text, because another Python cannot read compiled ones."""
    monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, "container")
    asked = evalplus_benchmark("minicode", limit=3)
    texts = gold(asked)
    assert mean(asked.score(texts)) == 1
    judged = len(calls(log))
    assert mean(asked.score(texts)) == 1 and len(calls(log)) == judged, "the same program again"
    assert asked.score(dict.fromkeys(texts, "    return 1 / 0\n"))[next(iter(texts))].value == 0
    assert calls(log)[0][0] == "run"


def test_what_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.container_tool.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    for asked, sentence in DRILLS["no container"]:
        monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, asked)
        with pytest.raises(DllmBenchError, match=sentence):
            sandbox.execute("x = 1")
    monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, sandbox.PROCESS)
    assert sandbox.execute("x = 1").verdict == "ended"
    sandbox.container_tool.cache_clear()


def test_with_a_real_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a tool has the image already; nothing is downloaded."""
    asked = f"image inspect {sandbox.DEFAULT_IMAGE}".split()
    tools = filter(shutil.which, ("docker", "podman"))
    have = [
        tool for tool in tools if not subprocess.run([tool, *asked], capture_output=True).returncode
    ]
    if not have:
        pytest.skip(f"no container tool here has {sandbox.DEFAULT_IMAGE}")
    sandbox.container_tool.cache_clear()
    monkeypatch.setenv(sandbox.ISOLATION_VARIABLE, have[0])
    limits = Limits(wall_s=30.0)
    assert sandbox.execute("print('in')", limits=limits).stdout == "in\n"
    assert sandbox.execute("open('/x', 'w')", limits=limits).verdict == "refused"
