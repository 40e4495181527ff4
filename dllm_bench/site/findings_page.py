"""The page of the findings: verdicts of published claims, with prose. Nothing is computed here."""

from __future__ import annotations

from collections import Counter

from markupsafe import Markup, escape

from dllm_bench.claims.findings import Findings, Paragraph
from dllm_bench.claims.verdict import ClaimVerdict
from dllm_bench.site.pages import Page
from dllm_bench.store.spec import slug

FINDINGS_PAGE = "findings.html"


def findings_page(found: Findings) -> str:
    """The whole page."""
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
