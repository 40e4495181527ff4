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

from dllm_bench.benchmarks.embedded import OPEN_TEXT, TEST, GeneratedTask
from dllm_bench.benchmarks.items import (
    Item,
    answered_items,
    choose_items,
    content_hash,
    data_file,
    naming_file,
    read_jsonl,
    repeat_items,
    text_requests,
)
from dllm_bench.core.benchmark import Benchmark, Encode, SampleScore, Turns
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
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
class PromptsBenchmark(Benchmark):
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
    def generated(self) -> bool:
        """Whether the set is this project's."""
        return self.dataset in GENERATED

    def check(self) -> None:
        """Raise DllmBenchError for an unknown set or split, or an absent file."""
        require_known("prompt set", self.dataset, [*SETS, *GENERATED])
        if self.generated:
            require_known("split", self.split, GENERATED[self.dataset].splits)
        else:
            self._file()

    def _file(self) -> Path:
        """Return the set's file; DllmBenchError if it does not exist."""
        if self.data_dir is None:
            raise DllmBenchError(
                f"Benchmark {self.name!r} reads {FOLDER}/{self.dataset}.jsonl and has no data "
                "directory; name the one that holds it with paths.data=DIR."
            )
        return data_file(self.data_dir, f"{FOLDER}/{self.dataset}.jsonl", self.name)

    @cached_property
    def items(self) -> list[Item]:
        """The chosen prompts in DeepSpec's order; an `id` ends in the line of the prompt."""
        self.check()
        if self.generated:
            every = GENERATED[self.dataset].items(self.split)
            return choose_items(every, self.limit, self.repeats)
        file, cap = self._file(), SETS[self.dataset]["cap"]
        with naming_file(file):
            rows = [
                {"id": f"prompts/{self.dataset}/{i}", "prompt": row["turns"][0]}
                for i, row in enumerate(read_jsonl(file))
            ]
        if len(rows) > cap:
            random.Random(ORDER_SEED).shuffle(rows)
        return repeat_items(rows[:cap][: self.limit], self.repeats)

    def requests(self, encode: Encode) -> Sequence[Request]:
        """Return one request per prompt."""
        return text_requests(self.items, self._prompt, encode, self.max_new_tokens, ())

    def _prompt(self, item: Item) -> str | Turns:
        text = str(item["prompt"])
        return [{"role": "user", "content": text}] if self.chat else text

    def dataset_hash(self) -> str:
        """Return sha256 over the prompts and their form; without data, that of DeepSpec's."""
        unread = self.data_dir is None and self.chat and self.repeats == 1
        known = SETS.get(self.dataset, {}).get("chat_hash") if unread else None
        return known or content_hash({"items": self.items, "form": self.chat})

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Return NaN for every text, with the verdict "not graded"."""
        items = answered_items(texts, self.items, self.name)
        return {item["id"]: SampleScore(math.nan, "not graded", {}) for item in items}
