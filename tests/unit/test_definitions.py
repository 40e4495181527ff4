"""The one registry: every number is found by its name, says what it counts, and is its own name."""

from __future__ import annotations

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.definitions import DEFINITIONS, FAMILIES, definition, measure, measure_all
from tests.sample_stats import drafted, interval, sample

EVERY = [*DEFINITIONS, *(f"{name}@{k}" for name in FAMILIES for k in (1, 7))]


@pytest.mark.parametrize("name", EVERY)
def test_every_definition_says_what_it_counts(name: str) -> None:
    entry = definition(name)
    assert entry.name == name
    assert entry.unit
    assert len(entry.text) > 20
    if name.startswith(("tpf/", "tps/")):
        assert any(word in entry.text for word in ("mean", "ratio of sums", "fastest"))


@pytest.mark.parametrize(
    "name",
    "tpf  tpf/emitted@1  acceptance/conditional  acceptance/conditional@0  acceptance/conditional@ "
    "acceptance/conditional@two  acceptance/conditional@-1  calibration/x@1".split(),
)
def test_an_unknown_name_is_a_sentence_that_lists_the_nearest(name: str) -> None:
    with pytest.raises(
        DllmBenchError, match=r"no metric .*Choose one of: .* \(the nearest of \d+\)"
    ):
        definition(name)


def test_a_summary_holds_all_that_is_not_of_a_position() -> None:
    assert measure_all([sample()]).keys() == DEFINITIONS.keys()
    assert measure_all([sample()])["acceptance/length"] is None
    assert measure_all([drafted([(3, 1, 2)])])["acceptance/length"] == 2.0
    assert set(measure_all([]).values()) == {None}


@pytest.mark.parametrize("name", EVERY)
def test_without_samples_there_is_no_interval(name: str) -> None:
    assert interval(name, []) is None
    assert measure(name, []) is None
