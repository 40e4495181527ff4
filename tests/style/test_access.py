"""Which modules may touch files and the terminal.

Only the store's modules for files open, list, write or remove below a results folder. Only
`core/output.py` writes to the terminal, so that all that is shown is cleaned. Tests reach no other
machine (conftest.py), and those that docs/security.md names are there.
"""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.style.trees import FILES, PACKAGE, ROOT, tree_of

pytestmark = pytest.mark.xdist_group("style")  # which share trees
METHODS = frozenset(
    "write_text write_bytes read_text unlink rmtree rmdir rename touch symlink_to "
    "hardlink_to mkdir makedirs glob rglob iterdir scandir listdir walk copyfile copytree move "
    "is_file is_dir exists stat lstat open chmod utime mkfifo truncate".split()
)
OS_ALONE = frozenset({"replace", "remove", "rename", "unlink", "link", "symlink", "read_bytes"})
OPENS = {  # what opens files -> the modules that do; only the first are below a results folder
    "files of results": "store/files.py",
    "conf, models, data, the package, what settings name": """store/cache.py store/inputs.py
        paths.py tables/load.py tables/plan.py api/compose.py api/custom_generate.py
        api/generation.py cli/completion.py cli/doctor.py cli/exchange.py
        figures/run_series.py site/build.py""",
    "/proc, the null device": "store/lock.py store/provenance.py cli/main.py",
    "texts and outputs that the user named": "training/prompts.py cli/table.py",
    "Store.open": "runs/runner.py launch/processes.py",
}
FOLDERS = ("models", "benchmarks", "decoding", "methods", "serving", "core")
"""Of weights, data and the sandbox."""
STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")
TERMINAL = {
    "core/output.py": ["stderr", "stdout"],
    "cli/main.py": ["stdout"],  # redirects a closed standard output
    "runs/progress.py": ["stderr"],  # names a stream
}


def file_calls(tree: ast.AST) -> Iterator[str]:
    """Yield names of calls that open, look up, change or remove files."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id="open"):
                yield "open"
            case ast.Attribute(value=ast.Name(id="files")):  # store.files, which guards them
                continue
            case ast.Attribute(value=ast.Name(id="os" | "shutil" | "tarfile" as module), attr=name):
                if name in METHODS | OS_ALONE:
                    yield f"{module}.{name}"
            case ast.Attribute(attr=name) if name in METHODS or name == "read_bytes":
                yield name


def terminal_uses(tree: ast.AST) -> Iterator[str]:
    """Yield what could write to the terminal: print, rich's own consoles and bars, the streams."""
    for node in ast.walk(tree):
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


def uses_by_file(uses: Callable[[ast.AST], Iterator[str]]) -> dict[str, list[str]]:
    """Return the files of the package that have any of these uses."""
    found = {p.relative_to(PACKAGE).as_posix(): sorted(set(uses(tree_of(p)))) for p in FILES}
    return {name: names for name, names in found.items() if names}


def test_only_the_modules_for_files_touch_a_results_folder() -> None:
    found = uses_by_file(file_calls)
    others = {name: calls for name, calls in found.items() if not name.startswith(FOLDERS)}
    archive = others.pop("store/archive.py")
    assert archive == ["tarfile.open"]  # of an open stream
    assert sorted(others) == sorted(" ".join(OPENS.values()).split())


def test_only_one_module_writes_to_the_terminal() -> None:
    """The streams of a judged process are not the terminal."""
    found = uses_by_file(terminal_uses)
    judged = [name for name in found if name.startswith("benchmarks/sandbox/")]
    assert {name: uses for name, uses in found.items() if name not in judged} == TERMINAL


def test_each_way_to_the_terminal_is_seen() -> None:
    sources = (
        "print('x')", "Console(stderr=True).print('x')", "rich.console.Console()",
        "from rich import print", "sys.stdout.write('x')", "from sys import stderr",
        "track(items)", "Live(auto_refresh=False)",
    )  # fmt: skip
    assert not [source for source in sources if not list(terminal_uses(ast.parse(source)))]


def test_other_machines_are_out_of_reach() -> None:
    with pytest.raises(PermissionError, match="without network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(PermissionError, match="without network"):
        socket.getaddrinfo("example.org", 443)


def test_every_test_that_security_promises_name_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`([^`]*test_\w+\.py)`", page)
    assert len(set(named)) > 10
    assert not [name for name in named if not (ROOT / name).exists()]
