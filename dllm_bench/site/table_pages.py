"""Pages of tables and figures: the rendered table with its numbers leading to pages of runs, a
figure with the points it was drawn from. Nothing is computed here; tables come from
`tables/render_html`, figures and their csv from the figures folder.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from dllm_bench.site.html import Column, Html, Page, el, grid, join, link, section
from dllm_bench.site.run_page import run_address
from dllm_bench.store.spec import SHOWN
from dllm_bench.tables import render_html
from dllm_bench.tables.build import BuiltTable
from dllm_bench.tables.plan import PlannedRun

DOWNLOADS = ("csv", "json", "tex")
RUN = "run"  # column of a figure's csv that names runs
SHOWN_POINTS = 1000  # a heat map has many more


def table_stem(built: BuiltTable) -> str:
    """Where a table's files lie below the root, without ending."""
    profile = "" if built.profile.embedded else f"-{built.profile.name}"
    return f"tables/{built.table.name}{profile}"


def table_page(built: BuiltTable, paged: set[str]) -> str:
    """The table as it is rendered, in the frame of the site."""

    def address(run: PlannedRun) -> str:
        short = run.spec.short if run.spec else ""
        return f"{page.up}{run_address(short)}" if short in paged else ""

    stem = table_stem(built)
    page = Page(f"{stem}.html", built.table.name, [("tables", "index.html#tables")])
    body = Html("\n".join(render_html.body(built, address)))
    return page(el("article", {"class": "table"}, body), downloads(Path(stem).name, DOWNLOADS))


def downloads(name: str, forms: Sequence[str]) -> Html:
    """Links to the other forms of what is shown."""
    links = [part for form in forms for part in (" ", link(f"{name}.{form}", form))]
    return el("p", {"class": "downloads"}, "As files:", *links)


def figure_page(
    stem: str, points: list[dict[str, str]], forms: Sequence[str], paged: set[str]
) -> str:
    """A figure and its points; `stem`: `figures/<profile>/<paper>/<figure>`."""
    name = "/".join(stem.split("/")[-2:])
    page = Page(f"{stem}.html", name, [("figures", "index.html#figures")])
    image = {"src": f"{Path(stem).name}.svg", "alt": f"Figure {name}; its points are listed below"}
    return page(
        el("h1", {}, name),
        el("figure", {"class": "scroll"}, el("img", image)),
        downloads(Path(stem).name, forms),
        section("Points", points_grid(points, paged, page.up)) if points else "",
    )


def points_grid(points: list[dict[str, str]], paged: set[str], up: str) -> Html:
    """The points as a table; a column is of numbers when all its entries are, an empty one is left
    out."""
    names = [name for name in points[0] if any(row[name] for row in points)]
    columns = [Column(name, number=all(is_number(row[name]) for row in points)) for name in names]
    rows = [
        [runs_text(row[name], paged, up) if name == RUN else row[name] or "" for name in names]
        for row in points[:SHOWN_POINTS]
    ]
    rest = len(points) - len(rows)
    more = el("p", {"class": "soft"}, f"{rest} more are in the csv.") if rest else ""
    return join((grid(columns, rows, "Points of the figure"), more))


def runs_text(text: str, paged: set[str], up: str) -> Html:
    """Hashes of runs as links to those that have a page; `up`: the way to the root."""
    parts: list[str] = []
    for run in (text or "").split():
        short = run[:SHOWN]
        address = f"{up}{run_address(short)}" if short in paged else ""
        parts += [link(address, el("code", {}, short)), " "]
    return join(parts)


def is_number(text: str | None) -> bool:
    """Whether an entry is a number, or nothing."""
    try:
        return not text or float(text) == float(text)
    except ValueError:
        return False


def read_points(path: Path) -> list[dict[str, str]]:
    """The rows of a figure's csv; none where there is no csv."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
