"""Two tiers of tests: `make test` runs a covering part, `make test-all` all of it.

`covering` keeps a part of a long list of cases in the default tier and gives the marker
`exhaustive` to the rest; `tuples_of_three` picks combinations so that any three choices of
different slots meet in at least one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def covering(step: int, cases: Iterable[Any]) -> list[Any]:
    """All cases, of which only every `step`-th is in the default tier."""
    return [
        case if index % step == 0 else pytest.param(case, marks=pytest.mark.exhaustive)
        for index, case in enumerate(cases)
    ]


def tuples_of_three(*slots: Sequence[Any]) -> list[list[Any]]:
    """Combinations of one value a slot that hold every triple of values at least once."""
    return list(AllPairs([list(slot) for slot in slots], n=3))
