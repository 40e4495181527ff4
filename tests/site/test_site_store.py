"""The report and the whole store: costs are estimated from all runs, a damaged record has no page.

On made-up results (`builders`); the pages themselves are in `test_site`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.cli.main import main
from dllm_bench.site import build as site_module
from dllm_bench.site.pages import run_address
from dllm_bench.store.cache import PACKED
from dllm_bench.store.store import RECORD, SPEC, Store
from dllm_bench.tables import build as tables
from dllm_bench.tables.build import BuiltTable
from dllm_bench.tables.cost import measured_runs
from scripts.update_reference import pack
from tests.site import builders


def test_costs_are_judged_by_all_sealed_runs_as_the_table_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_by = []

    def build(*plan: Any) -> BuiltTable:
        judged_by.append([known.config for known in plan[3].runs])
        return tables.build(*plan)

    monkeypatch.setattr(site_module, "build_table", build)
    builders.fill(tmp_path)
    builders.make(tmp_path)
    store = Store(tmp_path / "runs")
    every = [known.config for known in measured_runs(store).runs]
    assert judged_by == [every] and len(every) == len(list(store.records()))


def test_a_damaged_record_costs_its_own_page_alone(tmp_path: Path) -> None:
    lost = builders.fill(tmp_path)["lookahead"]
    folder = Store(tmp_path / "runs").path(lost.spec)
    head = {
        "identity_hash": lost.identity_hash,
        "spec": lost.spec.to_plain(),
        "total": builders.SAMPLES_PER_RUN,
    }
    (folder / SPEC).write_text(json.dumps(head))
    (folder / RECORD).write_text("{")
    builders.make(tmp_path)
    assert not (tmp_path / "site" / run_address(lost.spec.short)).exists()
    assert "is no run record" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


def test_a_report_of_packed_runs_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builders.fill(tmp_path)
    packed = tmp_path / "reference"
    packed.mkdir()
    pack(tmp_path, packed / PACKED)
    content = (packed / PACKED).read_bytes()
    hashes = [record.identity_hash for record in Store(tmp_path / "runs").records()]
    assert pack(tmp_path, tmp_path / "some.tar.xz", hashes[:1]) == 1 < len(hashes)
    monkeypatch.setenv("DLLM_BENCH_RESULTS", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(site_module, "names_of", lambda kind: [])
    assert main(["report", "--results", str(packed)]) == 0
    assert capsys.readouterr().out
    assert (tmp_path / "own" / "site" / "index.html").exists()
    assert [path.name for path in packed.iterdir()] == [PACKED]
    assert (packed / PACKED).read_bytes() == content
