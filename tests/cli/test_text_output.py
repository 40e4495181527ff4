"""Stored runs as lines of text: `status`, `show` and `compare` print what the records hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dllm_bench.api.runs import RunComparison
from dllm_bench.cli import runs, show
from dllm_bench.cli.main import main
from dllm_bench.cli.run import overview
from dllm_bench.core.benchmark import SampleScore, judge_error
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Forward, ForwardKind
from dllm_bench.runs.progress import headline
from dllm_bench.site.run_page import tiles
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.seal import seal
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import LOCK, Store, remove, sealed_record
from tests.figures.builders import sample as decoded
from tests.tables.builders import seal as put
from tests.tables.builders import start


def spec(**changes: Any) -> RunSpec:
    group = {"name": "n"}
    plain = {"model": group, "decoder": group, "benchmark": group, "hardware": group, "label": "d"}
    return RunSpec(**{**plain, **changes})


def sample(name: str) -> SampleRecord:
    """Four positions in two forwards: the last two first."""
    prefill = Forward(ForwardKind.PREFILL, 1, 20, 0, ms=5.0)
    denoise = Forward(ForwardKind.DENOISE, 3, 8, 12, ms=2.5, winner=2)
    return decoded(name, [1, 2, 3, 4], [1, 1, 0, 0], [prefill, denoise])


def record(values: list[float], ungraded: int = 0, **changes: Any) -> RunRecord:
    """Return a sealed run of samples with these scores, and some whose grading failed."""
    samples = [sample(str(i)) for i in range(len(values) + ungraded)]
    scores = {str(i): SampleScore(v, "correct" if v else "wrong", {}) for i, v in enumerate(values)}
    scores |= {str(len(values) + i): judge_error("no sandbox") for i in range(ungraded)}
    environment = {"device": "a machine", "threads": 1, "commit": "0123456789abcdef", "dirty": True}
    allowed = replace(spec(**changes), runtime={"max_judge_errors": ungraded})
    return seal(allowed, samples, scores, [Session(0.0, 2, environment)], 0.0)


def store_of(root: Path, *records: RunRecord) -> Store:
    """Return a store of sealed runs."""
    store = Store(root / "runs")
    for one in records:
        put(store, one)
    return store


def test_summary_names_definition_machine_and_commit() -> None:
    text = "\n".join(show.summary_lines(record([1.0, 0.0])))
    for part in (
        *("score 50.0 [", "correct 1, wrong 1", "tpf/emitted", "a machine, 1 thread(s)"),
        *("0123456789 with local changes", "  hardware.name     n"),
    ):
        assert part in text


def test_comparison_speaks_of_shared_samples_and_calls_no_difference_without_ground() -> None:
    text = str(RunComparison((record([1.0] * 8 + [0.0] * 2), record([1.0] * 7 + [0.0] * 3))))
    assert "difference +10.0 [" in text and "10 shared samples" in text
    assert "no difference is shown (McNemar's exact test, p = 1)" in text
    clear = str(RunComparison((record([1.0] * 20), record([0.0] * 20))))
    assert "the runs differ (McNemar's exact test, p = 1.91e-06)" in clear
    columns = record([1.0, 0.0]).columns
    for values in ([None, None], [None, None]), ([1.0, None], [None, 1.0]):
        sides = [replace(record([1.0, 0.0]), columns={**columns, "value": one}) for one in values]
        assert "no score, since nothing is graded" in str(RunComparison(tuple(sides)))
    shares = str(RunComparison((record([0.5, 0.6] * 10), record([0.4] * 20))))
    assert "the runs differ (the interval of paired resamples excludes 0)" in shares


def test_samples_without_a_grade_are_counted_beside_every_score(tmp_path: Path) -> None:
    one, other = record([1.0, 0.0], ungraded=2), record([1.0, 1.0], seed=1)
    assert "n = 2, 2 not graded)" in "\n".join(show.summary_lines(one))
    assert headline(one).endswith("2 not graded")
    assert "] (2 not graded) and" in str(RunComparison((one, other)))
    (line,) = [line for line in overview([one, other]) if "not graded" in line]
    assert "] 2 not graded" in line
    assert "n = 2, 2 not graded" in str(next(tiles(one)))
    lines = runs.run_lines(store_of(tmp_path, one, other))
    assert sum("] 2 not graded" in line for line in lines) == 1


def test_board_shows_sealed_and_partial_runs_but_compares_only_sealed_ones(tmp_path) -> None:
    store = store_of(tmp_path, record([1.0, 1.0]))
    start(store, spec(seed=1), done=1, total=5)
    lines = list(runs.run_lines(store))
    assert sorted(line.split()[1] for line in lines[1:3]) == ["partial", "sealed"]
    assert any(" 1/5 " in line for line in lines)
    assert any("100.0 [" in line and " 2.00 " in line for line in lines)
    (partial,) = [entry for entry in store.entries() if entry.spec.seed == 1]
    with pytest.raises(DllmBenchError, match="partial"):
        sealed_record(partial)


def test_runs_are_told_apart_chosen_and_sorted(command, tmp_path) -> None:
    scores = enumerate(([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]))
    store = store_of(tmp_path, *(record(values, seed=seed) for seed, values in scores))
    start(store, spec(seed=3), done=10, total=12)

    def rows(*options: str) -> list[Any]:
        return list(json.loads(command("status --json", *options)))

    found = [row["settings"] for row in rows("--sort", "score")]
    assert found[:2] == ["seed 1", "seed 0"] and {*found[2:]} == {"seed 2", "seed 3"}
    assert rows("--sort", "done")[0]["settings"] == "seed 3", "10/12 is more than 2/2"
    assert [row["score"] for row in rows("--where", "seed 2")] == [0.0]
    assert rows("--where", "seed 2", "seed 1") == []
    assert "did you mean 'score'?" in command("status --sort scor", code=2)


def test_a_run_of_a_multirun_is_one_line(tmp_path, capsys) -> None:
    settings = ["model=tiny-llada", "hardware=cpu", "limit=1", "benchmark.max_new_tokens=32"]
    taus = ("decoder.select.tau=0.7,0.9", f"paths.results={tmp_path}")
    for known in ("", "nothing was decoded, looked up"):
        assert main(["run", "-m", "decoder=fast_dllm", *taus, *settings]) == 0
        said = capsys.readouterr()
        one, other, empty, head, *rows = said.out.splitlines()
        assert all(re.match(r"minigsm/tiny-llada/fast_dllm-\w+: done, 1", o) for o in (one, other))
        assert known in one and known in other
        assert not empty and head.split()[-3:] == ["tpf/emitted", "tps/e2e", "settings"]
        assert [row.rpartition("  ")[2] for row in rows] == ["select.tau 0.7", "select.tau 0.9"]
        assert "done" not in said.err


def test_removed_runs_are_gone_and_runs_in_use_stay(command, tmp_path, monkeypatch) -> None:
    store = Store(tmp_path / "runs")
    one, other = (spec(seed=seed) for seed in (0, 1))
    with store.open(one), store.open(other):
        assert "being written by process" in command("runs rm", one.short, code=2)
    command("runs rm", one.short, "nothing", code=2)
    assert store.path(one).is_dir()
    folders, held = store.folders(), []
    with monkeypatch.context() as patch:
        look = Mock(side_effect=lambda _: held.append([(f / LOCK).stat().st_size for f in folders]))
        patch.setattr("dllm_bench.store.files.remove_folder", look)
        remove(folders)
    assert [sizes.count(0) for sizes in held] == [1, 1], "one lock, so one open file, at a time"
    command("runs rm", one.identity_hash, one.short[:9])
    assert [entry.spec for entry in store.entries()] == [other]


def row(lines: Iterable[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"{name} ")).split()


def test_settings_that_differ_are_shown_with_the_values_of_each_run() -> None:
    decoders = ({"schedule": {"block": 4}, "explore": {"k": k}} for k in (1, 3, 7))
    made = tuple(record([1.0, 0.0], decoder=decoder) for decoder in decoders)
    lines = list(RunComparison(made).lines())
    assert row(lines, "explore.k")[1:] == ["1", "3", "7"]
    assert not any(line.startswith("schedule.block ") for line in lines)


def test_scores_and_metrics_are_those_of_the_shared_samples() -> None:
    made = record([0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    columns = {**made.columns, "forwards": [1, 1, 4, 4, 2, 2]}
    halves = [{name: values[i : i + 4] for name, values in columns.items()} for i in (0, 2)]
    first, last = (replace(made, columns=half) for half in halves)
    lines = list(RunComparison((first, last)).lines())
    assert "metrics over 2 shared samples" in lines
    assert row(lines, "tpf/emitted")[1:3] == ["1.000", "1.000"]  # four tokens in four forwards
    assert ": score 100.0 [" in "".join(lines)
