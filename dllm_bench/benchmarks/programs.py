"""From a model's answer to a Python program: fences, completion of a prompt, a broken tail.

Pure text work with the standard library; nothing is run here. Reachability-based sanitising is
EvalPlus's (`benchmarks/evalplus.py`).
"""

from __future__ import annotations

import ast
import re
import warnings

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
