"""Prompts without answers: DeepSpec's evaluation sets, for throughput and acceptance length, and
this project's `open_text`.

A row of DeepSpec's files is a list of user turns; only the first is used, as a chat turn. If a set
has more prompts than its cap, they are shuffled with DeepSpec's seed and cut, as its evaluator
does. Nothing is graded: a run has no score, which is not a score of zero. The set `alpaca` is not
in DeepSpec's snapshot; its file has to be made by hand.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks import items
from dllm_bench.benchmarks.embedded import OPEN_TEXT, TEST, FrozenTask, GeneratedTask
from dllm_bench.benchmarks.items import Item, ItemsBenchmark
from dllm_bench.core.benchmark import SampleScore, Turns
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.registry import register, require_known

SETS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("prompt_sets.yaml"))
"""DeepSpec's sets."""
GENERATED: Mapping[str, GeneratedTask] = {OPEN_TEXT.name: OPEN_TEXT}
"""Sets of this project."""
ORDER_SEED = 980406  # DeepSpec's
FOLDER = "deepspec_eval"


@register("benchmark.prompts")
@dataclass(frozen=True, eq=False)
class PromptsBenchmark(ItemsBenchmark):
    """One set of prompts."""

    name: str
    dataset: str
    """A name of SETS or GENERATED."""
    max_new_tokens: int
    chat: bool = True
    """Whether the model takes chat turns; if not, the prompt is plain text."""
    limit: int | None = None
    """Number of prompts; None for all up to the cap."""
    repeats: int = 1
    """How many samples each prompt gets."""
    data_dir: str | None = None
    """Directory that holds `deepspec_eval/`; required but for generated sets."""
    split: str = TEST
    """Of a generated set."""

    @property
    def item_set(self) -> FrozenTask | None:
        return GENERATED.get(self.dataset)

    def check(self) -> None:
        """Raise DllmBenchError for an unknown set or split, or an absent file."""
        require_known("prompt set", self.dataset, [*SETS, *GENERATED])
        if self.item_set:
            require_known("split", self.split, self.item_set.splits)
        else:
            self._file()

    def _file(self) -> Path:
        """Return the set's file; DllmBenchError if it does not exist."""
        if self.data_dir is None:
            raise DllmBenchError(
                f"Benchmark {self.name!r} reads {FOLDER}/{self.dataset}.jsonl and has no data "
                "directory; name the one that holds it with paths.data=DIR."
            )
        return items.data_file(self.data_dir, f"{FOLDER}/{self.dataset}.jsonl", self.name)

    def all_items(self) -> Sequence[Item]:
        """Return all prompts; an `id` ends in the line of the prompt."""
        self.check()
        if self.item_set:
            return self.item_set.items(self.split)
        file = self._file()
        with items.naming_file(file):
            return [
                {"id": f"prompts/{self.dataset}/{i}", "prompt": row["turns"][0]}
                for i, row in enumerate(items.read_jsonl(file))
            ]

    @cached_property
    def items(self) -> list[Item]:
        """The chosen prompts; those of DeepSpec's sets in its order."""
        rows = list(self.all_items())
        if self.item_set:
            return items.choose_items(rows, self.limit, self.repeats)
        cap = SETS[self.dataset]["cap"]
        if len(rows) > cap:
            random.Random(ORDER_SEED).shuffle(rows)
        return items.repeat_items(rows[:cap][: self.limit], self.repeats)

    def prompt(self, item: Item) -> str | Turns:
        text = str(item["prompt"])
        return [{"role": "user", "content": text}] if self.chat else text

    @property
    def known_hash(self) -> str | None:
        """Hash of a whole set of DeepSpec's prompts, without reading its file; else None."""
        unread = self.data_dir is None and self.chat and self.repeats == 1
        return SETS.get(self.dataset, {}).get("chat_hash") if unread else None

    @property
    def is_hash_known(self) -> bool:
        return super().is_hash_known or self.known_hash is not None

    def dataset_hash(self) -> str:
        """Return sha256 over the prompts and their form."""
        return self.known_hash or super().dataset_hash()

    def form(self) -> dict[str, object]:
        # The prompts themselves, where other benchmarks hash the file of a generated set.
        return {"items": self.items, "form": self.chat}

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Return NaN for every text, with the verdict "not graded"."""
        return {i["id"]: SampleScore(math.nan, "not graded", {}) for i in self.answered(texts)}
