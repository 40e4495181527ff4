"""Acceptance by name on rounds that can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.trace import Forward, Kind, Trace
from dllm_bench.metrics import acceptance
from dllm_bench.metrics.acceptance import Round

FIRST = [Round(3, 3, 4), Round(3, 0, 1), Round(1, 1, 2)]
SECOND = [Round(3, 1, 2), Round(0, 0, 1)]


def test_by_hand() -> None:
    facts = [acceptance.count(FIRST), acceptance.count(SECOND)]
    assert acceptance.measure("acceptance/length", facts) == 10 / 5
    assert acceptance.measure("acceptance/length_per_sample", facts) == (7 / 3 + 3 / 2) / 2
    assert acceptance.measure("acceptance/drafts", facts) == 5 / 5
    assert acceptance.measure("acceptance/verify_rate", facts) == 10 / (10 + 5)
    assert acceptance.measure("acceptance/proposed", facts) == 10 / 5
    assert acceptance.survival(facts) == [3 / 4, 1 / 3, 1 / 3]
    assert acceptance.conditional(facts) == [(3 / 4, 4), (1 / 2, 2), (1.0, 1)]


def test_rounds_come_from_trace_and_tokens() -> None:
    rows = [
        Forward(Kind.PREFILL, 1, 5, 0),
        Forward(Kind.DRAFT, 1, 12, 0),
        Forward(Kind.VERIFY, 1, 8, 5, proposed=7, accepted=2),
        Forward(Kind.DRAFT, 1, 10, 5),
        Forward(Kind.VERIFY, 1, 8, 8, proposed=7, accepted=4),
    ]
    born = (0, 2, 2, 2, 4, 4, 4, 4)
    found = acceptance.rounds_of(Trace(rows), born)
    assert found == [Round(7, 2, 3), Round(4, 4, 4)], "an accepted end token cuts the proposal"


def test_nothing_is_undefined() -> None:
    for facts in ([], [acceptance.count([])]):
        assert all(acceptance.measure(name, facts) is None for name in acceptance.DEFINITIONS)
        assert acceptance.survival(facts) == acceptance.conditional(facts) == []
    with pytest.raises(DllmBenchError, match="acceptance/length"):
        acceptance.measure("acceptance/lenght", [])


@given(
    st.lists(
        st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1
    )
)
def test_length_is_one_plus_the_accepted(pairs: list[tuple[int, int]]) -> None:
    facts = [acceptance.count([Round(n, a, a + 1) for n, a in pairs])]
    length = acceptance.measure("acceptance/length", facts)
    assert length == pytest.approx(1 + sum(a for _, a in pairs) / len(pairs))


@given(st.lists(st.integers(0, 5), min_size=1))
def test_length_follows_from_conditional_acceptance(accepted: list[int]) -> None:
    """tau = 1 + sum over k of the product of the first k rates, where all proposals are whole."""
    facts = [acceptance.count([Round(5, a, a + 1) for a in accepted])]
    tau, product = 1.0, 1.0
    for rate, _ in acceptance.conditional(facts):
        product *= rate or 0.0
        tau += product
    assert acceptance.measure("acceptance/length", facts) == pytest.approx(tau)
