"""Ratchets: no import circle, no class name twice, no word of the old dialect.

Imports inside functions and under TYPE_CHECKING count as imports.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.style.trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "dllm_bench").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
CONF = sorted((ROOT / "conf").rglob("*.yaml"))
PROSE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
READ = [*PACKAGE, *SCRIPTS, *CONF, *PROSE]
HISTORY = {"CHANGELOG.md"}  # names things as they were called when they changed

DIALECT = {
    r"\bkin\b": "say what is similar to what",
    r"\bcrews?\b": "worker group",
    r"\bteam\b": "worker group",
    r"\bShelf\b|\bshelves\b": "cache",
    r"\bglances?\b": "status rows",
    r"\btwins?\b": "the baseline's sample",
    r"\bragged\b": "batch of unequal lengths",
    r"\bside by side\b": "batched, or in one table",
    r"\bwhat is said of\b|\bis said of\b": "name the quantity",
    r"\bwho won\b|\bgoes on with\b": "name the branch",
    r"\bspelled out\b": "written out, instantiated",
    r"\bis asked\b|\bare asked\b": "say who calls what",
    r"\bnobody (?:reads|asks|classed)\b": "say what is not used",
    r"\bin vain\b": "without effect",
    r"\bleft behind\b": "stored",
    r"\bmend(?:s|ed|ing)?\b": "correct, fix",
    r"\bof so many\b|\bso many\b": "give the number or its name",
    r"\bas it goes\b|\bwhile it goes\b": "while it runs",
    r"\ba sentence where\b|\ba sentence that\b|\bin a sentence\b": "an error, a message",
}
"""Pattern -> what to write instead."""


def module_of(path: Path, root: Path = ROOT) -> str:
    """Dotted name of a file."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, known: Iterable[str]) -> Iterator[str]:
    """Modules of `known` that a file imports anywhere, in functions and for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inside = [name for name in names if name in known]
            yield from inside
            if len(inside) < len(names) and node.module in known:
                yield node.module


def circle(files: Iterable[Path], root: Path = ROOT) -> list[str]:
    """Modules that import each other in a circle; empty where there is none."""
    trees = {module_of(path, root): tree_of(path.read_text("utf-8")) for path in files}
    graph = {
        module: {name for name in imported(tree, trees) if name != module}
        for module, tree in trees.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def repeated_classes(files: Iterable[Path]) -> dict[str, list[str]]:
    """Public class names that more than one file defines."""
    places: Mapping[str, list[str]] = defaultdict(list)
    for path in files:
        for node in tree_of(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.stem)
    return {name: found for name, found in places.items() if len(found) > 1}


def dialect(text: str) -> list[str]:
    """Return every use of a banned word, with its line and what to write instead."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r} ({instead})"
        for pattern, instead in DIALECT.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def test_no_import_circle() -> None:
    assert circle([*PACKAGE, *SCRIPTS]) == []


def test_a_public_class_name_is_used_once() -> None:
    assert repeated_classes(PACKAGE) == {}


def test_no_word_of_the_old_dialect() -> None:
    read = [path for path in READ if path.name not in HISTORY]
    found = {str(path.relative_to(ROOT)): dialect(path.read_text("utf-8")) for path in read}
    assert {path: words for path, words in found.items() if words} == {}


def test_these_ratchets_can_fail(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("def f():\n    from other import g\nclass Same: ...\n")
    other.write_text("if TYPE_CHECKING:\n    import one\nclass Same: ...\n")
    assert set(circle([one, other], tmp_path)) == {"one", "other"}
    assert repeated_classes([one, other]) == {"Same": ["one", "other"]}
    assert len(dialect("The crew decodes side by side.")) == 2
