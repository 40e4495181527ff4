"""Prompts without answers, for throughput and acceptance length: DeepSpec's evaluation sets.

Each file is a list of user turns; only the first is asked, in a chat turn. More prompts than the
set's cap are shuffled with DeepSpec's seed and cut, as its evaluator does. Nothing is graded: the
score of a run is absent, not zero. `alpaca` is not in DeepSpec's snapshot and has to be made.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dllm_bench.benchmarks.items import (
    Item,
    LazyRequests,
    answered_items,
    content_hash,
    data_file,
    read_jsonl,
    repeat_items,
    require_known,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import register

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Encode, SampleScore, Turns
    from dllm_bench.core.request import Request

CAPS: Mapping[str, int] = {
    "gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256,
    "livecodebench": 500, "mt-bench": 80, "alpaca": 500, "arena-hard-v2": 500,
}  # fmt: skip
"""DeepSpec's own numbers of prompts."""
ORDER_SEED = 980406  # DeepSpec's
FOLDER = "deepspec_eval"


@register("benchmark.prompts")
@dataclass(frozen=True, eq=False)
class PromptsBenchmark:
    """One set of prompts. chat: whether the model takes turns, if not the prompt stands alone."""

    name: str
    dataset: str
    max_new_tokens: int
    chat: bool = True
    limit: int | None = None
    repeats: int = 1
    data_dir: str | None = None

    def check(self) -> None:
        """Raise for what would fail later: the name and the file."""
        require_known("set of prompts", self.dataset, CAPS)
        if self.data_dir is None:
            raise DllmBenchError(
                f"Benchmark {self.name!r} reads {FOLDER}/{self.dataset}.jsonl and has no data "
                "directory; name the one that holds it with paths.data=DIR."
            )
        data_file(self.data_dir, f"{FOLDER}/{self.dataset}.jsonl", self.name)

    @cached_property
    def items(self) -> list[Item]:
        """The chosen prompts in DeepSpec's order, each with an `id` that is its line."""
        self.check()
        file = data_file(str(self.data_dir), f"{FOLDER}/{self.dataset}.jsonl", self.name)
        rows = [
            {"id": f"prompts/{self.dataset}/{i}", "prompt": row["turns"][0]}
            for i, row in enumerate(read_jsonl(file))
        ]
        if len(rows) > CAPS[self.dataset]:
            random.Random(ORDER_SEED).shuffle(rows)
        return repeat_items(rows[: CAPS[self.dataset]][: self.limit], self.repeats)

    def requests(self, encode: Encode) -> Sequence[Request]:
        """One request per prompt."""
        return LazyRequests(self.items, self._prompt, encode, self.max_new_tokens, ())

    def _prompt(self, item: Item) -> str | Turns:
        text = str(item["prompt"])
        return [{"role": "user", "content": text}] if self.chat else text

    def dataset_hash(self) -> str:
        """sha256 over the prompts and their form."""
        return content_hash({"items": self.items, "form": self.chat})

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """No grade for any text."""
        from dllm_bench.core.benchmark import SampleScore

        items = answered_items(texts, self.items, self.name)
        return {item["id"]: SampleScore(math.nan, "not graded", {}) for item in items}
