"""Draw the test items of every embedded task and write the files that the package reads.

    .venv/bin/python -m scripts.embedded.items [TASK ...]

Only after a change of a generator that is meant to change its problems: the hash of a file is part
of the identity of all runs on its task.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Sequence

from dllm_bench.benchmarks import evalplus
from dllm_bench.benchmarks.embedded import miniparallel
from dllm_bench.benchmarks.embedded.generated import FROZEN, TEST, GeneratedTask
from dllm_bench.benchmarks.tasks import sources


def frozen_tasks() -> dict[str, GeneratedTask]:
    """Return the tasks with a file of items by name; the families of miniparallel are tasks."""
    tasks = [
        *sources.GENERATED.values(),
        *evalplus.GENERATED.values(),
        *map(miniparallel.TASK.of_family, miniparallel.FAMILIES),
    ]
    return {task.name: task for task in tasks if task is not miniparallel.TASK}


def write(names: Sequence[str]) -> None:
    """Write the file of each named task, or of all."""
    FROZEN.mkdir(exist_ok=True)
    tasks = frozen_tasks()
    for name in names or tasks:
        items = tasks[name].draw_items(TEST)
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        content = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
        tasks[name].frozen_file.write_bytes(content)
        print(f"{name}: {len(items)} items, {len(content):,} bytes")


if __name__ == "__main__":
    write(sys.argv[1:])
