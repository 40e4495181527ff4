"""HTML by small functions, for the pages of the report.

`el` escapes every text that is not `Html` already, so what a model wrote stays text. `page` is the
frame all pages share; its policy lets a browser load nothing but the site's own files, and it works
from file:// as from a server. `data` is JSON that is safe inside a page and in a script of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

POLICY = "default-src 'none'; img-src 'self' file:; style-src 'self' file:; script-src 'self' file:"
VOID = ("input", "img", "link", "meta")  # elements without an end
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


class Html(str):
    """Text that is markup."""


def el(name: str, attributes: Mapping[str, object] | None = None, *inside: str) -> Html:
    """One element. An attribute of None or False is left out, one of True has no value."""
    kept = {key: value for key, value in (attributes or {}).items() if value not in (None, False)}
    text = "".join(
        f" {key}" if value is True else f' {key}="{escape(str(value))}"'
        for key, value in kept.items()
    )
    return Html(f"<{name}{text}>" + ("" if name in VOID else f"{join(inside)}</{name}>"))


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other, plain text escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def link(address: str, *inside: str) -> Html:
    """A link, or what would be in it where there is no address."""
    return el("a", {"href": address}, *inside) if address else join(inside)


def data(value: Any) -> str:
    """Plain data as a JavaScript expression in ASCII, without characters that mean something to a
    page."""
    return json.dumps(value, separators=(",", ":")).translate(UNSAFE)


@dataclass(frozen=True)
class Column:
    """A column of a `grid`. number: right, sorted by value; wide: may take what is left."""

    title: str
    number: bool = False
    wide: bool = False

    @property
    def attributes(self) -> dict[str, object]:
        return {"class": " ".join(self.classes) or None}

    @property
    def classes(self) -> list[str]:
        return [name for name in ("number", "wide") if getattr(self, name)]


def grid(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], label: str, name: str = ""
) -> Html:
    """A table whose columns can be sorted; `name` is how a `filters` refers to it."""
    heads = [
        el("th", {**column.attributes, "scope": "col"}, el("button", {"type": "button"}, title))
        if (title := column.title)
        else el("td")
        for column in columns
    ]
    lines = [
        el("tr", {}, *(el("td", c.attributes, text) for c, text in zip(columns, row, strict=True)))
        for row in rows
    ]
    table = el(
        "table",
        {"class": "grid", "id": name or None, "data-sortable": True, "aria-label": label},
        el("thead", {}, el("tr", {}, *heads)),
        el("tbody", {}, *lines),
    )
    return scroll(table, label)


def scroll(inside: str, label: str) -> Html:
    """A box that scrolls sideways, by keyboard too."""
    return el(
        "div", {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": label}, inside
    )


def filters(name: str, column: int, options: Iterable[str], what: str) -> Html:
    """Fields that narrow the grid `name`: words anywhere in a row, and a value of one column."""
    choices = (el("option", {"value": option}, option) for option in options)
    return el(
        "form",
        {"class": "filters", "data-filters": name, "role": "search"},
        el("label", {}, "Search ", el("input", {"type": "search", "name": "words"})),
        el(
            "label",
            {},
            f"{what} ",
            el(
                "select",
                {"name": "value", "data-column": column},
                el("option", {"value": ""}, "all"),
                *choices,
            ),
        ),
        el("output", {"class": "soft", "aria-live": "polite"}),
    )


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and values, one a line."""
    items = (el("div", {}, el("dt", {}, name), el("dd", {}, value)) for name, value in pairs)
    return el("dl", {"class": "facts"}, *items)


def section(title: str, *inside: str, name: str | None = None) -> Html:
    """A part of a page under its heading."""
    return el("section", {"id": name}, el("h2", {}, title), *inside)


@dataclass(frozen=True)
class Page:
    """A page of the site: where it lies below the root, its title, what leads to it."""

    address: str
    title: str
    crumbs: Sequence[tuple[str, str]] = field(default=())  # (text, address below the root)

    @property
    def up(self) -> str:
        """The way to the root."""
        return "../" * self.address.count("/")

    def __call__(self, *inside: str) -> str:
        """The whole document."""
        up = self.up
        crumbs = [("report", "index.html"), *self.crumbs]
        trail = [el("li", {}, link(up + address, text)) for text, address in crumbs]
        here = el("li", {"aria-current": "page"}, self.title)
        top = self.address == "index.html"
        head = el(
            "head",
            {},
            el("meta", {"charset": "utf-8"}),
            el("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
            el("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            el("title", {}, f"{self.title} · dllm-bench"),
            el("link", {"rel": "stylesheet", "href": f"{up}static/site.css"}),
            el("link", {"rel": "icon", "href": f"{up}static/icon.svg", "type": "image/svg+xml"}),
            el("script", {"src": f"{up}static/site.js", "defer": True}),
        )
        skip = el("a", {"class": "skip", "href": "#main"}, "Skip to the content")
        nav = el("nav", {"aria-label": "Where you are"}, el("ol", {}, *trail, here))
        body = el("body", {}, skip, "" if top else nav, el("main", {"id": "main"}, *inside))
        return f"<!doctype html>\n{el('html', {'lang': 'en'}, head, body)}\n"
