"""The check of the reference results reads them, chooses runs, and finds differences."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from scripts import check_reference


def test_one_run_of_each_pair_of_decoder_and_model_is_chosen(monkeypatch) -> None:
    records = list(islice(check_reference.reference_records(), 60))
    monkeypatch.setattr(check_reference, "reference_records", lambda: iter(records))
    chosen = list(check_reference.chosen_records((), every=False))
    pairs = [(record.spec.label, record.spec.model.name) for record in chosen]
    assert len(pairs) == len(set(pairs)) > 1
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
