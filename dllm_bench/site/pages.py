"""Render the pages of the report from the templates in `templates/`: tables, figures, findings.

Other pages have modules of their own (`run_page`, `compare_page`, the first page in `build`). All
compute plain data; the templates lay it out and may be edited without touching Python. Every text
is escaped (Jinja2's autoescape), so what a model wrote stays text.

A table is shown as in its own file (`tables/templates`), with its numbers leading to pages of runs.
A figure is shown as it was drawn, with the points of its csv. Drawings of a results folder may be a
stranger's, so `harmless` turns them into files that cannot execute anything: an SVG, which may
contain scripts, links, style sheets and further documents, is made anew from its shapes only, with
lists of the elements and attributes that drawings of `figures` use. A PNG is copied after checking
that it is one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from math import isnan
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, ParseError

from jinja2 import Environment
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from dllm_bench.claims.findings import Findings, Paragraph
from dllm_bench.claims.verdict import ClaimVerdict
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.site.texts import commit, number, significant
from dllm_bench.store.files import Plain
from dllm_bench.store.record import SHOWN_METRICS
from dllm_bench.store.spec import SHOWN, slug
from dllm_bench.tables.frame import BuiltTable
from dllm_bench.tables.render import environment
from dllm_bench.tables.spec import parse_number

TEMPLATES = Path(__file__).parent / "templates"
FIRST_PAGE = "index.html"
DOWNLOADS = ("csv", "json", "tex")  # forms of a table that its page offers
COUNT = "n"  # the column of a figure's csv with the number of samples of a point
SHOWN_POINTS = 1000  # a heat map has many more
FINDINGS_PAGE = "findings.html"
SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
ELEMENTS = frozenset("svg g defs path use clipPath rect pattern image".split())
ATTRIBUTES = frozenset(
    "id version width height viewBox x y d transform style clip-path fill opacity patternUnits "
    "preserveAspectRatio".split()
)
LINES = {"stroke-linejoin": "round", "stroke-linecap": "butt"}  # of the style sheet, left out
VALUE = re.compile(r"(?:(?<!url)\(|url\(#[\w.-]+\)|(?!url)[\w\s#:;.,%+)-])*", re.IGNORECASE)
IMAGE = re.compile(r"data:image/png;base64,[\w+/=\s]*", re.ASCII)
LEVELS = 32  # nesting depth of elements
PNG_START = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Page:
    """A page of the site.

    address: its path below the root of the site.
    title: shown in the window's title and as the last entry of the trail.
    parents: (text, address below the root) of the pages between the first page and this one.
    runs: short hashes of the runs that have a page.
    """

    address: str
    title: str
    parents: Sequence[tuple[str, str]] = ()
    runs: Set[str] = frozenset()

    @property
    def up(self) -> str:
        """Relative path from the page to the root of the site."""
        return "../" * self.address.count("/")

    def run(self, short: str) -> str:
        """Return the relative address of a run's page, empty if it has none."""
        return f"{self.up}{run_address(short)}" if short in self.runs else ""

    def render(self, template: str, view: Plain) -> str:
        """Return the whole document; `view` is the content that the template lays out."""
        return templates().get_template(template).render(page=self, view=view)


def run_address(short: str) -> str:
    """Return the path of a run's page below the root of the site."""
    return f"runs/{short}/index.html"


@cache
def templates() -> Environment:
    """Load the templates of pages and tables, with filters for numbers and texts, and the names of
    the speeds that lists of runs show.
    """
    found = environment(TEMPLATES)
    found.filters.update(commit=commit, number=number, significant=significant, utc=moment)
    found.filters["css_of_state"] = lambda state: f"state-{slug(state)}"  # of runs or cells
    found.globals.update(zip(("tpf", "tps"), SHOWN_METRICS, strict=True))
    return found


