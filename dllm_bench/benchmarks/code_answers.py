"""Turn a model's answer into a Python program.

It processes text with the standard library; no program is run here. Each published way of reading
an answer has its own functions: LoPA (`lopa_program`, `lopa_sanitize`), DiffuCoder
(`diffucoder_program`), OpenCompass (`opencompass_code`) and LiveCodeBench (`livecodebench_code`).
EvalPlus's sanitising is called in `benchmarks/evalplus.py`.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Mapping, Sequence

FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
MAX_LINES = 100
"""Lines of an answer that searches look at, because their cost is quadratic in the number."""


def extract_code(answer: str) -> str:
    """Return the code of an answer: its first fenced block, or what precedes the first fence.

    The text before the first fence is used if it is code (an answer that continues the body of a
    function and is closed by a fence) or if there is no block.
    """
    block = FENCE.search(answer)
    before = answer.split("```")[0]
    if block is None:
        return before
    return before if before.strip() and parses("def f():\n" + before) else block.group(1)


def assemble_program(prompt: str, answer: str) -> str:
    """Return prompt and answer's code; empty lines part them if the code is a program itself."""
    code = extract_code(answer)
    if not code.strip():
        return prompt
    continues = code[0] in " \t\n" or prompt.endswith(" ")
    return prompt + code if continues else prompt.rstrip("\n") + "\n\n" + code


def with_first_indent(answer: str, entry_point: str) -> str:
    """Return the answer, indented by four spaces if it continues a body whose first indent was
    lost.

    It does if it begins at the margin, does not define `entry_point`, and is the body of a function
    once its first line is indented.
    """
    code = answer.split("```")[0].rstrip()
    lost = bool(code[:1].strip()) and f"def {entry_point}" not in code
    return "    " + answer if lost and parses(f"def f():\n    {trimmed(code)}") else answer


def trimmed(code: str) -> str:
    """Return the code up to its last line that is indented; the first line alone if there is
    none."""
    lines = code.split("\n")
    inside = [i for i, line in enumerate(lines) if line[:1] in (" ", "\t")]
    return "\n".join(lines[: max(inside, default=0) + 1])


def parses(source: str) -> bool:
    """Return whether the text is a Python module."""
    try:
        parse_quietly(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def trim_unparsable_end(program: str, keep: int = 1) -> str:
    """Return the longest start of a program that parses; the program itself if none does.

    The first `keep` lines (those of the prompt) always stay; of a longer program that does not
    parse as a whole, MAX_LINES more are tried.
    """
    lines = program.split("\n")
    for end in (len(lines), *range(min(len(lines), keep + MAX_LINES), keep - 1, -1)):
        part = "\n".join(lines[:end])
        if parses(part):
            return part + "\n"
    return program


def opencompass_code(answer: str) -> str:
    """Return the first fenced block, else the answer as it is (OpenCompass)."""
    block = re.search(r"```\w*\n(.*?)```", answer, re.DOTALL)
    return block[1] if block else answer


def reopened_block(answer: str) -> str:
    """Return the first closed block of a fence and the answer, "" without one (lm-eval's
    mbpp_instruct)."""
    pattern = re.compile(r"```(?:\w+)?\n?(.*?)\n?```", re.DOTALL)
    block = pattern.search("```" + answer) or pattern.search(answer.replace("```python", "```"))
    return block[1] if block else ""


def livecodebench_code(answer: str, last: bool) -> str:
    """Return the lines between the first (or last) two fences, "" without two (LiveCodeBench)."""
    lines = answer.split("\n")
    fences = [i for i, line in enumerate(lines) if "```" in line]
    if len(fences) < 2:
        return ""
    begin, end = fences[-2:] if last else fences[:2]
    return "\n".join(lines[begin + 1 : end])


def diffucoder_program(prompt: str, answer: str) -> str:
    """Return the prompt, then the answer up to the fence that closes its own (DiffuCoder)."""
    return prompt + answer.split("```")[0]


def lopa_program(prompt: str, answer: str) -> str:
    """Return the prompt, a line break, and what follows the first ```python up to the next fence
    (LoPA)."""
    return prompt + "\n" + answer.split("```python\n", 1)[-1].split("```")[0]


def lopa_sanitize(program: str, entry_point: str) -> str:
    """Return the longest span that parses, reduced to what the entry point needs (LoPA's
    sanitising).

    Imports stay, and so do the top-level definitions and assignments that the entry point reaches
    by name. Functions without a `return` are dropped.
    """
    span = longest_parsing_span(program.split("\n")[:MAX_LINES])
    tree = parse_quietly(span)
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    named = {name: node for node in tree.body for name in defined_names(node)}
    wanted = reachable_names(entry_point, named)
    kept = [node for name, node in named.items() if name in wanted]
    lines = span.split("\n")
    whole = dict.fromkeys([*imports, *kept])
    return "\n".join("\n".join(lines[first_line(n) - 1 : n.end_lineno]) for n in whole)


def longest_parsing_span(lines: Sequence[str]) -> str:
    """Return the consecutive lines that parse and have the most non-blank ones; the first of
    equals."""
    filled = [0, *itertools.accumulate(bool(line.strip()) for line in lines)]
    spans = itertools.combinations(range(len(lines) + 1), 2)
    for begin, end in sorted(spans, key=lambda s: (filled[s[0]] - filled[s[1]], s)):
        if filled[end] > filled[begin] and parses("\n".join(lines[begin:end])):
            return "\n".join(lines[begin:end])
    return ""


def parse_quietly(source: str) -> ast.Module:
    """Return the syntax tree; warnings about the program are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines; none for a function without `return`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = any(isinstance(part, ast.Return) for part in ast.walk(node))
        return [node.name] if returns else []
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def reachable_names(entry_point: str, named: Mapping[str, ast.stmt]) -> set[str]:
    """Return the names that the entry point uses, directly or not; all names if it is not
    defined."""
    if entry_point not in named:
        return set(named)
    reached, waiting = set(), [entry_point]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        used = {n.id for n in ast.walk(named[name]) if isinstance(n, ast.Name)}
        waiting += [other for other in used if other in named and other not in reached]
    return reached


def first_line(node: ast.stmt) -> int:
    """Return the line at which a statement begins, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
