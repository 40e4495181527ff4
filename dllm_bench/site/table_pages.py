"""Pages of tables, figures and findings. Nothing is computed here.

A table is shown as in its own file (`tables/templates`), with its numbers leading to pages of runs.
A figure is shown as it was drawn, with the points of its csv. The findings are the verdicts of
published claims, with prose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape

from dllm_bench.claims.findings import Findings, Paragraph
from dllm_bench.claims.verdict import ClaimVerdict
from dllm_bench.site.pages import Page, RunPages
from dllm_bench.store.spec import SHOWN, slug
from dllm_bench.tables.frame import BuiltTable
from dllm_bench.tables.plan import PlannedRun

DOWNLOADS = ("csv", "json", "tex")  # forms of a table that its page offers
COUNT = "n"  # the column of a figure's csv with the number of samples of a point
SHOWN_DIGITS = 4  # of a number with a fraction; the csv has all
SHOWN_POINTS = 1000  # a heat map has many more
FINDINGS_PAGE = "findings.html"


def table_stem(built: BuiltTable) -> str:
    """Return the path of a table's files below the root of the site, without their endings."""
    profile = "" if built.profile.embedded else f"-{built.profile.name}"
    return f"tables/{built.table.name}{profile}"


def table_page(built: BuiltTable, run_pages: RunPages) -> str:
    """Return the page of a table."""
    stem = table_stem(built)
    page = Page(f"{stem}.html", built.table.name, [("tables", "index.html#tables")])

    def address(run: PlannedRun) -> str:
        return run_pages.link(run.spec.short, page.up).address if run.spec else ""

    files = [(f"{Path(stem).name}.{form}", form) for form in DOWNLOADS]
    return page.render("table_page.html", {"built": built, "address": address, "files": files})


def figure_page(
    stem: str, title: str, points: list[dict[str, str]], forms: Sequence[str], run_pages: RunPages
) -> str:
    """Return the page of a figure. `stem`: `figures/<profile>/<paper>/<figure>`; `points`: of its
    csv."""
    name = "/".join(stem.split("/")[-2:])
    page = Page(f"{stem}.html", name, [("figures", "index.html#figures")])
    rows = [{name: shown_entry(name, row[name]) for name in row} for row in points[:SHOWN_POINTS]]
    names = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    numeric = [all(is_number(row[name]) for row in rows) for name in names]
    view = {
        "name": name,
        "title": title,
        "image": f"{Path(stem).name}.svg",
        "large": f"{Path(stem).name}.{'png' if 'png' in forms else 'svg'}",
        "files": [(f"{Path(stem).name}.{form}", form) for form in forms],
        "columns": [(n, "number" * is_one) for n, is_one in zip(names, numeric, strict=True)],
        "points": rows,
        "points_left_out": len(points) - len(rows),
        "runs": lambda text: [run_pages.link(run[:SHOWN], page.up) for run in text.split()],
    }
    return page.render("figure.html", view)


def shown_entry(name: str, text: str | None) -> str:
    """Return an entry as the page shows it: numbers with a fraction rounded, no n where nothing
    counts."""
    if not text or (name == COUNT and text == "0"):
        return ""
    if "." not in text or not is_number(text):
        return text
    number = float(text)
    return f"{number:.{SHOWN_DIGITS}g}" if abs(number) < 10**SHOWN_DIGITS else f"{number:.0f}"


def is_number(text: str | None) -> bool:
    """Return whether an entry is a number, or empty."""
    try:
        return not text or float(text) == float(text)
    except ValueError:
        return False


def findings_page(found: Findings) -> str:
    """Return the page of the findings."""
    view = {
        "found": found,
        "counts": Counter(str(one.verdict) for one in found.judgements),
        "slug": slug,
        "linked": linked,
        "not_run": str(ClaimVerdict.NOT_RUN),
    }
    return Page(FINDINGS_PAGE, "Findings").render("findings.html", view)


def linked(paragraph: Paragraph) -> Markup:
    """Return the text; each number leads to the page of its table."""
    links = {
        name: Markup('<a href="tables/{}.html">{}</a>').format(table, text) if table else text
        for name, (table, text) in paragraph.numbers.items()
    }
    return Markup(escape(paragraph.text)).format(**links)
