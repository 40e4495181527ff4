"""The index of sealed records: one file, archives without unpacking."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.cli.runs import run_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import cache_file
from dllm_bench.store import archive, index, store
from dllm_bench.store.index import IndexedRun, RecordIndex
from dllm_bench.store.store import Store
from dllm_bench.tables.cost import MeasuredRuns, measured_runs
from scripts.update_reference import REFERENCE, pack, ship_index
from tests.tables.builders import FULL, every_state

PACKED = "runs.tar.xz"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the results of a small table, and a folder of this user's caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    every_state(tmp_path / "results" / "runs", FULL)
    return tmp_path / "results"


def facts(of: MeasuredRuns) -> list[tuple]:
    return [(r.config, r.decoder, r.samples, r.seconds, r.forwards) for r in of.runs]


def shown(found: Store) -> tuple[list[str], list[tuple]]:
    """Return the lines of the list of runs, and facts of those that were measured."""
    return list(run_lines(found)), facts(measured_runs(found))


def test_lists_and_estimates_read_one_file_instead_of_the_records(results, monkeypatch) -> None:
    found = Store(results / "runs")
    before = shown(found)
    assert all(before) and list(found.root.glob(".*")) == []
    assert before[1] == facts(MeasuredRuns.of(found.records()))
    with monkeypatch.context() as closed:
        closed.setattr(store.RunRecord, "from_json", refuse)
        assert shown(found) == before
    (file,) = found.root.rglob(store.RECORD)
    file.write_text("damaged")
    assert measured_runs(found).runs == [], "records count as they are now"


@pytest.fixture
def packed(results: Path, tmp_path: Path) -> Store:
    """Return the results as an archive."""
    (tmp_path / "packed").mkdir()
    pack(results, tmp_path / "packed" / PACKED)
    return Store(tmp_path / "packed" / "runs")


def test_an_archive_is_indexed_and_not_unpacked_again(packed: Store, monkeypatch) -> None:
    before = lines, runs = shown(packed)
    assert any("sealed" in line for line in lines) and runs
    (file,) = packed.root.parent.iterdir()
    monkeypatch.setattr(archive, "_read", refuse)
    assert shown(packed) == before
    file.touch()
    with pytest.raises(DllmBenchError, match="was read"):
        list(run_lines(packed))


@pytest.fixture
def shipped(packed, tmp_path, monkeypatch) -> tuple[Store, list]:
    """Packed runs with an index beside them, and their list; this user's caches are empty."""
    ship_index(packed.root)
    lines = list(run_lines(packed))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    return packed, lines


def test_an_index_of_another_archive_is_not_read(shipped, results, monkeypatch) -> None:
    found, lines = shipped
    pack(results, archive.archive_of(found.root), shown=())
    assert not [line for line in run_lines(found) if line in lines[1:-2]]


@pytest.mark.parametrize("value", [None, 3, "x", {}, [{}], {"run": 1}, {"packed": ["../../x"]}])
def test_an_index_with_values_of_other_types_is_left_out(shipped, value) -> None:
    found, lines = shipped
    place = found.root.with_name(index.SHIPPED)
    plain = json.loads(lzma.decompress(place.read_bytes()))
    names = value["packed"] if isinstance(value, dict) and "packed" in value else None
    values = {key: names or value for key in plain["values"] if names or key != "packed"}
    place.write_bytes(lzma.compress(json.dumps({**plain, "values": values}).encode()))
    assert list(run_lines(found)) == lines and measured_runs(found).runs


@pytest.mark.skipif(not (REFERENCE / PACKED).exists(), reason="no reference results are committed")
def test_the_reference_comes_with_an_index_of_its_records(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Store(REFERENCE / "runs")
    with monkeypatch.context() as closed:
        closed.setattr(archive, "_read", refuse)
        runs = list(RecordIndex(found).sealed())
        assert len(measured_runs(found).runs) > 0
    assert len(runs) == len(found.folders())
    entry = store.read_entry(found.folders()[-1])
    assert replace(runs[-1], is_own=True) == IndexedRun.of(entry.record)


def test_a_run_that_is_gone_leaves_the_index(results: Path) -> None:
    found = Store(results / "runs")
    shown(found)
    [sealed] = [entry for entry in found.entries() if entry.state == "sealed"]
    stored = cache_file(found.root.parent, f"{index.KIND}.json")
    assert len(json.loads(stored.read_text())["values"]) == 1
    store.remove([sealed.path])
    list(run_lines(found))
    assert json.loads(stored.read_text())["values"] == {}


def test_what_is_read_of_the_index_is_what_the_records_hold(results: Path) -> None:
    found = Store(results / "runs")
    for _ in range(2):
        (entry,) = [one for one in RecordIndex(found).entries([]) if one.record]
        whole = found.largest_record(entry.spec)
        columns = {name: whole.columns[name] for name in ("id", "value", "verdict")}
        assert entry.record.columns == columns and entry.record.score == whole.score
        assert entry.spec.to_plain() == whole.spec.to_plain()
        assert entry.spec.identity_hash == whole.identity_hash


def refuse(*_: object) -> Any:
    """Stand in for what must not be called again."""
    raise DllmBenchError("It was read.")
