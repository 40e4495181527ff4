"""The lm-eval tasks: a yaml file each, with the items, prompts and graders they name."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from dllm_bench.paths import read_yaml

TEXTS = read_yaml(Path(__file__).parents[1] / "task_texts.yaml")
"""Wording of published prompts, by task. lm-eval would take a yaml in this folder for a task."""
NOTHING = "[invalid]"
"""What lm-eval's filters give where they find nothing."""
Doc = dict[str, Any]
"""An item as lm-eval passes it."""
Filter = Callable[[list[list[str]], list[Doc]], list[list[str]]]


def per_answer(read: Callable[[str, Doc], str]) -> Filter:
    """Return the filter of lm-eval that applies `read` to every answer."""

    @wraps(read)
    def of_all(resps: list[list[str]], docs: list[Doc]) -> list[list[str]]:
        pairs = zip(resps, docs, strict=True)
        return [[read(text, doc) for text in texts] for texts, doc in pairs]

    return of_all
