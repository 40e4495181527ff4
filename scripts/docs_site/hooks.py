"""MkDocs hook: links of docs/ that lead out of it become text, since the site holds docs/ alone.

A link to a file that does not exist is a warning, which ends a strict build.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\.\./([^)#]+)[^)]*\)")
log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page without links to files outside of docs/."""

    def as_text(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (ROOT / path).exists():
            log.warning("%s links to ../%s, which does not exist.", page.file.src_uri, path)
        return text

    return OUTSIDE.sub(as_text, markdown)
