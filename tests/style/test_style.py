"""Ratchets: limits the code may not cross. Lower them when there is room, never raise them.

Sizes of files and functions, number of parameters, headers, and a few things that are never
written here: token ids, path hacks, bare excepts, keyword tunnels, paths of one machine.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.style.trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES = 800
FUNCTION_LINES = 60
FUNCTION_LINES_P90 = 35
FUNCTION_LINES_MEDIAN = 12
PARAMETERS = 8
HEADER_WORDS = 6

PACKAGE = sorted((ROOT / "dllm_bench").rglob("*.py"))
API = ROOT / "dllm_bench" / "api"  # whose functions take settings by their names
PYTHON = sorted([*PACKAGE, *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
YAML = sorted((ROOT / "conf").rglob("*.yaml"))
PROSE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# Mask, end and padding ids of LLaDA, LLaDA-MoE and Dream/Qwen2 vocabularies.
TOKEN_IDS = {126080, 126081, 126336, 126346, 126347, 126348, 156892, 156895} | set(
    range(151643, 151670)
)
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(work|root|home|Users|mnt|data\d*|scratch)/\w")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def offences(path: Path) -> Iterator[str]:
    """Yield every broken rule of one Python file, as a sentence with its line."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)  # of too many files to be kept
    if len(source.splitlines()) > FILE_LINES:
        yield f"{len(source.splitlines())} lines, at most {FILE_LINES}"
    if source.strip() and len((ast.get_docstring(tree) or "").split()) < HEADER_WORDS:
        yield "no header docstring that says what the file is"
    for function in functions(tree):
        where = f"line {function.lineno}: {function.name}"
        if length(function) > FUNCTION_LINES:
            yield f"{where} has {length(function)} lines, at most {FUNCTION_LINES}"
        if parameters(function) > PARAMETERS:
            yield f"{where} has {parameters(function)} parameters, at most {PARAMETERS}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"line {node.lineno}: bare except"
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr="path"):
                yield f"line {node.lineno}: touches the module search path"


def package_offences(path: Path) -> Iterator[str]:
    """Rules for the package alone."""
    tree = tree_of(path.read_text(encoding="utf-8"))
    for function in functions(tree):
        if function.args.kwarg and path.parent != API:
            yield f"line {function.lineno}: {function.name} takes **{function.args.kwarg.arg}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in TOKEN_IDS:
            yield f"line {node.lineno}: literal token id {node.value}"
        match node:
            case ast.Call(ast.Name("SpecialTokens") | ast.Attribute(attr="SpecialTokens")):
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                if any(isinstance(v, ast.Constant) and v.value is not None for v in values):
                    yield f"line {node.lineno}: SpecialTokens built from a literal id"


def yaml_offences(path: Path) -> Iterator[str]:
    """Yield every broken rule of one yaml file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers = any(re.search(r":\s*-?[\d.]+\s*(#|$)", line) for line in lines)
    if numbers and not any("#" in line for line in lines):
        yield "no comment names a source of its numbers"
    ids = {int(number) for line in lines for number in re.findall(r"\b\d{6}\b", line)}
    if ids & TOKEN_IDS:
        yield "literal token id"


def machine_paths(path: Path) -> Iterator[str]:
    """Paths that exist on one machine alone."""
    yield from (match[0] for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8")))


def found(paths: Iterable[Path], rules: Callable[[Path], Iterable[str]]) -> list[str]:
    """Return the offences of all files, each with its file."""
    return [f"{relative(path)}: {offence}" for path in paths for offence in rules(path)]


def test_python_files_keep_the_limits() -> None:
    assert found(PYTHON, offences) == []


def test_package_files_keep_the_rules() -> None:
    assert found(PACKAGE, package_offences) == []


def test_functions_are_short_as_a_rule() -> None:
    trees = [tree_of(path.read_text(encoding="utf-8")) for path in PACKAGE]
    lengths = [length(function) for tree in trees for function in functions(tree)]
    assert statistics.median(lengths) <= FUNCTION_LINES_MEDIAN
    assert statistics.quantiles(lengths, n=10)[-1] <= FUNCTION_LINES_P90


def test_numbers_in_yaml_have_a_source() -> None:
    assert found(YAML, yaml_offences) == []


def test_no_path_of_one_machine() -> None:
    assert found([*PACKAGE, *YAML, *PROSE], machine_paths) == []


BROKEN = '''"""A file that breaks the rules, to show that the ratchets can fail."""
import sys
sys.path.append(".")
def f(a, b, c, d, e, g, h, i, j, **rest):
    try:
        return 126336
    except:
        return SpecialTokens(mask=3, eos=0)
'''


def test_the_ratchets_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    found = "\n".join([*offences(path), *package_offences(path)])
    for word in ("9 parameters", "bare except", "search path", "**rest", "126336", "SpecialTokens"):
        assert word in found
    path.write_text("x = '/mnt/data1/models'\n")
    assert list(machine_paths(path)) == ["/mnt/d"]
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    short = tmp_path / "one.yaml"
    short.write_text("tau: 0.9\nmask: 126336\n")
    assert len(list(yaml_offences(short))) == 2
    path.write_text("x = 1\n" * (FILE_LINES + 1))
    assert len(list(offences(path))) == 2
    path.write_text(
        '"""A long function, to show that the ratchets can fail."""\ndef f():\n'
        + "    x = 1\n" * 60
    )
    assert any("61 lines" in offence for offence in offences(path))
