"""Programs that do not solve their task and try to be judged right, or to break their judge.

The task is a function `f` with `f(x) == 2 * x + 1`. A program that defines no `f` of its own gets
one that returns None. Each has a name; their texts are in `pretending.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

from dllm_bench.paths import read_yaml

WRONG = "\ndef f(x):\n    return None\n"
GROUPS = read_yaml(Path(__file__).with_suffix(".yaml"))
PARTS = GROUPS.pop("parts")


def programs(group: str, start: str = "", end: str = "") -> dict[str, str]:
    """Return the programs of a group by name, with their parts filled in."""
    every = {name: Template(text).substitute(PARTS) for name, text in GROUPS[group].items()}
    return {name: f"{start}{text}{end}" for name, text in every.items()}


def during_call(source: str) -> str:
    """Return a program that runs the statements when it is called."""
    return (
        "def f(x):\n    exec(SOURCE, globals())\n    import os\n    os._exit(0)\nSOURCE = "
        + repr(source)
    )


CHANNEL = PARTS["CHANNEL"] + "\n"
STARTS = {"patches": "", "searches": "", "channel": "", "returns": "", "forged": CHANNEL}
PROGRAMS: Mapping[str, str] = {
    f"{group}: {name}": source if "def f(" in source else source + WRONG
    for group, start in STARTS.items()
    for name, source in programs(group, start).items()
}
SLOW: Mapping[str, str] = programs("slow")
BREAKING: Mapping[str, str] = {
    **{name: CHANNEL + during_call(source) for name, source in programs("breakers").items()},
    **programs("nameless", CHANNEL, WRONG),
}
"""Programs that send what a judge might break over, which must be wrong, not without a grade."""
