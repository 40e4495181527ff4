"""What is sent to SLURM and what is made of its answers, with its commands faked on the PATH."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.cli.main import parse
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import slurm
from dllm_bench.launch.slurm import PackedJob, SlurmCommand, SlurmRun, resources, submit
from dllm_bench.paths import options
from dllm_bench.runs.runner import run
from dllm_bench.store.groups import Hardware, RunConfig
from dllm_bench.store.store import RECORD, RunState, Store
from dllm_bench.tables.fill import send, training
from dllm_bench.tables.plan import TRAINED, CellState, PlannedRun, distinct_runs, with_job
from tests.resume import fakes
from tests.tables.builders import TINY, planned_small

pytest.importorskip("submitit", reason="jobs are sent with the extra [slurm]")
CPU = Hardware({"name": "cpu", "device": "cpu", "threads": 1})
VERSION = {"a": SlurmCommand(("--version",))}


class Cluster:
    """Fake sbatch and squeue: what was sent is kept, what is queued is a file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.queue = folder, folder / "queue"
        sent = f"{folder}/sent"
        sbatch = (
            f"n=$(($(cat {sent} 2>/dev/null || echo 0) + 1)); echo $n > {sent}; for f; do :; done\n"
            f'cp "$f" {folder}/job$n.sh; echo "Submitted batch job $n"'
        )
        for name, body in (("sbatch", sbatch), ("squeue", f"cat {self.queue}"), ("srun", "")):
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        self.says()

    def says(self, *words: str) -> None:
        self.queue.write_text("".join(f"{word}\n" for word in words))

    def flags(self, job: int) -> dict[str, str]:
        text = (self.folder / f"job{job}.sh").read_text()
        return dict(re.findall(r"#SBATCH --([\w-]+)=(.*)", text))

    @property
    def sent(self) -> int:
        return len(list(self.folder.glob("job*.sh")))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    (tmp_path / "bin").mkdir()
    return Cluster(tmp_path / "bin", monkeypatch)


def test_a_table_is_one_array_of_exactly_what_is_missing(cluster, tmp_path) -> None:
    store = Store(tmp_path / "runs")

    def runs() -> list[PlannedRun]:
        return distinct_runs(planned_small(store, TINY))

    first, *others = runs()
    assert first.spec and len(others) == 5
    run(first.spec, store=store, deps=fakes.deps())
    assert "submitted 5 runs as one array, job 1" in send(runs(), store, ["timeout_min=7"])
    flags = cluster.flags(1)
    assert (flags["array"], flags["time"], flags["cpus-per-task"]) == ("0-4%5", "7", "1")
    assert flags["signal"] == "USR2@60" and "gpus-per-node" not in flags
    cluster.says(*(f"1_{i} PENDING" for i in range(5)))
    assert send(runs(), store, [])[0] == "5 runs are queued or running since before"
    assert cluster.sent == 1, "nothing is sent twice"
    assert all("job 1_" in r.reason and "pending" in r.reason for r in runs() if r.open)
    shown = list(slurm.job_lines(store))
    assert len(shown) == 5 and shown[0].endswith("job 1_0 is pending")
    cluster.says("1_0 RUNNING")
    found = runs()
    assert [r.state for r in found].count(CellState.FAILED) == 4, "over, and not sealed"
    over = next(r for r in found if r.state is CellState.FAILED)
    log = tmp_path / ".launch"
    assert re.search(rf"its job 1_\d is over, log: {log}/.*\.err", over.reason)
    assert "submitted 4 runs as one array, job 2" in send(found, store, [])


def test_devices_and_cores_follow_from_the_hardware(cluster: Cluster, tmp_path: Path) -> None:
    hardware = Hardware({"device": "cuda", "threads": 8, "branch_parallel": 4, "replicas": 2})
    assert resources(hardware) == {"cpus_per_task": 64, "gpus_per_node": 8}
    assert resources(CPU) == {"cpus_per_task": 1, "gpus_per_node": None}
    more = ["gpus_per_node=2", "partition=short", "additional_parameters={nice: 5}"]
    submit(VERSION, store=Store(tmp_path / "runs"), hardware=hardware, changes=more, after=["7"])
    flags = cluster.flags(1)
    wanted = {"partition": "short", "gpus-per-node": "2", "nice": "5", "dependency": "afterok:7"}
    assert wanted.items() <= flags.items() and flags["kill-on-invalid-dep"] == "yes"


