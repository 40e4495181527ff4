"""Which panel stands where: pure data, before anything is drawn.

A row of panels per quantity, the paper's below ours where both have one in common; a figure of one
panel has its quantities side by side instead. A place can be empty (None): the paper's figure has
no such panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dllm_bench.figures.points import BuiltFigure, FigurePoint

OURS, THEIRS, EITHER = (True,), (False,), (True, False)
BESIDE = 4  # categories of two panels that have room side by side


@dataclass(frozen=True)
class PanelSlot:
    """One panel: its quantity, its name, and its points, those without a number too."""

    quantity: str
    name: str
    points: tuple[FigurePoint, ...]

    @property
    def numbers(self) -> list[FigurePoint]:
        """The points that can be drawn."""
        return [point for point in self.points if point.y is not None]

    @property
    def muted(self) -> bool:
        """Whether the numbers are the paper's."""
        return any(not point.measured for point in self.numbers)

    @property
    def models(self) -> list[str]:
        """The models measured."""
        return _parts(self.numbers, 0)

    @property
    def tasks(self) -> list[str]:
        """The benchmarks measured."""
        return _parts(self.numbers, 2)

    @property
    def whence(self) -> str:
        """What the numbers are of."""
        if self.muted:
            return f"the paper's ({', '.join(sorted({point.kind for point in self.numbers}))})"
        return " on ".join(filter(None, (", ".join(self.models), ", ".join(self.tasks))))


def _parts(points: Sequence[FigurePoint], part: int) -> list[str]:
    found = {point.source.partition(" on ")[part] for point in points}
    return sorted(found - {""})


def grid(built: BuiltFigure) -> list[list[PanelSlot | None]]:
    """The panels, row by row."""
    quantities, panels = list(built.figure.quantities), panels_of(built)
    if len(panels) > 1 or len(quantities) == 1:
        rows = [
            [_place(built, quantity, panel, kinds) for panel in panels]
            for quantity in quantities
            for kinds in _kinds(built, quantity)
        ]
        few = len(panels) == 1 and len(categories(built)) <= BESIDE
        return [[place for row in rows for place in row]] if few else rows
    shown = {quantity: _kinds(built, quantity) for quantity in quantities}
    return [
        [
            _place(built, quantity, panels[0], kinds[row]) if row < len(kinds) else None
            for quantity, kinds in shown.items()
        ]
        for row in range(max(map(len, shown.values())))
    ]


def _kinds(built: BuiltFigure, quantity: str) -> list[tuple[bool, ...]]:
    """One row for both where no panel is ours and the paper's, else one each."""
    ours, theirs = (
        {p.panel for p in built.points if p.quantity == quantity and p.measured == measured}
        for measured in (True, False)
    )
    return [OURS, THEIRS] if ours & theirs else [EITHER]


def _place(
    built: BuiltFigure, quantity: str, panel: str, kinds: tuple[bool, ...]
) -> PanelSlot | None:
    key = (quantity, panel)
    mine = [p for p in built.points if (p.quantity, p.panel) == key and p.measured in kinds]
    return PanelSlot(quantity, panel, tuple(mine)) if mine else None


def panels_of(built: BuiltFigure) -> list[str]:
    """Panels by name: those of the facet, then those that only readings or the paper have."""
    facet = built.figure.facet_labels(built.figure.draw.panels)
    found = list(dict.fromkeys(point.panel for point in built.points))
    order = [*(name for name in facet if name in found), *(n for n in found if n not in facet)]
    named = [name for name in order if name]
    return named or [""]


def series_of(built: BuiltFigure) -> list[str]:
    """Series that have a point to be drawn, in the order of their facet."""
    found = [point.series for point in built.points if point.y is not None]
    order = [*built.figure.facet_labels(built.figure.draw.series), *built.figure.rows, *found]
    return [name for name in dict.fromkeys(order) if name in found]


def categories(built: BuiltFigure) -> list[str]:
    """Places of an x axis that counts nothing, in the facet's order; none where x is a number."""
    found = [point.x for point in built.points if isinstance(point.x, str)]
    order = [*built.figure.facet_labels(built.figure.draw.x.facet), *found]
    return [x for x in dict.fromkeys(order) if x in found]
