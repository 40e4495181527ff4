"""Only the store's modules for files open, list, write or remove below a results folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dllm_bench"
METHODS = frozenset(
    "write_text write_bytes read_text unlink rmtree rmdir rename touch symlink_to "
    "hardlink_to mkdir makedirs glob rglob iterdir scandir listdir walk copyfile copytree move "
    "is_file is_dir exists stat lstat open chmod utime mkfifo truncate".split()
)
OS_ALONE = frozenset({"replace", "remove", "rename", "unlink", "link", "symlink", "read_bytes"})
OTHERS = {  # what opens files itself -> which, none of them below a results folder
    "store/files.py": "the one module that opens below a results folder",
    "store/lock.py": "/proc",
    "store/inputs.py": "models, and code of pieces from outside the package",
    "store/cache.py": "conf, the package and the files a configuration names",
    "store/provenance.py": "the package and /proc",
    "paths.py": "conf",
    "tables/load.py": "conf",
    "tables/plan.py": "whether a trained source exists",
    "api/compose.py": "conf, models and data",
    "api/custom_generate.py": "the package",
    "api/generation.py": "conf",
    "cli/completion.py": "conf",
    "cli/doctor.py": "models and data",
    "cli/main.py": "the null device",
    "cli/exchange.py": "models",
    "cli/table.py": "an output that the user named",
    "figures/run_series.py": "trained filters",
    "runs/runner.py": "Store.open",
    "launch/processes.py": "Store.open",
    "site/build.py": "the package",
    "training/prompts.py": "texts that the user named",
}
FOLDERS = (
    "models",
    "benchmarks",
    "decoding",
    "methods",
    "serving",
    "core",
)  # of weights, data, sandbox


def file_calls(source: str) -> Iterator[str]:
    """Yield names of calls that open, look up, change or remove files."""
    for node in ast.walk(tree_of(source)):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id="open"):
                yield "open"
            case ast.Attribute(value=ast.Name(id="os" | "shutil" | "tarfile" as module), attr=name):
                if name in METHODS | OS_ALONE:
                    yield f"{module}.{name}"
            case ast.Attribute(attr=name) if name in METHODS or name == "read_bytes":
                yield name


def test_only_the_modules_for_files_touch_a_results_folder() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in OTHERS and not name.startswith(FOLDERS):
            found[name] = sorted(set(file_calls(path.read_text(encoding="utf-8"))))
    allowed = {"store/archive.py": ["tarfile.open"]}  # of an open stream
    assert {name: calls for name, calls in found.items() if calls} == allowed


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "path.write_text('x')",
        "path.unlink()",
        "shutil.rmtree(x)",
        "os.replace(a, b)",
        "folder.glob('*')",
        "path.read_bytes()",
    ],
)
def test_each_way_to_touch_a_file_is_seen(source: str) -> None:
    assert list(file_calls(source))


def test_every_exception_is_needed() -> None:
    unneeded = [
        name
        for name in OTHERS
        if not list(file_calls((PACKAGE / name).read_text(encoding="utf-8")))
    ]
    assert unneeded == []