def test_waiting_ends_with_the_jobs_and_names_the_logs_of_those_that_failed(
    cluster: Cluster, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    monkeypatch.setattr(slurm, "SILENT_S", 0.0)
    store, specs = Store(tmp_path / "runs"), [fakes.spec(3), fakes.spec(4)]
    waiting = {store.path(s).relative_to(store.root).as_posix(): SlurmRun(s, store) for s in specs}
    submit(waiting, store=store, hardware=CPU)
    submit(VERSION, store=store, hardware=CPU)
    cluster.says("1_0 RUNNING", "1_1 PENDING", "2 RUNNING")
    steps = iter(range(9))

    class Watching(slurm.ManyRunsProgress):
        def update(self, title: str, text: str) -> None:
            super().update(title, text)
            if next(steps) == 1:
                run(specs[0], store=store, deps=fakes.deps())
                cluster.says()

    monkeypatch.setattr(slurm, "ManyRunsProgress", Watching)
    failed = slurm.wait_for_jobs(store)
    assert len(failed) == 1 and re.search(r"its job 1_1 is over, log: .*1_1", failed[0])
    said = capsys.readouterr().err
    assert re.search(r"\[1/3\] .*: done", said) and re.search(r"a: its job 2 is over, log: ", said)
    more = SlurmRun(replace(specs[0], limit=5), store)
    submit({next(iter(waiting)): more}, store=store, hardware=CPU)
    asked = {more.spec.identity_hash}
    assert "job 3 is over" in slurm.wait_for_jobs(store, asked)[0], "sealed with fewer items"
    (cluster.folder / "squeue").write_text("#!/bin/sh\nexit 1\n")
    for asks in (slurm.wait_for_jobs, lambda store: send([], store, [])):  # a run may be queued
        with pytest.raises(DllmBenchError, match="SLURM does not answer"):
            asks(store)
    asked = PlannedRun((), CellState.PARTIAL, "", "half", specs[1])
    told = with_job(asked, slurm.SlurmJobs.of(store))
    assert told.state is CellState.PARTIAL and "log of job 1_1" in told.reason, "SLURM is silent"


def test_a_job_makes_the_run_and_can_be_queued_again(tmp_path: Path) -> None:
    store, spec = Store(tmp_path / "runs"), fakes.spec(3)
    job = SlurmRun(spec, store, fakes.deps())
    (sent,) = submit({"a": job}, store=store, hardware=CPU, cluster="debug")
    assert sent.result() is None
    assert store.state(spec) is RunState.SEALED
    packed = PackedJob(b"a pickled job")
    assert packed.checkpoint().function == packed
    (tmp_path / ".launch").rename(tmp_path / "elsewhere")
    (tmp_path / ".launch").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DllmBenchError, match="is a link"):
        submit({"a": job}, store=store, hardware=CPU, cluster="debug")


def test_a_signal_while_a_job_starts_does_not_end_it(cluster: Cluster, tmp_path: Path) -> None:
    """submitit handles it only once it is imported; until then it would kill the process."""
    submit({"job": SlurmCommand(("list",))}, store=Store(tmp_path / "runs"), hardware=CPU)
    sent = (cluster.folder / "job1.sh").read_text()
    (command,) = re.findall(r"(?m)^srun.* (sh -c .*) -u -m submitit", sent)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        code = f"import os; os.kill(os.getpid(), {number.value})"
        subprocess.run(f"{command} -c '{code}'", shell=True, check=True)


def test_without_submitit_a_sentence_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(DllmBenchError, match=r"dllm-bench\[slurm\]"):
        submit({}, store=Store(tmp_path), hardware=CPU)


def test_without_slurm_a_sentence_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DllmBenchError, match=r"did not take 1 jobs .*srun.*--run"):
        submit(VERSION, store=Store(tmp_path), hardware=CPU)
    with pytest.raises(DllmBenchError, match="--slurm partition sets nothing"):
        submit(VERSION, store=Store(tmp_path), hardware=CPU, changes=["partition"])


