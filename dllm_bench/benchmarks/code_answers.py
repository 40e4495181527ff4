"""From a model's answer to a Python program: fences, completion of a prompt, what is kept of it.

Pure text work with the standard library; nothing is run here. The readings of an answer that
published scores were made with are functions of their own: LoPA's (`lopa_code`, `lopa_sanitized`),
DiffuCoder's (`diffucoder`), OpenCompass's (`first_block`), LiveCodeBench's (`fenced`). EvalPlus's
sanitising is EvalPlus's own (`benchmarks/evalplus.py`).
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Mapping, Sequence

FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
MAX_LINES = 100


def code_of(answer: str) -> str:
    """The first fenced block of an answer; without an opening fence the text before any fence."""
    block = FENCE.search(answer)
    before = answer.split("```")[0]
    if block is None:
        return before
    return before if before.strip() and parses("def f():\n" + before) else block.group(1)


def assemble(prompt: str, answer: str) -> str:
    """A program: the prompt and the answer's code, which continues its body or starts anew."""
    code = code_of(answer)
    if not code.strip():
        return prompt
    continues = code[0] in " \t\n" or prompt.endswith(" ")
    return prompt + code if continues else prompt.rstrip("\n") + "\n\n" + code


def parses(source: str) -> bool:
    """Whether the text is a Python module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def trimmed(program: str, keep: int = 1) -> str:
    """The longest leading part of the first lines that parses; the program itself if none does.

    `keep`: lines that always stay (those of the prompt).
    """
    lines = program.split("\n")
    for end in range(min(len(lines), keep + MAX_LINES), keep - 1, -1):
        part = "\n".join(lines[:end])
        if parses(part):
            return part + "\n"
    return program


def first_block(answer: str) -> str:
    """OpenCompass: the first fenced block, else the answer as it is."""
    found = re.search(r"```\w*\n(.*?)```", answer, re.DOTALL)
    return found[1] if found else answer


def fenced(answer: str, last: bool) -> str:
    """LiveCodeBench: between the first (or last) two lines that hold a fence, else nothing."""
    lines = answer.split("\n")
    fences = [i for i, line in enumerate(lines) if "```" in line]
    if len(fences) < 2:
        return ""
    begin, end = fences[-2:] if last else fences[:2]
    return "\n".join(lines[begin + 1 : end])


def diffucoder(prompt: str, answer: str) -> str:
    """DiffuCoder: the prompt, then the answer up to the fence that closes its own."""
    return prompt + answer.split("```")[0]


def lopa_code(prompt: str, answer: str) -> str:
    """LoPA: the prompt, a line break, what follows the first ```python up to the next fence."""
    return prompt + "\n" + answer.split("```python\n", 1)[-1].split("```")[0]


def lopa_sanitized(program: str, entry_point: str) -> str:
    """LoPA's sanitising: longest span that parses, then what the entry point needs of it.

    Imports stay, and top-level definitions and assignments the entry point reaches by name;
    functions that return nothing are dropped.
    """
    span = longest_span(program.split("\n")[:MAX_LINES])
    tree = parsed(span)
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    named = {name: node for node in tree.body for name in defined_names(node)}
    wanted = reachable(entry_point, named)
    kept = [node for name, node in named.items() if name in wanted]
    lines = span.split("\n")
    whole = dict.fromkeys([*imports, *kept])
    return "\n".join("\n".join(lines[first_line(n) - 1 : n.end_lineno]) for n in whole)


def longest_span(lines: Sequence[str]) -> str:
    """The consecutive lines that parse and have most that are not blank; the first of equals."""
    filled = [0, *itertools.accumulate(bool(line.strip()) for line in lines)]
    spans = itertools.combinations(range(len(lines) + 1), 2)
    for begin, end in sorted(spans, key=lambda s: (filled[s[0]] - filled[s[1]], s)):
        if filled[end] > filled[begin] and parses("\n".join(lines[begin:end])):
            return "\n".join(lines[begin:end])
    return ""


def parsed(source: str) -> ast.Module:
    """The syntax tree, quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def defined_names(node: ast.stmt) -> list[str]:
    """What a top-level statement defines; a function without `return` defines nothing."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = any(isinstance(part, ast.Return) for part in ast.walk(node))
        return [node.name] if returns else []
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def reachable(entry_point: str, named: Mapping[str, ast.stmt]) -> set[str]:
    """Names the entry point uses, and those use, and so on; all where it is not defined."""
    if entry_point not in named:
        return set(named)
    reached, waiting = set(), [entry_point]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        used = {n.id for n in ast.walk(named[name]) if isinstance(n, ast.Name)}
        waiting += [one for one in used if one in named and one not in reached]
    return reached


def first_line(node: ast.stmt) -> int:
    """The line a statement begins at, its decorators included."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
