"""Only `core/output.py` writes to the terminal, so that all that is shown is cleaned."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.trees import tree_of

PACKAGE = Path(__file__).resolve().parents[2] / "dllm_bench"
WRITER = "core/output.py"
STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")
OTHERS = {"cli/main.py": "redirects a closed standard output", "runs/progress.py": "names a stream"}


def terminal_uses(source: str) -> Iterator[str]:
    """Yield what could write to the terminal: print, rich's own consoles and bars, the streams."""
    for node in ast.walk(tree_of(source)):
        match node:
            case ast.Call(func=ast.Name(id="print" | "Console" | "pprint" as name)):
                yield name
            case ast.Call(func=ast.Attribute(attr="Console")):
                yield "Console"
            case ast.Call(func=ast.Name(id="Live" | "Progress" | "track" | "Status" as name)):
                if "console" not in {keyword.arg for keyword in node.keywords}:
                    yield name
            case ast.ImportFrom(module="rich", names=names):
                yield from (one.name for one in names if one.name in ("print", "inspect"))
            case ast.ImportFrom(module="sys", names=names):
                yield from (one.name for one in names if one.name in STREAMS)
            case ast.Attribute(value=ast.Name(id="sys"), attr=name) if name in STREAMS:
                yield name


def in_judge(name: str) -> bool:
    """Return whether a file runs in a judged process, whose streams are not the terminal."""
    return name.startswith("benchmarks/sandbox/")


def test_only_one_module_writes_to_the_terminal() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        uses = sorted(set(terminal_uses(path.read_text(encoding="utf-8"))))
        if uses and not in_judge(name):
            found[name] = uses
    assert set(found) == {WRITER, *OTHERS}
    assert found["cli/main.py"] == ["stdout"] and found["runs/progress.py"] == ["stderr"]


@pytest.mark.parametrize(
    "source",
    [
        "print('x')",
        "Console(stderr=True).print('x')",
        "rich.console.Console()",
        "from rich import print",
        "sys.stdout.write('x')",
        "from sys import stderr",
        "track(items)",
        "Live(auto_refresh=False)",
    ],
)
def test_each_way_to_the_terminal_is_seen(source: str) -> None:
    assert list(terminal_uses(source))
