"""A table on a real SLURM cluster of one node: `pytest -m slurm`.

Four runs as one array: one job is queued again by hand, one preempted and then told that its time
is over, one dies for good, one is preempted while it starts. All but the dead one are sealed, and
no finished sample is decoded twice. Beside that, jobs that wait for others, and Hydra's multirun.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dllm_bench.core.request import Generation, Request
from dllm_bench.launch import slurm
from dllm_bench.launch.slurm import submit
from dllm_bench.runs.runner import run
from dllm_bench.store.groups import Hardware
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import RunState, Store, read_samples
from dllm_bench.tables.fill import send
from dllm_bench.tables.frame import build
from dllm_bench.tables.plan import distinct_runs
from dllm_bench.tables.render import is_empty
from tests.resume import fakes
from tests.resume.drill import Logged, lives
from tests.tables.builders import TINY, planned_small, small_table

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900), pytest.mark.xdist_group("slurm")]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "slurm_local.sh"
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
SETTINGS = ["timeout_min=10", "partition=low"]
SAMPLES = 20
CORES = "6"  # all that the cluster has
RESTS = 2  # looks at the queue, half a second apart, between two lives of a job
TOLD = "Caught signal SIGUSR2"
AT = "item-3"  # where a run waits or dies
LONG_S = 600.0
WAITS = {"requeued": 1, "timed-out": 2}  # the last one is preempted before
STARTING = "starting"
FATES = (*WAITS, "dead", STARTING)  # in the order of the array's tasks


# --- what befalls the runs: jobs import this module ----------------------------------------------


@dataclass
class Fated(fakes.FakeDecoder):
    """Meets its fate at one request."""

    fate: str = ""
    folder: Path = Path()

    def generate(self, model: Any, request: Request) -> Generation:
        if request.id == AT:
            self.meet()
        return super().generate(model, request)

    def meet(self) -> None:
        lives = len(list(self.folder.glob(f"{self.fate}.life-*")))
        if self.fate == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if lives < WAITS.get(self.fate, 0):
            mark(self.folder, self.fate, lives + 1).touch()
            time.sleep(LONG_S)


def mark(folder: Path, fate: str, life: int) -> Path:
    """There once the run waits, in its n-th life."""
    return folder / f"{fate}.life-{life}"


@dataclass
class Fates:
    """The decoder of each run, by the run's hash; slow to read in the first life of one."""

    by_hash: dict[str, str]
    folder: Path

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        fate = FATES[int(os.environ.get("SLURM_ARRAY_TASK_ID", 0))]
        if fate == STARTING and not mark(self.folder, fate, 1).exists():
            mark(self.folder, fate, 1).touch()
            time.sleep(LONG_S)

    def __call__(self, spec: RunSpec) -> Logged:
        fate = self.by_hash[spec.identity_hash]
        return Logged(Fated(fate=fate, folder=self.folder), self.folder / f"{fate}.log")


