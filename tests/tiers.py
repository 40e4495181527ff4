"""Two tiers of tests: `make test` runs a covering part, `make test-all` all of it.

`covering` keeps a part of a long list of cases in the default tier and gives the marker
`exhaustive` to the rest; `covering_pairs` picks combinations so that any two choices of different
slots meet in at least one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def covering(step: int, cases: Iterable[Any], often: int = 3) -> list[Any]:
    """Return all cases: every `step`-th in the default tier, of the others every `often`-th in the
    whole suite, and what is left with `-m drill`. A tuple is a case of several arguments."""
    return [
        case if index % step == 0 else pytest.param(*_arguments(case), marks=_rest(index, often))
        for index, case in enumerate(cases)
    ]


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def _rest(index: int, often: int) -> pytest.MarkDecorator:
    return pytest.mark.drill if index % often else pytest.mark.exhaustive


def covering_pairs(
    *slots: Iterable[Any], fits: Callable[[Sequence[Any]], bool] | None = None
) -> list[list[Any]]:
    """Combinations of one value a slot that hold every pair of values at least once.

    fits: whether the values of the first slots go together; other pairs are left out.
    """
    return list(AllPairs([list(slot) for slot in slots], filter_func=fits or (lambda _: True)))
