"""No recorded case is left out unseen: every file is counted, and every case has its test."""

from __future__ import annotations

import json

import pytest

from tests.golden import (  # each asks for its cases when it is imported
    test_cache_traces,
    test_dinfer_traces,
    test_dream_traces,
    test_freedave_traces,
    test_learn2pd_traces,
    test_masked_traces,
    test_official_counts,
    test_revising_traces,
    test_sampler_traces,
)
from tests.golden.cases import ASKED, GOLDEN, known, reason, recorded

REPLAYING = (
    test_cache_traces,
    test_dinfer_traces,
    test_dream_traces,
    test_freedave_traces,
    test_learn2pd_traces,
    test_masked_traces,
    test_official_counts,
    test_revising_traces,
    test_sampler_traces,
)
ELSEWHERE = {"forward"}  # one forward's logits: test_forward
OTHERWISE = {
    "config.json": "a checkpoint",
    "pc_sampler_baseline.json": "token counts that cases of PC-Sampler read",
    "decoder_units.json": "test_dinfer_units",
}
NOT_IMPLEMENTED = "new2026"  # methods without a decoder here
absent = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden traces at {GOLDEN}")


@absent
@pytest.mark.parametrize("file", known())
def test_every_case_of_a_file_has_a_test(file: str) -> None:
    assert REPLAYING
    methods = {case.get("method", "") for case in recorded(file)} - ELSEWHERE
    assert "" in ASKED[file] or methods <= ASKED[file]


@absent
def test_every_recorded_file_is_listed() -> None:
    folders = ("llada", "dream", "samplers", "caches", "dinfer")
    files = [file for folder in folders for file in (GOLDEN / folder).glob("*.json")]
    found = {str(file.relative_to(GOLDEN)) for file in files if file.name not in OTHERWISE}
    assert found == set(known())


@pytest.mark.parametrize("file", known())
def test_every_differing_case_has_a_reason(file: str) -> None:
    cases = recorded(file)
    if len(cases) == known()[file]["cases"]:
        assert all(reason(cases[index]) for index in known()[file].get("differ", ()))


@absent
def test_the_cases_of_methods_that_are_not_implemented_are_counted() -> None:
    count = 0
    for file in (GOLDEN / NOT_IMPLEMENTED).glob("*.json"):
        whole = json.loads(file.read_text())
        count += len(whole if isinstance(whole, list) else whole.get("cases", ()))
    assert count in (0, 400), "docs/decoders.md says how many"
