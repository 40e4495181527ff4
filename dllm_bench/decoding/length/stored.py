"""Measured numbers that rules of length read from a json file: step profiles, temperatures.

A file is one that `dllm-bench train` wrote, or a shipped one below `assets/`. Only its content is
part of a run's identity, never its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import place_of

Value = TypeVar("Value")


def read(source: str, make: Callable[[Any], Value], what: str, command: str) -> Value:
    """What `make` finds in the json at `source`; a sentence where it finds nothing."""
    try:
        return make(json.loads(place_of(source).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DllmBenchError(
            f"{source!r} holds no {what} ({type(error).__name__}); make one with "
            f"`dllm-bench {command}` and name the file it writes."
        ) from error
