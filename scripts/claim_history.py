"""Write every verdict that docs/findings.md ever gave into dllm_bench/claims/history.yaml.

    .venv/bin/python -m scripts.claim_history [LAST_COMMIT]

Each commit of the page is read for the rows of its tables. An entry is written where a claim's
verdict, effect or number of items changed, with the commit whose subject says what changed it.
Claims whose runs were missing get no entry.
"""

from __future__ import annotations

import re
import subprocess
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE, HISTORY = "docs/findings.md", ROOT / "dllm_bench" / "claims" / "history.yaml"
ROW = re.compile(
    r"^\| (?P<cells>.+) \| `(?:dllm-bench claims )?(?P<name>\w+/\w+)[^`]*` \|$", re.MULTILINE
)
"""A row of a claim: the last column is its name, in earlier versions of the page its command."""
NOT_RUN = "not run"
HEAD = "# Every verdict of docs/findings.md; written by `python -m scripts.claim_history`.\n"
Entry = dict[str, str]


def git(*arguments: str) -> str:
    """Return the output of a git command in this checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def rows(page: str) -> Iterator[tuple[str, Entry]]:
    """Yield the name and the table cells of each claim on a findings page."""
    for found in ROW.finditer(page):
        sentence, verdict, effect, items, *_ = found["cells"].split(" | ")
        cells = {"verdict": verdict, "effect": effect, "items": items, "sentence": sentence}
        yield found["name"], cells


def history(until: str = "HEAD") -> dict[str, list[Entry]]:
    """Claim -> its verdicts, oldest first; `until`: the last commit that is read."""
    found: dict[str, list[Entry]] = {}
    last_sentence: dict[str, str] = {}
    commits = git("log", "--reverse", "--abbrev=7", "--format=%h%x09%as%x09%s", until, "--", PAGE)
    for line in commits.splitlines():
        commit, day, subject = line.split("\t")
        for name, cells in rows(git("show", f"{commit}:{PAGE}")):
            if cells["verdict"] == NOT_RUN:
                continue
            before = found.setdefault(name, [])
            last = before[-1] if before else {}
            if any(last.get(key) != cells[key] for key in ("verdict", "effect", "items")):
                entry = {"date": day, "commit": commit, "change": subject, **cells}
                if last_sentence.get(name) == cells["sentence"]:
                    del entry["sentence"]
                last_sentence[name] = cells["sentence"]
                before.append(entry)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("until", nargs="?", default="HEAD", help="the last commit that is read")
    verdicts = history(parser.parse_args().until)
    text = yaml.safe_dump(verdicts, allow_unicode=True, sort_keys=False, width=1000)
    HISTORY.write_text(HEAD + text, encoding="utf-8")
