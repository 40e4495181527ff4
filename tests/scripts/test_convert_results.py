"""Results of earlier versions are refused where they are read, and rewritten by one script."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import TARGET, find, name_of
from dllm_bench.store.store import Store, read_record
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
    assert not folder.name.endswith(record.spec.short)
    assert store.record(record.spec) == record


def test_former_names_are_read_back() -> None:
    plain = [{TARGET: path, "inner": {TARGET: path}} for path in FORMER_PATHS.values()]
    assert renamed(renamed(plain, NAMES), FORMER_PATHS) == plain
    assert all(name_of(find(name)) == name for name in FORMER_PATHS)
