"""Draw the test and unseen items of every embedded task and write the files that the package reads.

    .venv/bin/python -m scripts.embedded.items [TASK ...]

Only after a change of a generator that is meant to change its problems: the hash of a file is part
of the identity of all runs on its task.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Sequence
from itertools import product

from dllm_bench.benchmarks import evalplus, prompts
from dllm_bench.benchmarks.embedded import miniparallel
from dllm_bench.benchmarks.embedded.generated import FROZEN, TEST, UNSEEN, GeneratedTask
from dllm_bench.benchmarks.tasks import sources


def frozen_tasks() -> dict[str, GeneratedTask]:
    """Return the tasks with a file of items by name; the families of miniparallel are tasks."""
    tasks = [
        *sources.GENERATED.values(),
        *evalplus.GENERATED.values(),
        *prompts.GENERATED.values(),
        *map(miniparallel.TASK.of_family, miniparallel.FAMILIES),
    ]
    return {task.name: task for task in tasks if task is not miniparallel.TASK}


def write(names: Sequence[str]) -> None:
    """Write the files of each named task, or of all."""
    FROZEN.mkdir(exist_ok=True)
    tasks = frozen_tasks()
    for name, split in product(names or tasks, (TEST, UNSEEN)):
        if split == UNSEEN and name.startswith(miniparallel.TASK.name):
            continue  # a family is a split of its own
        items = tasks[name].draw_items(split)
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        content = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
        tasks[name].frozen_file(split).write_bytes(content)
        print(f"{name}, {split}: {len(items)} items, {len(content):,} bytes")


if __name__ == "__main__":
    write(sys.argv[1:])
