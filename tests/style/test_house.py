"""Ratchets of the whole package and its tests: how much there is to read.

`house.yaml` holds ceilings, which only ever go down: no number may be above, and one that is 1 %
below lowers its own. `python -m tests.style.test_house` prints today's numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.style.test_engine import code_lines
from tests.style.trees import FILES, ROOT, tree_of

pytestmark = pytest.mark.xdist_group("style")  # which share trees
CEILINGS = Path(__file__).with_name("house.yaml")
GROUPS = ("model", "decoder", "benchmark", "hardware")
NO_INTERVALS = ("Range", "ReliabilityBin", "StatedNumber")
"""Classes with the fields low and high whose meaning is another: bounds of a setting, edges of a
bin, and the range that a paper's text names.
"""
SLACK = 1.01  # how far a number may be below its ceiling before that is lowered


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
    """Return the house in numbers."""
    trees = list(map(tree_of, FILES))
    tests = (ROOT / "tests").rglob("*.py")
    return {
        "code lines": sum(map(code_lines, FILES)),
        "files": len(FILES),
        "types of a number with an interval": sum(len(list(interval_types(t))) for t in trees),
        "dictionary reads of configuration groups": sum(len(list(group_reads(t))) for t in trees),
        "lines of tests": sum(len(path.read_text("utf-8").splitlines()) for path in tests),
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


if __name__ == "__main__":
    print(yaml.safe_dump(counted(), sort_keys=False), end="")
