"""Take the screenshots of docs/report.md from a finished report, in a headless Chromium.

usage: python -m scripts.screenshots SITE MASKED_RUN SPECULATIVE_RUN

SITE is the folder of the report. The runs are hashes as in its list; the first sample of the masked
run and the third of the speculative one are shown.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
WIDTH = 1100  # pixels
COLOURS = 256  # flat pages look the same with so few, and the files are small


def main(site: str, masked: str, speculative: str) -> None:
    """Write all screenshots to docs/images."""
    browser_class = runpy.run_path(str(ROOT / "tests" / "site" / "browser.py"))["Browser"]
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    base = Path(site).resolve().as_uri()
    browser = browser_class(binary, Path(tempfile.mkdtemp()))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, address, height, forwards in (
        ("board", "index.html", 1140, 0),
        ("run", f"runs/{masked}/index.html", 640, 0),
        ("lookahead", f"runs/{masked}/sample.html#0", 620, 3),
        ("drafts", f"runs/{speculative}/sample.html#2", 620, 7),
    ):
        browser.size(WIDTH, height)
        browser.open(f"{base}/{address}")
        browser.wait("document.querySelector('h1')")
        if forwards:
            browser.key("Home")
            browser.key("ArrowRight", times=forwards)
        browser.screenshot(FOLDER / f"{name}.png")
        picture = Image.open(FOLDER / f"{name}.png").convert("RGB").quantize(COLOURS)
        picture.save(FOLDER / f"{name}.png", optimize=True)
    browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