def test_training_is_sent_before_the_runs_that_read_it(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = f"{TRAINED}sps/tiny-qwen3-cpu.json"
    more = ["decoder/length=hardware_aware", f"decoder.length.profile.source={source}"]
    query = ("model=tiny-qwen3", "decoder=dspark", *more, "hardware=cpu")
    lacking = PlannedRun(query, CellState.UNAVAILABLE, config=RunConfig(compose(query)))
    store = Store(tmp_path / "results" / "runs")
    first, second, *_ = send([lacking], store, [])
    assert first.startswith("submitted job 1: dllm-bench train sps tiny-qwen3 hardware=cpu")
    assert second.startswith("submitted job 2, after 1: dllm-bench run model=tiny-qwen3")
    assert "dependency" not in cluster.flags(1) and cluster.flags(2)["dependency"] == "afterok:1"
    cluster.says("1 RUNNING", "2 PENDING")
    assert send([lacking], store, []) == ["nothing to submit"]
    assert len(list(slurm.job_lines(store))) == 2
    cluster.says("1 RUNNING")
    assert send([lacking], store, [])[0].startswith("submitted job 3, after 1: "), "trained once"


def test_every_trained_file_that_a_table_names_has_its_training(root: Path) -> None:
    folders = (root / "conf" / "table", root / "conf" / "figure")
    files = (file for folder in folders for file in folder.rglob("*.yaml"))
    named = re.compile(rf"{TRAINED}[\w./-]+[\w*]")
    found = {source for file in files for source in named.findall(file.read_text())}
    assert len(found) > 10
    for source in sorted(found):
        models = [m for m in options("model") if source.split("/")[-1].startswith(f"{m}-")]
        config = RunConfig({"model": {"name": max(models, key=len)}})
        arguments = training(source, PlannedRun((), CellState.UNAVAILABLE, config=config))
        assert arguments and str(parse(arguments).out) == source, source


def test_the_command_sends_waits_and_renders(cluster, tmp_path, command) -> None:
    """The jobs of this cluster are over at once, without a trace."""
    said = command("table learn2pd/table6 --limit 1 --submit --wait --slurm timeout_min=9", code=1)
    (count,) = map(int, re.findall(r"submitted (\d+) runs as one array, job 1", said))
    flags = cluster.flags(1)
    assert (cluster.sent, flags["time"], flags["array"].split("%")[0]) == (1, "9", f"0-{count - 1}")
    assert len(re.findall(r"its job 1_\d+ is over, log: ", said)) >= count
    rendered = (tmp_path / "tables" / "learn2pd" / "table6.md").read_text()
    assert "failed" in rendered and "is over, log:" in rendered
    assert len(re.findall(r"its job 1_\d+ is over", command("status"))) == count


def test_a_multirun_is_sent_like_a_table_s_runs(cluster, tmp_path, command) -> None:
    """On a cluster without devices and with small nodes; runs that share a folder are one job."""
    settings = f"model=tiny-llada hardware=cpu paths.results={tmp_path}"
    launcher = "hydra/launcher=slurm hydra.launcher.partition=small"
    swept = "decoder=vanilla,fast_dllm limit=1,2"
    said = command(f"run -m {swept} {settings} {launcher}", code=2, here=False)
    assert "submitted 2 runs as one array, job 1" in said
    flags = cluster.flags(1)
    assert (flags["partition"], flags["cpus-per-task"]) == ("small", "1")
    assert "gpus-per-node" not in flags
    assert len(re.findall(r"dllm-bench: .*its job 1_\d is over, log: ", said)) == 2
    cluster.says("1_0 PENDING", "1_1 RUNNING")
    shown = command("status")
    assert "job 1_0 is pending" in shown and "job 1_1 is running" in shown
    cluster.says()
    store = Store(tmp_path / "runs")
    folder = store.root / slurm.read_tickets(store)[0].what
    folder.mkdir(parents=True)
    (folder / RECORD).write_text("damaged")
    said = command(f"run -m {swept} {settings} {launcher}", code=2, here=False)
    assert "submitted 2 runs as one array, job 2" in said


REFUSED = {
    "Requested node configuration is not available": r"the 1 cores and 0 devices .*threads",
    "CPU count per node can not be satisfied": r"no node has the 1 cores",
    "Invalid generic resource (gres) specification": r"gpus_per_node=null",
    "invalid partition specified: small": r"no partition small; set partition to one",
    "Requested time limit is invalid (missing or exceeds some limit)": r"timeout_min=240 is above",
    "Invalid account or account/partition combination": r"account lab cannot send",
    "Something else {odd}": r"Something else {odd}",
}


@pytest.mark.parametrize("refusal", REFUSED)
def test_a_refusal_of_sbatch_says_what_to_set(refusal, cluster, tmp_path) -> None:
    script = f"#!/bin/sh\necho 'sbatch: error: {refusal}' >&2; exit 1\n"
    (cluster.folder / "sbatch").write_text(script)
    changes = ["partition=small", "account=lab"]
    with pytest.raises(DllmBenchError, match=REFUSED[refusal]) as caught:
        submit(VERSION, store=Store(tmp_path), hardware=CPU, changes=changes)
    assert "hydra.launcher.NAME=VALUE" in str(caught.value)
