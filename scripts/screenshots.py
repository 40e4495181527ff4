"""Take the screenshots of docs/report.md from a finished report, in a headless Chromium.

usage: python -m scripts.screenshots SITE board run=RUN lookahead=RUN#0@3 drafts=RUN#2@7

SITE is the folder of the report; the other words are the pictures to take. A run is a hash as in
the report's list: alone its page, with # the page of a sample (0: the first) after @ forwards.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import tempfile
from base64 import b64decode
from io import BytesIO
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
WIDTH = 1100  # pixels
HEIGHTS = {"board": 1140, "run": 640, "lookahead": 620, "drafts": 620}  # pixels, by picture
COLOURS = 256  # flat pages look the same with so few, and the files are small


def main(site: str, *pictures: str) -> None:
    """Write these screenshots to docs/images."""
    browser_class = runpy.run_path(str(ROOT / "tests" / "site" / "browser.py"))["Browser"]
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    base = Path(site).resolve().as_uri()
    browser = browser_class(binary, Path(tempfile.mkdtemp()))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        name, _, shown = picture.partition("=")
        run, _, place = shown.partition("#")
        sample, _, forwards = place.partition("@")
        page = f"sample.html#{sample}" if place else "index.html"
        browser.size(WIDTH, HEIGHTS[name])
        browser.open(f"{base}/runs/{run}/{page}" if run else f"{base}/{page}")
        browser.wait("document.querySelector('h1')")
        if forwards:
            browser.key("Home")
            browser.key("ArrowRight", times=int(forwards))
        png = b64decode(browser.call("Page.captureScreenshot")["data"])
        taken = Image.open(BytesIO(png)).convert("RGB").quantize(COLOURS)
        taken.save(FOLDER / f"{name}.png", optimize=True)
    browser.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