# --- the cluster ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Yield a cluster in a folder of its own; jobs put off after a requeue start at once."""
    pytest.importorskip("submitit", reason="jobs are sent with the extra [slurm]")
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        pytest.skip(f"{absent[0]} is not installed; see scripts/slurm_local.sh install")
    folder = tempfile.mkdtemp(prefix="slurm-")
    started = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True)
    if started.returncode:
        subprocess.run([SCRIPT, "stop", folder])
        pytest.skip(f"no cluster could be started: {started.stderr.strip()}")
    patch, over = pytest.MonkeyPatch(), threading.Event()
    patch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.chdir(ROOT)
    thread = threading.Thread(target=hurry, args=(over,), daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()
    patch.undo()
    subprocess.run([SCRIPT, "stop", folder], check=True)


def slurm_command(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def hurry(over: threading.Event) -> None:
    """Let a job start again soon, where SLURM lets it rest for two minutes; not at once, since the
    node refuses a job whose last life it has not yet ended."""
    waits: Counter[str] = Counter()
    while not over.wait(0.5):
        pending = slurm_command("squeue", "-h", "-r", "-t", "PD", "-o", "%i %A %r").splitlines()
        resting = dict(line.split()[:2] for line in pending if line.endswith(" BeginTime"))
        waits = Counter({job: waits[job] + 1 for job in resting})
        for job, number in resting.items():
            living = slurm_command("scontrol", "listpids", number).splitlines()[1:]
            if waits[job] > RESTS and not living:
                slurm_command("scontrol", "update", f"JobId={job}", "StartTime=now")


def tell_that_time_is_over(ticket: slurm.JobTicket, life: int) -> None:
    """Tell a job that its time is over; SLURM does when it looks at the clock, or ends the job."""
    log, end = Path(ticket.log), 0.0
    while log.read_text().count(TOLD) < life:
        if time.monotonic() > end:
            slurm_command("scancel", "--signal=USR2", ticket.job)
            end = time.monotonic() + 20.0
        time.sleep(0.2)


def until(true: Callable[[], Any], what: str, within_s: float = 300.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, f"no {what}: {slurm_command('squeue', '-r')}"
        time.sleep(0.2)


class Sweep(NamedTuple):
    """Runs of a table, sent as one array."""

    store: Store
    folder: Path
    specs: dict[str, RunSpec]
    tickets: dict[str, slurm.JobTicket]


@pytest.fixture(scope="module")
def sweep(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Return the array, after one job was queued again by hand and all that ran were preempted."""
    folder = tmp_path_factory.mktemp("sweep")
    store = Store(folder / "runs")
    runs = distinct_runs(planned_small(store, TINY))[: len(FATES)]
    specs = {fate: r.spec for fate, r in zip(FATES, runs, strict=True) if r.spec}
    hashes = {spec.identity_hash: fate for fate, spec in specs.items()}
    deps = replace(fakes.deps(), decoder=Fates(hashes, folder))
    assert f"submitted {len(FATES)} runs as one array" in send(runs, store, SETTINGS, deps)[0]
    tickets = {hashes[key]: ticket for key, ticket in slurm.SlurmJobs.of(store).tickets.items()}
    for fate in WAITS:
        until(mark(folder, fate, 1).exists, f"the first life of {fate}")
    slurm_command("scontrol", "requeue", tickets["requeued"].job)
    until(mark(folder, STARTING, 1).exists, "the start of the one that is preempted then")
    slurm_command("sbatch", "-p", "high", "-n", CORES, "-o", "/dev/null", "--wrap", "sleep 1")
    until(mark(folder, "timed-out", 2).exists, "the second life of the one to be timed out")
    return Sweep(store, folder, specs, tickets)


def test_a_job_waits_for_what_it_reads(sweep: Sweep, tmp_path: Path) -> None:
    """While one job of the sweep waits to be told that its time is over."""
    store, hardware = Store(tmp_path / "runs"), Hardware({"device": "cpu", "threads": 1})

    def job(command: str, after: Sequence[str] = ()) -> list[str]:
        own = {"store": store, "hardware": hardware, "changes": SETTINGS, "after": after}
        started: Any = partial(subprocess.run, command, shell=True, check=True, cwd=tmp_path)
        return [sent.job_id for sent in submit({command: started}, **own)]

    made, failed = job("sleep 1; touch model"), job("exit 1")
    job("cp model result", made)
    job("touch never", failed)
    assert slurm.wait_for_jobs(store) == []
    assert (tmp_path / "result").exists()
    assert not (tmp_path / "never").exists(), "not begun, since what it waits for failed"


def test_a_multirun_is_an_array(sweep: Sweep, tmp_path: Path, command) -> None:
    """Two runs that share a folder are one job, which gives both."""
    launcher = "hydra/launcher=slurm hydra.launcher.partition=low hardware=cpu"
    swept = f"decoder=vanilla limit=1,2 benchmark.max_new_tokens=32 paths.results={tmp_path}"
    said = command(f"run -m {swept} {launcher}", here=False)
    assert [entry.done for entry in Store(tmp_path / "runs").entries()] == [2], "one folder"
    assert re.findall(r"^minigsm/.*: done, (\d) samples", said, re.M) == ["1", "2"]
    assert "submitted 1 runs as one array" in said


def test_a_table_survives_what_befalls_its_jobs(sweep, tmp_path) -> None:
    store, folder, specs, sent = sweep
    tell_that_time_is_over(sent["timed-out"], life=2)
    failed = slurm.wait_for_jobs(store, {spec.identity_hash for spec in specs.values()})

    log = Path(os.environ["SLURM_CONF"]).parent / "log" / "slurmctld"  # of what was done with jobs
    assert len(failed) == 1 and sent["dead"].log in failed[0], log.read_text()
    planned = planned_small(store, TINY)
    cells = list(build(small_table(), TINY, planned).cells.itertuples())
    scores = [cell for cell in cells if cell.definition == "score"]  # clocks here are fakes
    full = {cell.planned.run.spec for cell in scores if not is_empty(cell)}
    assert full == {*specs.values()} - {specs["dead"]}
    dead = [cell for cell in cells if cell.planned.run.spec == specs["dead"]]
    assert all(is_empty(cell) and sent["dead"].log in cell.reason for cell in dead)
    assert Path(sent["dead"].log).exists()
    assert [r.state for r in distinct_runs(planned)].count("failed") == 1
    told = {fate: Path(ticket.log).read_text() for fate, ticket in sent.items()}
    assert "REQUEUE" in told["requeued"], "SLURM itself says so"
    assert TOLD in told["timed-out"] and TOLD in told[STARTING]
    for fate, spec in specs.items():
        mine = lives(folder / f"{fate}.log")
        finished = [key for keys in mine[:-1] for key in keys[:-1]] + mine[-1]
        assert len(finished) == len(set(finished)), f"{fate}: a finished sample was decoded twice"
        samples = read_samples(store.path(spec))
        if fate == "dead":
            assert store.state(spec) is RunState.PARTIAL and list(samples) == mine[0][:-1]
            continue
        record = store.record(spec)
        assert record is not None
        ended = [len(keys) for keys in [*(keys[:-1] for keys in mine[:-1]), mine[-1]]]
        # a busy machine may end a life while it warms up, before a session is begun
        assert [s.samples for s in record.sessions if s.samples] == [n for n in ended if n]
        assert len(mine) > WAITS.get(fate, 0)
        alone = run(spec, store=Store(tmp_path / "alone"), deps=fakes.deps())
        assert fakes.timeless(record) == fakes.timeless(alone)
        assert len(samples) == SAMPLES
