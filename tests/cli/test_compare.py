"""`compare` says in what runs differ, and measures them on the samples they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dllm_bench.api.comparison import RunComparison
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import from_columns
from dllm_bench.store.record import RunRecord
from scripts.check_reference import reference_records


@pytest.fixture(scope="module")
def records() -> list[RunRecord]:
    """Return three runs of LoPA on one model and benchmark."""
    alike = (
        record
        for record in reference_records()
        if (record.spec.label, record.spec.model.name, record.spec.benchmark.name)
        == ("lopa", "tiny-d2f-dream-instruct-free", "minigsm_free")
        and record.spec.repeats == 1
    )
    return [next(alike), next(alike), next(alike)]


def first_rows(record: RunRecord, rows: slice) -> RunRecord:
    return replace(record, columns={name: values[rows] for name, values in record.columns.items()})


def row(lines: Sequence[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"{name} ")).split()


def test_settings_that_differ_are_shown_with_the_values_of_each_run(records) -> None:
    lines = list(RunComparison(tuple(records)).lines())
    k = [str(record.spec.decoder["explore"]["k"]) for record in records]
    assert len(set(k)) > 1
    assert row(lines, "explore.k")[1:] == k
    assert not any(line.startswith("schedule.block ") for line in lines)


def test_metrics_are_those_of_the_shared_samples(records: list[RunRecord]) -> None:
    a, b = first_rows(records[0], slice(0, 40)), first_rows(records[1], slice(20, 60))
    lines = list(RunComparison((a, b)).lines())
    assert "metrics over 20 shared samples" in lines
    shared = {name: values[20:] for name, values in a.columns.items()}
    expected = measure("tpf/emitted", from_columns(shared))
    assert row(lines, "tpf/emitted")[1] == f"{expected:.3f}"
