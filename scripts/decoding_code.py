"""Digests of the code that decides tokens, so that no file of it changes without a note.

    .venv/bin/python -m scripts.decoding_code                      # which files changed
    .venv/bin/python -m scripts.decoding_code --note "moved only"  # write: tokens stay equal, why
    .venv/bin/python -m scripts.decoding_code                      # write, after DECODING_VERSION

Covered are core, decoding, methods and models. A digest is of a file's syntax tree without
docstrings, or of what a yaml file holds, so comments and layout do not count. `decoding_code.txt`
holds the version, the notes since it was raised, and a line per file; after a merge conflict in it,
take either side and run this again.
`scripts.check_reference` shows whether tokens stay equal.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
from pathlib import Path
from typing import Any

import yaml

from dllm_bench import DECODING_VERSION
from dllm_bench.paths import PACKAGE

FILE = Path(__file__).with_suffix(".txt")
FOLDERS = ("core", "decoding", "methods", "models")
NOTE, VERSION = "note: ", "DECODING_VERSION "
DIGITS = 16
COMMAND = 'python -m scripts.decoding_code --note "WHY TOKENS STAY EQUAL"'


def shape(node: Any) -> Any:
    """Return a syntax tree as nested lists without docstrings; equal in all Python versions."""
    if isinstance(node, list):
        return [shape(one) for one in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = dict(ast.iter_fields(node))
    body = parts.get("body")
    first = body[0] if isinstance(body, list) and body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        parts["body"] = body[1:]
    named = [[name, shape(part)] for name, part in parts.items() if part not in (None, [])]
    return [type(node).__name__, *named]


def digest(text: str, suffix: str = ".py") -> str:
    """Digest of a module's code, or of the content of a yaml file."""
    content = shape(ast.parse(text)) if suffix == ".py" else yaml.safe_load(text)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:DIGITS]


def digests(package: Path = PACKAGE) -> dict[str, str]:
    """Return file, below the package -> digest."""
    every = (path for folder in FOLDERS for path in (package / folder).rglob("*"))
    files = sorted(path for path in every if path.suffix in (".py", ".yaml"))
    return {
        path.relative_to(package).as_posix(): digest(path.read_text("utf-8"), path.suffix)
        for path in files
    }


def read(file: Path = FILE) -> tuple[int, list[str], dict[str, str]]:
    """Return (version, notes, file -> digest) as written last."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    version = next((line.split()[1] for line in lines if line.startswith(VERSION)), "0")
    notes = [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]
    rest = (line.split() for line in lines if not line.startswith((NOTE, VERSION)))
    return int(version), notes, {pair[0]: pair[1] for pair in rest if len(pair) == 2}


def changed(stored: dict[str, str], now: dict[str, str]) -> list[str]:
    """Files whose code differs, is new or is gone."""
    return sorted(name for name in stored | now if stored.get(name) != now.get(name))


def problem(file: Path = FILE, package: Path = PACKAGE) -> str:
    """Return which files changed without a note, and what to do; empty if none did."""
    version, _, stored = read(file)
    names = changed(stored, digests(package))
    if not names and version == DECODING_VERSION:
        return ""
    return (
        f"The code that decides tokens changed in {', '.join(names) or 'DECODING_VERSION'} since "
        f"{file.name} was written. If the same settings can give other tokens, raise "
        "DECODING_VERSION in dllm_bench/__init__.py and run `python -m scripts.decoding_code`; "
        f"else run `{COMMAND}`. Commit the file it writes."
    )


def main(arguments: list[str] | None = None, file: Path = FILE, package: Path = PACKAGE) -> int:
    """Write the digests if the version was raised or a note says why it was not; else 2."""
    parser = argparse.ArgumentParser(description="Digests of the code that decides tokens.")
    parser.add_argument("--note", default="", help="one line: why tokens stay equal")
    note = " ".join(parser.parse_args(arguments).note.split())
    version, notes, stored = read(file)
    told = problem(file, package)
    if not told:
        return 0
    if version == DECODING_VERSION and not note:
        print(told, file=sys.stderr)
        return 2
    kept = notes if version == DECODING_VERSION else []
    now = digests(package)
    lines = [f"{VERSION}{DECODING_VERSION}", *(f"{NOTE}{one}" for one in [*kept, note] if one)]
    lines += [f"{name} {value}" for name, value in now.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{file.name}: {len(changed(stored, now))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
