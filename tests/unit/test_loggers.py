"""Mirrors: W&B is told the numbers, and no trouble of W&B reaches the run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

from dllm_bench.cli.main import main
from dllm_bench.runs.loggers import WandbLogger
from dllm_bench.runs.runner import run
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import RunState, Store
from tests.resume import fakes


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def passed_on(offline: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a stand-in of W&B is told when a run begins."""
    seen: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=seen.update))
    return seen


def logged(root: Path, logger: Any, n: int = 2) -> RunRecord:
    """Return a run that this logger follows."""
    return run(fakes.spec(n), store=Store(root), deps=fakes.deps(), logger=logger)


@pytest.mark.usefixtures("offline")
def test_a_killed_and_resumed_run_is_one_offline_folder_with_all_numbers(
    tmp_path, capsys, monkeypatch
) -> None:
    wandb = pytest.importorskip("wandb")
    Summary = wandb.sdk.wandb_summary.Summary
    store, spec = Store(tmp_path), fakes.spec(5)

    class Killed(fakes.FakeDecoder):
        def generate(self, model: Any, request: Any) -> Any:
            if request.id == "item-3":
                raise KeyboardInterrupt
            return super().generate(model, request)

    killed = replace(fakes.deps(), decoder=lambda spec: Killed())
    with pytest.raises(KeyboardInterrupt):
        run(spec, store=store, deps=killed, logger=WandbLogger())
    (first,) = store.path(spec).glob("wandb/offline-run-*")
    time.sleep(1.1)  # W&B's folders are named by the second
    capsys.readouterr()
    log, update = (create_autospec(f, side_effect=f) for f in (wandb.Run.log, Summary.update))
    monkeypatch.setattr(wandb.Run, "log", log)
    monkeypatch.setattr(Summary, "update", update)
    record = logged(tmp_path, WandbLogger(project="test"), 5)
    (folder,) = store.path(spec).glob("wandb/offline-run-*")
    assert folder != first and folder.name.endswith(spec.short)
    assert f"W&B: logged to {folder}; send it with: wandb sync {folder}" in capsys.readouterr().err
    assert [call.kwargs["step"] for call in log.call_args_list] == [1, 2, 3, 4, 5]
    rows, last = [call.args[1] for call in log.call_args_list], update.call_args.args[1]
    columns = record.columns
    for done, row in enumerate(rows, start=1):
        emitted, elapsed = (sum(columns[name][:done]) for name in ("emitted", "seconds"))
        assert row["tpf"] == pytest.approx(emitted / (3 * done))
        assert row["tps"] == pytest.approx(emitted / elapsed, rel=1e-6 * done / elapsed)
        assert row["latency"] == pytest.approx(columns["seconds"][done - 1], abs=1e-6)
        assert row["score"] == pytest.approx(sum(columns["value"][:done]) / done)
    assert (last["score"], last["latency"]) == (record.score.mean, record.summary["latency/mean"])
    assert (last["score/low"], last["score/high"]) == (record.score.low, record.score.high)
    assert {name: last.get(name) for name in record.summary} == record.summary
    (table,) = folder.rglob("*.table.json")
    cells = [*zip(*json.loads(table.read_text())["data"], strict=True)]
    assert cells[0] == (0, 1, 2, 3, 4), "as show --sample counts"
    assert [cells[1], cells[5]] == [tuple(columns[name]) for name in ("id", "verdict")]
    assert cells[6] == pytest.approx(columns["seconds"], abs=1e-6)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("offline")
def test_the_table_has_prompt_target_answer_and_verdict(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    settings = ["model=tiny-llada", "decoder=fast_dllm", "hardware=cpu", "limit=2"]
    assert main(["run", *settings, "logger=wandb", f"paths.results={tmp_path}"]) == 0
    (table,) = tmp_path.rglob("*.table.json")
    plain = json.loads(table.read_text())
    assert plain["columns"] == "sample id prompt target answer verdict seconds".split()
    sample, _, prompt, target, answer, verdict, _ = plain["data"][1]
    assert sample == 1 and prompt.startswith("Question: ") and "#### " in target
    assert "####" in answer and verdict in ("wrong", "correct")


def test_a_run_that_goes_on_online_has_every_sample(offline, tmp_path, monkeypatch) -> None:
    """W&B takes no step that it has been given."""
    steps = list[int]()

    def log(values: Any, step: int, commit: bool) -> None:
        assert step not in steps
        steps.append(step)

    online = Mock(offline=False, url="https://wandb", log=log, summary={})
    monkeypatch.setitem(sys.modules, "wandb", Mock(init=lambda **_: online))
    for n in (4, 8):
        online.step = max(steps, default=-1) + 1
        spec = replace(fakes.spec(4), limit=n)
        record = run(spec, store=Store(tmp_path), deps=fakes.deps(), logger=WandbLogger())
        assert steps == list(range(1, n + 1)) and online.summary["score"] == record.score.mean


OWN = {"entity": "lab", "group": "sweep", "job_type": "pilot", "tags": ["t"]}


@pytest.mark.parametrize(
    ("given", "environment", "told"),
    [
        ({}, {}, {"mode": "offline"}),
        ({}, {"WANDB_API_KEY": "k"}, {"mode": "online"}),
        ({}, {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, {"mode": None}),
        ({"mode": "offline"}, {"WANDB_API_KEY": "k"}, {"mode": "offline"}),
        (OWN, {"WANDB_DIR": "elsewhere"}, {**OWN, "dir": "elsewhere"}),
    ],
)
def test_wandb_is_told_what_runs_are_sorted_by_and_offline_unless_a_key_is_there(
    given, environment, told, passed_on, monkeypatch, tmp_path
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spec = logged(tmp_path, WandbLogger(**given)).spec
    usual = {"id": spec.short, "dir": str(Store(tmp_path).path(spec))}
    told = {**usual, "group": "letters/fake", "job_type": "fake", **told}
    assert {key: passed_on.get(key) for key in told} == told


@pytest.mark.parametrize("at", ["import", "init", "log", "finish"])
def test_a_failure_of_wandb_is_one_warning(at, tmp_path, monkeypatch) -> None:
    wandb = Mock()
    wandb.init.return_value = run = Mock(step=0, offline=False, url="https://wandb")
    broken = {"init": wandb.init, "log": run.log, "finish": run.finish}
    if at in broken:
        broken[at].side_effect = ConnectionError("no route")
    monkeypatch.setitem(sys.modules, "wandb", None if at == "import" else wandb)
    store = Store(tmp_path)
    with pytest.warns(UserWarning, match="W&B logging stopped") as caught:
        logged(tmp_path, WandbLogger(), 4)
    assert len(caught) == 1 and store.state(fakes.spec(4)) is RunState.SEALED
