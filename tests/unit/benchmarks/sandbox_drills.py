"""Helpers of the sandbox tests; a drill is a program under tight limits with a time limit.

A drill that needs an isolation step of some kernels names the step, and is skipped elsewhere.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.benchmarks import sandbox
from dllm_bench.benchmarks.sandbox import Limits, ProgramOutcome, execute

DRILL_S = 3.0


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
