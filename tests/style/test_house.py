"""Ratchets of the package, its tests and its engine: how much there is to read and to know.

`house.yaml` holds ceilings, which only ever go down: no number may be above, and one that is 1 %
below lowers its own. `engine.yaml` holds today's numbers of `core`, `decoding` and `methods`, which
only ever go down. `python -m tests.style.test_house` prints both.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.style.trees import FILES, PACKAGE, ROOT, functions, tree_of

pytestmark = pytest.mark.xdist_group("style")  # which share trees
CEILINGS, ENGINE_CEILINGS = map(Path(__file__).with_name, ("house.yaml", "engine.yaml"))
GROUPS = ("model", "decoder", "benchmark", "hardware")
NO_INTERVALS = ("Range", "ReliabilityBin", "StatedNumber")
"""Classes with the fields low and high whose meaning is another: bounds of a setting, edges of a
bin, and the range that a paper's text names.
"""
SLACK = 1.01  # how far a number may be below its ceiling before that is lowered
PARTS = ("core", "decoding", "methods")
ENGINE = [PACKAGE / "parallel.py", *(p for part in PARTS for p in (PACKAGE / part).rglob("*.py"))]
CONTRACTS = {
    "core/decoder.py": ("Piece",),
    "core/contracts.py": ("MaskedPiece Score Select Revise Explore Schedule Stop Cache".split()),
}
"""File -> classes whose public names a piece may have to know."""
OF_ANY_PIECE = ("Piece", "MaskedPiece")
"""Those whose names the others inherit; a default that one of them changes is no further name."""
LOOP = "decoding/masked.py"
GROWING = r"^grows?$|^_grow|grown|growth|sizing|^insert$"
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}
VALUES = (
    "choice probabilities temperature columns prompt no_masks pinned progress divides sigma fall "
    "step_profile"
).split()
"""What functions named `check_...` compare with no other part: a value, or a request."""


@cache
def tokens(path: Path) -> tuple[list[int], set[str]]:
    """Return the lines and the names of a file's tokens, without comments and ends of lines."""
    lines, names = list[int](), set[str]()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type not in NO_CODE:
            lines.extend(range(token.start[0], token.end[0] + 1))
        if token.type == tokenize.NAME:
            names.add(token.string)
    return lines, names


def code_lines(path: Path) -> int:
    """Return lines that hold code: no blank lines, comments or docstrings."""
    lines = set(tokens(path)[0])
    for node in ast.walk(tree_of(path)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def contract_names() -> set[tuple[str, str]]:
    """Return what a piece may have to know: (class, name), without what other pieces inherit."""
    declared = (public_names(PACKAGE / file, classes) for file, classes in CONTRACTS.items())
    names = set().union(*declared)
    of_any = {(owner, name) for owner, name in names if owner in OF_ANY_PIECE}
    inherited = {name for _, name in of_any}
    return of_any | {(owner, name) for owner, name in names if name not in inherited}


def public_names(path: Path, classes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (class, name) of the public fields and methods that the classes declare."""
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for part in node.body:
                name = getattr(part, "name", None)
                if isinstance(part, ast.AnnAssign):
                    name = getattr(part.target, "id", None)
                elif isinstance(part, ast.Assign):
                    name = getattr(part.targets[0], "id", None)
                if name and (name == "__call__" or not name.startswith("_")):
                    yield node.name, name


def interval_types(tree: ast.AST) -> Iterator[str]:
    """Yield names of the classes that declare a number with its interval."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name not in NO_INTERVALS:
            fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            names = {field.id for field in fields if isinstance(field, ast.Name)}
            if {"low", "high"} <= names:
                yield node.name


def group_reads(tree: ast.AST) -> Iterator[str]:
    """Reads of one setting of a configuration group by its key: `spec.model["name"]`,
    `hardware.get("device")`, `config["decoder"]["select"]`.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=group, slice=ast.Constant(value=str()), ctx=ast.Load()):
                pass
            case ast.Call(func=ast.Attribute(value=group, attr="get"), args=[ast.Constant(), *_]):
                pass
            case _:
                continue
        match group:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.Subscript(slice=ast.Constant(value=name))
                | ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=name), *_])
            ):
                if name in GROUPS:
                    yield ast.unparse(node)


def counted() -> dict[str, int]:
    trees = list(map(tree_of, FILES))
    tests = (ROOT / "tests").rglob("*.py")
    return {
        "code lines": sum(map(code_lines, FILES)),
        "files": len(FILES),
        "types of a number with an interval": sum(len(list(interval_types(t))) for t in trees),
        "dictionary reads of configuration groups": sum(len(list(group_reads(t))) for t in trees),
        "lines of tests": sum(len(path.read_text("utf-8").splitlines()) for path in tests),
    }


def engine_counted() -> dict[str, int]:
    loop = {one.name: one for one in functions(tree_of(PACKAGE / LOOP))}["decode"]
    return {
        "code lines": sum(map(code_lines, ENGINE)),
        "files": len(ENGINE),
        "code lines of the masked loop's module": code_lines(PACKAGE / LOOP),
        "lines of the masked loop": (loop.end_lineno or 0) - loop.lineno + 1,
        "names in the piece contracts": len(contract_names()),
        "functions that refuse combinations": sum(
            one.name.startswith("check_") and one.name.removeprefix("check_") not in VALUES
            for path in ENGINE
            for one in functions(tree_of(path))
        ),
        "files that name a growing canvas": sum(
            any(re.search(GROWING, name, re.IGNORECASE) for name in tokens(path)[1])
            for path in [*ENGINE, *(PACKAGE / "models").rglob("*.py")]
        ),
    }


def test_the_house_only_gets_smaller() -> None:
    ceilings, found = yaml.safe_load(CEILINGS.read_text()), counted()
    assert found.keys() == ceilings.keys()
    above = {name: number for name, number in found.items() if number > ceilings[name]}
    assert not above, f"above {CEILINGS.name}: simplify"
    below = {name: n for name, n in found.items() if n * SLACK < ceilings[name]}
    assert not below, f"below: write the lower number into {CEILINGS.name}"


def test_this_ratchet_can_fail() -> None:
    reads = 'a.model["name"], hardware.get("x"), c["decoder"]["x"], c.get("benchmark", {})["x"]'
    others = 'a["model"], tables.get("x"), model[0], a.model["x"]'
    assert len(list(group_reads(ast.parse(reads)))) == 4
    assert list(group_reads(ast.parse(others))) == ["a.model['x']"]


def test_the_engine_only_gets_simpler() -> None:
    ceilings, now = yaml.safe_load(ENGINE_CEILINGS.read_text()), engine_counted()
    assert now.keys() == ceilings.keys()
    found = {name: number for name, number in now.items() if number != ceilings[name]}
    assert not found, f"above: simplify; below: write the lower number into {ENGINE_CEILINGS.name}"


if __name__ == "__main__":
    print(yaml.safe_dump_all([counted(), engine_counted()], sort_keys=False), end="")
