"""The check of the reference results reads them, chooses runs, and finds differences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts import check_reference


@pytest.mark.exhaustive
def test_one_run_of_each_pair_of_decoder_and_model_is_chosen() -> None:
    chosen = list(check_reference.chosen_records((), every=False))
    pairs = [(record.spec.label, record.spec.model["name"]) for record in chosen]
    assert len(pairs) == len(set(pairs)) > 10
    every = list(check_reference.chosen_records(("lopa",), every=True))
    labels = [f"{record.spec.label} {record.spec.model['name']}" for record in every]
    assert labels and all("lopa" in label for label in labels)


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
