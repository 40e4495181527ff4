"""Two tiers of tests: `make test` runs a covering part, `make test-all` all of it.

`covering` keeps a part of a long list of cases in the default tier and gives the marker
`exhaustive` to the rest; `covering_pairs` picks combinations so that any two choices of different
slots meet in at least one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest


def covering(step: int, cases: Iterable[Any], often: int = 3) -> list[Any]:
    """Return all cases: every `step`-th in the default tier, of the others every `often`-th in the
    whole suite, and what is left with `-m drill`. A tuple is a case of several arguments."""
    found = []
    for index, case in enumerate(cases):
        later = pytest.mark.drill if index % often else pytest.mark.exhaustive
        arguments = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*arguments, marks=later) if index % step else case)
    return found


def covering_pairs(
    *slots: Iterable[Any], fits: Callable[[Mapping[int, Any]], bool] | None = None
) -> list[list[Any]]:
    """Return combinations of one value a slot. Any two values that fit meet in one of them, where
    the other slots have values that fit both.

    fits: whether two values, by the number of their slot, fit; without it, all do.
    """
    choices = [list(slot) for slot in slots]
    values = [(slot, k) for slot, of_slot in enumerate(choices) for k in range(len(of_slot))]

    def fit(*pair: tuple[int, int]) -> bool:
        return fits is None or fits({slot: choices[slot][k] for slot, k in pair})

    pairs = {pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0] and fit(*pair)}
    compatible = {
        one: {other for other in values if {(one, other), (other, one)} & pairs} for one in values
    }

    def completed(row: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
        """Return a whole row, or None: the slot with the fewest values comes first, and in it the
        value that meets most others for the first time."""
        fitting = set.intersection(*(compatible[one] for one in row))
        taken = {slot for slot, _ in row}
        is_open = [slot for slot in range(len(choices)) if slot not in taken]
        if not is_open:
            return sorted(row)
        of_slots = ([one for one in sorted(fitting) if one[0] == slot] for slot in is_open)
        fewest = min(of_slots, key=len)
        fewest.sort(key=lambda one: -sum(tuple(sorted((one, other))) in pairs for other in row))
        return next(filter(None, (completed([*row, one]) for one in fewest)), None)

    rows = []
    for pair in sorted(pairs):
        if pair in pairs and (row := completed(list(pair))):
            rows.append([choices[slot][k] for slot, k in row])
            pairs.difference_update(combinations(row, 2))
    return rows
