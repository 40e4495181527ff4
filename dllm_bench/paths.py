"""Where the package's own files lie: configuration and embedded assets; what names they have.

In a checkout `conf/` stands beside the package; a wheel carries it inside (`dllm_bench/conf`).
User directories (results, data) are configuration, see `conf/paths`.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ASSETS = "assets/"


def conf_dir() -> Path:
    """The root of the configuration groups."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def assets_dir() -> Path:
    """Embedded weights, tokenizer and task data."""
    return PACKAGE / ASSETS


def place_of(source: str) -> Path:
    """Where a source lies, if it is on this disk: `assets/…` is the package's."""
    shipped = source.startswith(ASSETS)
    return assets_dir() / source.removeprefix(ASSETS) if shipped else Path(source).expanduser()


def options(group: str) -> list[str]:
    """Names a configuration group offers: the yaml files of its folder, sorted."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def no_such(kind: str, name: str, known: Sequence[str], more: str = "") -> str:
    """What to say of a name that is not among the known ones: the nearest, then all of them."""
    near = get_close_matches(name, known, n=1)
    choose = f"did you mean {near[0]!r}? Choose" if near else "choose"
    return f"There is no {kind} {name!r}; {choose} one of: {', '.join(known)}{more}."
