"""Ratchets: limits that the code may not cross. Lower them when there is room, never raise them.

`house.yaml` holds ceilings of the package and its tests: how much there is to read and to know. No
number may be above; one that is 1 % below lowers its own. `engine.yaml` holds today's numbers of
`core`, `decoding` and `methods`. `python -m tests.style.test_house` prints both.

Sizes of files and functions, headers; no import circle, no class name twice, no word of the old
dialect; and a few things that are never written here: token ids, path hacks, keyword tunnels, paths
of one machine (ruff finds bare excepts and counts parameters). Only the store's modules for files
open, list, write or remove below a results folder. Only `core/output.py` writes to the terminal, so
that all that is shown is cleaned. Tests reach no other machine (conftest.py); those that
docs/security.md names exist, as do functions that docs/architecture.md names.
"""

from __future__ import annotations

import ast
import io
import re
import socket
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.xdist_group("style")  # which share trees
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dllm_bench"
FILES = sorted(PACKAGE.rglob("*.py"))
CONF = sorted((ROOT / "conf").rglob("*.yaml"))
PROSE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
Function = ast.FunctionDef | ast.AsyncFunctionDef
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
def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file, parsed once for all tests; callers leave it as it is."""
    return ast.parse(path.read_text("utf-8"))


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


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


FILE_LINES = 800
FUNCTION_LINES = 60
FUNCTION_LINES_P90 = 35
FUNCTION_LINES_MEDIAN = 12
HEADER_WORDS = 6

API = ROOT / "dllm_bench" / "api"  # whose functions take settings by their names
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
PYTHON = sorted([*FILES, *SCRIPTS, *(ROOT / "tests").rglob("*.py")])

# Mask, end and padding ids of LLaDA, LLaDA-MoE and Dream/Qwen2 vocabularies.
TOKEN_IDS = {126080, 126081, 126336, 126346, 126347, 126348, 156892, 156895}
TOKEN_IDS |= {*range(151643, 151670)}
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(work|root|home|Users|mnt|data\d*|scratch)/\w")

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


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def offences(path: Path) -> Iterator[str]:
    """Yield every broken rule of one Python file, as a sentence with its line."""
    source = path.read_text(encoding="utf-8")
    tree = tree_of(path) if path in FILES else ast.parse(source)  # of too many to be kept
    if len(source.splitlines()) > FILE_LINES:
        yield f"{len(source.splitlines())} lines, at most {FILE_LINES}"
    if source.strip() and len((ast.get_docstring(tree) or "").split()) < HEADER_WORDS:
        yield "no header docstring that says what the file is"
    for function in functions(tree):
        where = f"line {function.lineno}: {function.name}"
        if length(function) > FUNCTION_LINES:
            yield f"{where} has {length(function)} lines, at most {FUNCTION_LINES}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr="path"):
                yield f"line {node.lineno}: touches the module search path"


def package_offences(path: Path) -> Iterator[str]:
    tree = tree_of(path)
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
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers = any(re.search(r":\s*-?[\d.]+\s*(#|$)", line) for line in lines)
    if numbers and not any("#" in line for line in lines):
        yield "no comment names a source of its numbers"
    ids = {int(number) for line in lines for number in re.findall(r"\b\d{6}\b", line)}
    if ids & TOKEN_IDS:
        yield "literal token id"


def machine_paths(path: Path) -> Iterator[str]:
    yield from (match[0] for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8")))


def module_of(path: Path, root: Path = ROOT) -> str:
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
    trees = {module_of(path, root): tree_of(path) for path in files}
    graph = {module: {*imported(tree, trees)} - {module} for module, tree in trees.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def repeated_classes(files: Iterable[Path]) -> dict[str, list[str]]:
    """Public class names that more than one file defines."""
    places: Mapping[str, list[str]] = defaultdict(list)
    for path in files:
        for node in tree_of(path).body:
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


READ = [path for path in [*FILES, *SCRIPTS, *CONF, *PROSE] if path.name not in HISTORY]
RULES: dict[str, tuple[Iterable[Path], Callable[[Path], Iterable[str]]]] = {
    "limits of Python files": (PYTHON, offences),
    "rules of the package": (FILES, package_offences),
    "numbers in yaml have a source": (CONF, yaml_offences),
    "no path of one machine": ([*FILES, *CONF, *PROSE], machine_paths),
    "no word of the old dialect": (READ, lambda path: dialect(path.read_text("utf-8"))),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_file_keeps(rule: str) -> None:
    paths, offences_of = RULES[rule]
    assert [f"{p.relative_to(ROOT)}: {broken}" for p in paths for broken in offences_of(p)] == []


def test_functions_are_short_as_a_rule() -> None:
    lengths = [length(function) for path in FILES for function in functions(tree_of(path))]
    assert statistics.median(lengths) <= FUNCTION_LINES_MEDIAN
    assert statistics.quantiles(lengths, n=10)[-1] <= FUNCTION_LINES_P90


def test_no_import_circle() -> None:
    assert circle([*FILES, *SCRIPTS]) == []


def test_a_public_class_name_is_used_once() -> None:
    assert repeated_classes(FILES) == {}


BROKEN = '''"""A file that breaks the rules, to show that the ratchets can fail."""
import sys
sys.path.append(".")
def f(**rest):
    return 126336, SpecialTokens(mask=3, eos=0)
'''


def test_limits_can_be_broken(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    found = "\n".join([*offences(path), *package_offences(path)])
    for word in ("search path", "**rest", "126336", "SpecialTokens"):
        assert word in found
    path.write_text("x = '/mnt/data1/models'\n")
    assert list(machine_paths(path)) == ["/mnt/d"]
    short = tmp_path / "one.yaml"
    short.write_text("tau: 0.9\nmask: 126336\n")
    assert len(list(yaml_offences(short))) == 2
    path.write_text("x = 1\n" * (FILE_LINES + 1))
    assert len(list(offences(path))) == 2
    head = '"""A long function, to show that the ratchets can fail."""\ndef f():\n'
    path.write_text(head + "    x = 1\n" * 60)
    assert any("61 lines" in offence for offence in offences(path))


def test_circles_names_and_dialect_are_found(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("def f():\n    from other import g\nclass Same: ...\n")
    other.write_text("if TYPE_CHECKING:\n    import one\nclass Same: ...\n")
    assert set(circle([one, other], tmp_path)) == {"one", "other"}
    assert repeated_classes([one, other]) == {"Same": ["one", "other"]}
    assert len(dialect("The crew decodes side by side.")) == 2


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
    assert others.pop("store/archive.py") == ["tarfile.open"]  # of an open stream
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


def test_every_function_that_the_architecture_names_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page.partition("## Where a behaviour is decided")[2].partition("\n## ")[0]
    nodes = (node for path in FILES for node in ast.walk(tree_of(path)))
    known = {node.name for node in nodes if isinstance(node, Function | ast.ClassDef)}
    named = {part for name in re.findall(r"`([\w.]+)`", table) for part in name.split(".")}
    missing = named - known - {"py", *(path.stem for path in FILES)}
    assert len(named) > 40 and not missing


if __name__ == "__main__":
    print(yaml.safe_dump_all([counted(), engine_counted()], sort_keys=False), end="")
