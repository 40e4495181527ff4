"""The settings of every piece as tables, for docs/pieces.md: name, type, default, meaning.

Type and meaning come from the class: the comment at the field, the string below it, or a line of
the class's docstring. The default and its source come from the yaml in `conf/decoder`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from html import escape
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from dllm_bench.decoding.canvas import CanvasDecoder
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.paths import conf_dir
from dllm_bench.registry import SLOTS, TARGET, find

HEADER = ("Piece", "Setting", "Type", "Default", "Meaning")
LOOPS = {
    "the masked loop": MaskedDecoder,
    "the speculative loop": SpeculativeDecoder,
    "the canvas loop": CanvasDecoder,
}
COMMENT = re.compile(r"#\s*(.*)$")
CHOSEN = re.compile(r"/decoder/\w+@(\w+)$")  # an entry of a yaml's defaults that chooses a piece


@dataclass(frozen=True)
class Setting:
    """One row: the setting of a piece, all as text. meaning: empty if nothing says it.

    name: empty for a piece without settings, whose meaning is that of the piece.
    """

    piece: str
    name: str
    type: str
    default: str
    meaning: str

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its row in Markdown; docs/site.css keeps a `whole` default on one
        line."""
        if not self.name:
            return (f"`{self.piece}`", "none", "", "", self.meaning)
        whole = f'<code class="whole">{escape(self.default)}</code>'
        default = whole if self.default else "must be given"
        shown = (f"`{self.piece}`", f"`{self.name}`", self.type, default, self.meaning)
        return tuple(cell.replace("|", "\\|") for cell in shown)


def page_tables() -> str:
    """Return a table for each slot, and one of the settings that all decoders of a loop share."""
    parts = {slot: settings_of_slot(slot) for slot in SLOTS}
    parts["Whole decoders"] = settings_of_loops()
    return "\n\n".join(
        f"## {name}\n\n{markdown_table(HEADER, [one.cells() for one in settings])}"
        for name, settings in parts.items()
    )


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    cells = (titles, ("---",) * len(titles), *rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def settings_of_slot(slot: str) -> Iterator[Setting]:
    """Yield the settings of every piece of a slot, in the order of names; a row for each without
    settings."""
    for file in sorted((conf_dir() / "decoder" / slot).glob("*.yaml")):
        text = file.read_text()
        kind = find(yaml.safe_load(text)[TARGET])
        assert isinstance(kind, type)
        own = list(settings_of_class(file.stem, kind, text))
        yield from own or [Setting(file.stem, "", "", "", _of_type(kind).rstrip("."))]


def settings_of_loops() -> Iterator[Setting]:
    """Yield the settings of the loops themselves, pieces left out."""
    for name, kind in LOOPS.items():
        own = settings_of_class(name, kind, "")
        yield from (setting for setting in own if setting.name not in SLOTS)


def settings_of_class(piece: str, kind: type, text: str) -> Iterator[Setting]:
    """Yield the settings of one class; `text`: its yaml, empty if it has none."""
    given = yaml.safe_load(text) or {}
    chosen = {m[1]: name for key, name in _defaults(given) if (m := CHOSEN.match(key))}
    hints = get_type_hints(kind)
    for field in fields(kind):
        if not field.init:
            continue
        note = re.search(rf"^{field.name}:[^#\n]*#\s*(.*)$", text, re.MULTILINE)
        said = _comment(kind, field.name) or _of_type(hints[field.name])
        source = note[1].rstrip(".") if note else ""
        default = chosen.get(field.name) or _default(field, given)
        said = re.sub(r"\bNone\b", "null", said.rstrip("."))  # as the command line writes it
        rest = [clause for clause in source.split("; ") if _plain(clause) not in _plain(said)]
        meaning = source if said in source else "; ".join([said, *rest])
        yield Setting(piece, field.name, _type(hints[field.name]), default, meaning)


def _plain(text: str) -> str:
    return text.lower().replace("`", "")


def _defaults(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for entry in given.get("defaults", ()):
        if isinstance(entry, dict):
            yield from entry.items()


def _default(field: Field[Any], given: Mapping[str, Any]) -> str:
    """Return the default as yaml writes it; of an object its class; empty if there is none."""
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    value = given.get(field.name, made)
    if value is MISSING:
        return ""
    if isinstance(value, dict) and TARGET in value:
        return str(value[TARGET]).rpartition(".")[2]
    if is_dataclass(value):
        return type(value).__name__
    written = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return written.removesuffix("\n").removesuffix("\n...")


def _type(hint: Any) -> str:
    """Return a type in words: choices, `null`, the slot or the name of a class."""
    if get_origin(hint) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(hint))
    if hint is NoneType:
        return "`null`"
    if get_origin(hint) in (tuple, list):
        inner = [_type(part) for part in get_args(hint) if part is not Ellipsis]
        return f"list of {', '.join(inner)}"
    if get_args(hint):
        return " or ".join(_type(part) for part in get_args(hint))
    return str(hint.__name__)


def _of_type(hint: Any) -> str:
    """Return what a class says of itself, for a setting that holds an object and has no comment."""
    own = isinstance(hint, type) and hint.__module__.startswith("dllm_bench.")
    return (inspect.getdoc(hint) or "").split("\n\n")[0].replace("\n", " ") if own else ""


def _comment(kind: type, name: str) -> str:
    """Return what the class that declares a field says of it."""
    for owner in kind.__mro__:
        if name not in vars(owner).get("__annotations__", {}):
            continue
        module = inspect.getmodule(owner)
        assert module is not None
        said = _comments(module).get((owner.__name__, name))
        listed = re.search(rf"^{name}: (.+(?:\n .+)*)", inspect.getdoc(owner) or "", re.MULTILINE)
        return said or (re.sub(r"\s+", " ", listed[1]) if listed else "")
    return ""


@cache
def _comments(module: ModuleType) -> dict[tuple[str, str], str]:
    """Return (class, field) -> its comment or the string below it, of all classes of a module."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    found = {}
    for owner in ast.parse(text).body:
        if isinstance(owner, ast.ClassDef):
            following = [*owner.body[1:], ast.Pass()]
            for node, after in zip(owner.body, following, strict=True):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    said = _below(after) or _beside(node, text.splitlines())
                    found[owner.name, node.target.id] = said
    return found


def _below(node: ast.stmt) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split()) if is_text else ""  # type: ignore[attr-defined]


def _beside(node: ast.AnnAssign, lines: list[str]) -> str:
    """Return the comment on the lines of a field, and on the lines below that hold nothing else."""
    end = node.end_lineno or node.lineno
    own = [m[1] for line in lines[node.lineno - 1 : end] if (m := COMMENT.search(line))]
    for line in lines[end:] if own else ():
        if not line.strip().startswith("#"):
            break
        own.append(line.strip("# "))
    return " ".join(own)
