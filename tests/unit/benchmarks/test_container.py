"""The sandbox in a container, with a fake tool; a real tool is used where it works.

The fake runs on this machine the command that follows the image's name, so everything but the
container itself is real: the job, verdicts through the standard error, stopping.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dllm_bench.benchmarks import sandbox
from dllm_bench.benchmarks.sandbox import Limits
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from tests.benchmark_helpers import evalplus_benchmark, gold, mean

IMAGE = "example/python"
FAKE = Path(__file__).with_name("fake_tool.txt").read_text()
DRILLS = read_yaml(Path(__file__).with_name("drills.yaml"))


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