def moment(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Return a moment, in seconds since the epoch, as text."""
    return f"{datetime.fromtimestamp(seconds, UTC):{form}} UTC"


script_json = partial(htmlsafe_json_dumps, separators=(",", ":"))
"""Return plain data as a JavaScript expression in ASCII, without the characters < > & '."""


# --- tables, figures, findings -------------------------------------------------------------------


def table_page(built: BuiltTable, runs: Set[str]) -> str:
    """Return the page of a table. `runs`: those that have a page."""
    stem = f"tables/{built.stem}"
    page = Page(f"{stem}.html", built.table.name, [("tables", "index.html#tables")], runs)
    view = {
        "built": built,
        "address": lambda run: page.run(run.spec.short) if run.spec else "",
        "files": [(f"{Path(stem).name}.{form}", form) for form in DOWNLOADS],
    }
    return page.render("table_page.html", view)


def figure_page(
    stem: str, title: str, points: list[dict[str, str]], forms: Sequence[str], runs: Set[str]
) -> str:
    """Return the page of a figure. `stem`: `figures/<profile>/<paper>/<figure>`; `points`: of its
    csv; `runs`: those that have a page."""
    name = "/".join(stem.split("/")[-2:])
    page = Page(f"{stem}.html", name, [("figures", "index.html#figures")], runs)
    rows = [{name: shown_entry(name, row[name]) for name in row} for row in points[:SHOWN_POINTS]]
    names = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    view = {
        "name": name,
        "title": title,
        "image": f"{Path(stem).name}.svg",
        "large": f"{Path(stem).name}.{'png' if 'png' in forms else 'svg'}",
        "files": [(f"{Path(stem).name}.{form}", form) for form in forms],
        "columns": [(n, "number" * all(is_number(row[n]) for row in rows)) for n in names],
        "points": rows,
        "points_left_out": len(points) - len(rows),
        "runs": lambda text: [run[:SHOWN] for run in text.split()],
    }
    return page.render("figure.html", view)


def shown_entry(name: str, text: str | None) -> str:
    """Return an entry as the page shows it: numbers with a fraction rounded (the csv has all
    digits), no n where nothing counts."""
    if not text or (name == COUNT and text == "0"):
        return ""
    if "." not in text or not is_number(text):
        return text
    return significant(float(text))


def is_number(text: str | None) -> bool:
    """Return whether an entry is a number, or empty."""
    number = parse_number(text or "0")
    return number is not None and not isnan(number)


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


def linked(paragraph: Paragraph, text: str) -> Markup:
    """Return one of its texts; each number leads to the page of its table."""
    links = {
        name: Markup('<a href="tables/{}.html">{}</a>').format(table, number) if table else number
        for name, (table, number) in paragraph.numbers.items()
    }
    return Markup(escape(text)).format(**links)


# --- drawings of others --------------------------------------------------------------------------


def harmless(form: str, content: bytes, name: str) -> bytes:
    """Return the content of a drawing's file in this format; DllmBenchError if it is not in the
    format."""
    try:
        if form == "png" and not content.startswith(PNG_START):
            raise ValueError("it does not begin as a PNG does")
        return shapes_of(content) if form == "svg" else content
    except (ParseError, ValueError, LookupError, RecursionError) as error:
        raise DllmBenchError(
            f"The drawing {name} cannot be shown ({error}); draw the figure again with "
            "`dllm-bench figure`."
        ) from error


def shapes_of(content: bytes) -> bytes:
    """Return an SVG of the shapes of another one; raises if it cannot be read."""
    if b"<!ENTITY" in content:
        raise ValueError("it declares entities")
    root = ElementTree.fromstring(content)
    if root.tag != f"{SVG}svg":
        raise ValueError("it is no SVG")
    paths = {f"#{path.get('id')}" for path in root.iter(f"{SVG}path")}
    drawn = _copy(root, paths, LEVELS)
    drawn.attrib.update(LINES)
    ElementTree.register_namespace("", SVG[1:-1])
    ElementTree.register_namespace("xlink", LINK[1:].partition("}")[0])
    return ElementTree.tostring(drawn, encoding="utf-8", xml_declaration=True)


def _copy(element: Element, paths: set[str], levels: int) -> Element:
    """Return a copy of the element with its allowed parts. `paths`: targets of a `use`; groups are
    excluded, because groups that use groups grow without limit.
    """
    copied = Element(element.tag)
    for key, value in element.attrib.items():
        if key in ATTRIBUTES and VALUE.fullmatch(value):
            copied.set(key, value)
    link = element.get(LINK) or element.get("href") or ""
    if link in paths or (element.tag == f"{SVG}image" and IMAGE.fullmatch(link)):
        copied.set(LINK, link)
    for inner in element if levels else ():
        is_shape = isinstance(inner.tag, str) and inner.tag.removeprefix(SVG) in ELEMENTS
        if is_shape and inner.tag.startswith(SVG):
            copied.append(_copy(inner, paths, levels - 1))
    return copied
