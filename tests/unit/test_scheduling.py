"""A run is timed with the scheduling its process began with, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.runs.dependencies import STARTED, Scheduling, restore_scheduling
from dllm_bench.runs.runner import run
from dllm_bench.store.store import Store
from tests.helpers import noting
from tests.resume import fakes
from tests.resume.drill import ended, fork

if STARTED is None or len(STARTED.cores) < 2:
    pytest.skip("needs Linux and two cores", allow_module_level=True)
ORDINARY = 65534


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the scheduling of the tests as it was."""
    yield
    STARTED.apply()


def be_slowed_down() -> None:
    """Do to this process what a hostile program of the same user would."""
    os.sched_setaffinity(0, {min(STARTED.cores)})
    if os.geteuid() == 0:  # another user cannot undo these
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def test_every_forward_is_decoded_with_the_scheduling_of_the_start(tmp_path: Path) -> None:
    decoder, noted = noting(fakes.FakeDecoder(), "generate", keep=lambda *_: Scheduling.now())
    be_slowed_down()
    assert Scheduling.now() != STARTED
    run(fakes.spec(3), store=Store(tmp_path), deps=fakes.deps(decoder=decoder))
    assert {seen for seen, _ in noted} == {STARTED}


def test_what_an_ordinary_user_cannot_undo_is_an_error() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become an ordinary user for a test")

    def be_refused() -> None:
        os.setresuid(ORDINARY, ORDINARY, ORDINARY)
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        with pytest.raises(DllmBenchError, match=r"nice 19.*new process"):
            restore_scheduling()

    assert ended(fork(be_refused)) == 0
