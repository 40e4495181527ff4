"""Stored results: those of earlier versions are refused where they are read, and rewritten by one
script; another reads the reference results, chooses runs, and finds differences."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import TARGET, find, name_of
from dllm_bench.store.store import Store, read_record
from scripts import check_reference
from scripts.convert_results import FORMER_PATHS, NAMES, convert, renamed

OLD_RUN = Path(__file__).parents[1] / "data" / "run_before_registered_names"


def test_a_run_with_module_paths_is_refused_and_converted(tmp_path: Path) -> None:
    """One record and its folder as version 0.1 sealed them."""
    shutil.copytree(OLD_RUN, tmp_path / "old" / "runs")
    [folder] = (path.parent for path in OLD_RUN.rglob("record.json"))
    with pytest.raises(DllmBenchError, match=r"schema version 3.*scripts\.convert_results"):
        read_record(folder)
    convert(tmp_path / "old", tmp_path / "new")
    store = Store(tmp_path / "new" / "runs")
    [record] = store.records()
    assert store.path(record.spec).name.endswith(record.spec.short)
    assert not folder.name.endswith(record.spec.short) and store.record(record.spec) == record


def test_former_names_are_read_back() -> None:
    plain = [{TARGET: path, "inner": {TARGET: path}} for path in FORMER_PATHS.values()]
    assert renamed(renamed(plain, NAMES), FORMER_PATHS) == plain
    assert all(name_of(find(name)) == name for name in FORMER_PATHS)


def test_one_run_of_each_pair_of_decoder_and_model_is_chosen(monkeypatch) -> None:
    records = list(islice(check_reference.reference_records(), 60))
    monkeypatch.setattr(check_reference, "reference_records", lambda: iter(records))
    chosen = list(check_reference.chosen_records((), every=False))
    pairs = {(record.spec.label, record.spec.model.name) for record in chosen}
    assert len(pairs) == len(chosen) > 1
    label = records[-1].spec.label
    every = list(check_reference.chosen_records((label,), every=True))
    assert [one for one in records if label in f"{one.spec.label} {one.spec.model.name}"] == every


def test_differences_are_counted_by_column_without_times() -> None:
    record = next(check_reference.reference_records())
    assert check_reference.differences(record, record) == {}
    count = next(name for name in record.columns if name.startswith("forwards"))
    time = next(name for name in record.columns if name.endswith(check_reference.TIME_SUFFIXES))
    other = [None, *record.columns[count][1:]]
    changed = replace(record, columns={**record.columns, count: other, time: other})
    assert check_reference.differences(record, changed) == {count: 1}
    shorter = replace(record, columns={name: rows[:4] for name, rows in record.columns.items()})
    assert check_reference.differences(record, shorter) == {}
    less = replace(record, columns={n: rows for n, rows in record.columns.items() if n != count})
    assert check_reference.differences(record, less) == {count: len(record.columns[count])}
