"""Render the pages of the report from the templates in `templates/`.

The page modules (`index_page`, `run_page`, …) compute plain data; the templates lay it out and may
be edited without touching Python. Every text is escaped (Jinja2's autoescape), so what a model
wrote stays text. `script_json` is data that is safe inside a page and in a script of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from dllm_bench.site.format import commit, number, significant
from dllm_bench.store.record import SHOWN_METRICS
from dllm_bench.tables.render import environment

TEMPLATES = Path(__file__).parent / "templates"
Plain = dict[str, Any]
"""Data for a template, by the names that it uses."""
FIRST_PAGE = "index.html"
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


@dataclass(frozen=True)
class Page:
    """A page of the site.

    address: its path below the root of the site.
    title: shown in the window's title and as the last entry of the trail.
    parents: (text, address below the root) of the pages between the first page and this one.
    """

    address: str
    title: str
    parents: Sequence[tuple[str, str]] = ()

    @property
    def up(self) -> str:
        """Relative path from the page to the root of the site."""
        return "../" * self.address.count("/")

    @property
    def is_first(self) -> bool:
        """Whether this is the page the report opens with."""
        return self.address == FIRST_PAGE

    @property
    def trail(self) -> list[tuple[str, str]]:
        """(text, address below the root) of all pages that lead to this one."""
        return [("report", FIRST_PAGE), *self.parents]

    def render(self, template: str, view: Plain) -> str:
        """Return the whole document; `view` is the content that the template lays out."""
        return templates().get_template(template).render(page=self, view=view)


@dataclass(frozen=True)
class RunLink:
    """A run as pages refer to it.

    short: the beginning of its hash.
    address: of its page, as seen from the page with the link; empty if the run has no page.
    """

    short: str
    address: str


@dataclass(frozen=True)
class RunPages:
    """Which runs have a page.

    shorts: short hashes of these runs.
    """

    shorts: frozenset[str]

    def link(self, short: str, up: str = "") -> RunLink:
        """Return the link to a run; `up` is the relative path from the page with the link to the
        root."""
        return RunLink(short, f"{up}{run_address(short)}" if short in self.shorts else "")


def run_address(short: str) -> str:
    """Return the path of a run's page below the root of the site."""
    return f"runs/{short}/index.html"


def state_class(state: str) -> str:
    """Return the CSS class of a state of runs or cells."""
    return f"state-{state.replace(' ', '-')}"


@cache
def templates() -> Environment:
    """Load the templates of pages and tables, with filters for numbers and texts, and the names of
    the speeds that lists of runs show.
    """
    found = environment(TEMPLATES)
    found.filters.update(commit=commit, css_of_state=state_class, number=number)
    found.filters.update(significant=significant, utc=moment)
    found.globals.update(zip(("tpf", "tps"), SHOWN_METRICS, strict=True))
    return found


def moment(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Return a moment, in seconds since the epoch, as text."""
    return f"{datetime.fromtimestamp(seconds, UTC):{form}} UTC"


def script_json(value: Any) -> Markup:
    """Return plain data as a JavaScript expression in ASCII, without the characters < > &."""
    return Markup(json.dumps(value, separators=(",", ":")).translate(UNSAFE))
