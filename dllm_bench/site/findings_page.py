"""The page of the findings: verdicts of published claims, with prose. Nothing is computed here."""

from __future__ import annotations

from collections import Counter

from markupsafe import Markup, escape

from dllm_bench.claims.findings import HEADS, TESTS, VERDICTS, Findings, Paragraph
from dllm_bench.claims.verdict import ClaimVerdict
from dllm_bench.site.pages import Page
from dllm_bench.store.spec import slug

FINDINGS_PAGE = "findings.html"


def findings_page(found: Findings) -> str:
    """The whole page."""
    classes = ("wide", "", "number", "number", "wide", "")
    counts = Counter(row[HEADS.index("verdict")] for paper in found.papers for row in paper.rows)
    css = {str(verdict): slug(str(verdict)) for verdict in VERDICTS}
    view = {
        "found": found,
        "heads": list(
            zip((h.capitalize() if len(h) > 1 else h for h in HEADS), classes, strict=True)
        ),
        "verdicts": [
            (name, css[name], counts[name], VERDICTS[verdict])
            for verdict in VERDICTS
            if (name := str(verdict)) in counts
        ],
        "classes": css,
        "tests": TESTS,
        "practice": [(one.title, linked(one), one.commands) for one in found.practice],
        "unmeasured": [(one.title, linked(one), one.commands) for one in found.unmeasured],
        "history": [(name, before.split("<br>"), now) for name, before, now in found.history],
        "not_run": str(ClaimVerdict.NOT_RUN),
    }
    return Page(FINDINGS_PAGE, "Findings").render("findings.html", view)


def linked(paragraph: Paragraph) -> Markup:
    """The text; each number leads to the page of its table."""
    links = {
        name: Markup('<a href="tables/{}.html">{}</a>').format(table, text) if table else text
        for name, (table, text) in paragraph.numbers.items()
    }
    return Markup(escape(paragraph.text)).format(**links)
