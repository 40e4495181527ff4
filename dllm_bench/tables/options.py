"""The tables and figures there are, as `<paper>/<name>`, and which of them a name stands for."""

from __future__ import annotations

from dllm_bench.core.choices import unknown_name
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import conf_dir

EMBEDDED = "embedded"


def names(kind: str) -> list[str]:
    """All tables or figures (`kind`: a folder of conf), as `<paper>/<name>`, sorted."""
    paths = (conf_dir() / kind).glob("*/*.yaml")
    return sorted(f"{path.parent.name}/{path.stem}" for path in paths)


def chosen(kind: str, name: str) -> list[str]:
    """The table or figure called `name`, all of the paper `name`, or every one for `all`."""
    known = names(kind)
    matches = [one for one in known if name in (one, one.partition("/")[0], "all")]
    if not matches:
        raise DllmBenchError(unknown_name(kind, name, known, "; or a paper, or all"))
    return matches
