"""Syntax trees of the package's files, parsed once for all tests of style."""

from __future__ import annotations

import ast
from functools import cache


@cache
def tree_of(source: str) -> ast.Module:
    """Return the tree of a file's text; callers leave it as it is."""
    return ast.parse(source)
