"""Hash the source of classes from outside this package that a configuration names: plug-ins, user
code.

If the code of such a piece changes, its run becomes another run. The hash covers the file that
defines the piece and the modules that it imports, at any depth, if they belong to the same package
or are not installed in the interpreter's own folders. The package's own pieces are covered by
`DECODING_VERSION`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import PACKAGE, TARGET, find

INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def pieces_hash(plain: object, further: Iterable[Callable[..., Any]] = ()) -> str | None:
    """Return sha256 of the source of everything from outside that plain data names, and of further
    classes; None if there is none.
    """
    every = [*foreign(plain), *filter(is_own, further)]
    texts = {name: text for made in every for name, text in source_of(made).items()}
    if not texts:
        return None
    hashed = hashlib.sha256()
    for name, text in sorted(texts.items()):
        hashed.update(f"{name} {len(text)}\n{text}".encode())
    return hashed.hexdigest()


def foreign(plain: object) -> Iterator[Callable[..., Any]]:
    """Return the classes and functions from outside this package that plain data names, at any
    depth."""
    made = map(find, targets(plain))
    return (one for one in made if not one.__module__.startswith(PACKAGE))


def is_own(made: Callable[..., Any]) -> bool:
    """Return whether a class is the user's: typed in, or in a file that is not installed."""
    return made.__module__ == "__main__" or file_of(made.__module__, "") is not None


def targets(plain: object) -> Iterator[str]:
    """Yield every `_target_` of plain data, at any depth."""
    if isinstance(plain, Mapping):
        if TARGET in plain:
            yield str(plain[TARGET])
        for value in plain.values():
            yield from targets(value)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            yield from targets(value)


def source_of(made: Callable[..., Any]) -> dict[str, str]:
    """Return {module: its text} for the module of a class or function and the user's own modules
    that it imports.

    A class that was typed into a notebook is its own source.
    """
    texts = dict[str, str]()
    waiting = [made.__module__]
    while waiting:
        name = waiting.pop()
        file = None if name in texts else file_of(name, made.__module__)
        if file is not None:
            texts[name] = file.read_text(encoding="utf-8")
            waiting += imports_of(texts[name], name)
    return texts or {made.__module__: typed_in(made)}


def typed_in(made: Callable[..., Any]) -> str:
    """Return the source of a class or function that is in no file."""
    try:
        return inspect.getsource(made)
    except (OSError, TypeError) as error:
        raise DllmBenchError(
            f"{made.__qualname__} is a piece whose source cannot be found ({error}), so a changed "
            "one could not be told from it; define it in a file or in a notebook's cell."
        ) from error


def file_of(name: str, asked: str) -> Path | None:
    """Return the file of a module, if that is the user's: not this package's, of the package of
    module `asked` or outside of the interpreter's folders.
    """
    if f"{name}.".startswith(PACKAGE):
        return None
    try:
        spec = None if name == "__main__" else find_spec(name)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec else getattr(sys.modules.get(name), "__file__", None)
    if not origin or Path(origin).suffix != ".py" or not Path(origin).is_file():
        return None
    own = name.partition(".")[0] == asked.partition(".")[0]
    installed = any(Path(origin).is_relative_to(folder) for folder in INSTALLED)
    return Path(origin) if own or not installed else None


def imports_of(text: str, module: str) -> Iterator[str]:
    """Yield the modules that a module's text may import, wherever it does."""
    spec = None if module == "__main__" else find_spec(module)
    package = spec.parent if spec else None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            if node.level and not package:
                continue
            whole = resolve_name(source, package)
            yield whole
            yield from (f"{whole}.{alias.name}" for alias in node.names)
