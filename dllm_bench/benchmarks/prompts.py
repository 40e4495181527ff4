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

from dllm_bench.benchmarks.embedded import open_text
from dllm_bench.benchmarks.embedded.generated import TEST, GeneratedTask
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
from dllm_bench.registry import register, require_known

CAPS: Mapping[str, int] = {
    "gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256,
    "livecodebench": 500, "mt-bench": 80, "alpaca": 500, "arena-hard-v2": 500,
}  # fmt: skip
"""Set -> the most prompts DeepSpec uses of it."""
CHAT_HASHES: Mapping[str, str] = {
    "gsm8k": "bc84ea14ad59f97cc8525b7fc56685eb0296c92141df3553eb09211835e80559",
    "math500": "cc1c551ee59d09210d9a17a0e8d65356d757fa7c8cfaf4ca80db5a01a632de7c",
    "aime25": "d08737ed22ae669fd530d495c73e7b592b852bac72383753cf45216251620f24",
    "humaneval": "9cdf0f6dba498b303fe1efe90040ccf3e466a5a03097dff886eca1eb0b24de28",
    "mbpp": "638d9a01c30ece3bf8af76fa4e4bfc557cc40fda29920ff6f1f2fae1bca9c3a0",
    "livecodebench": "5346f056aa310bae0fc0848bc5f0142318d12154177addca66fba79a06575bba",
    "mt-bench": "60c61b91bceae5805379a576d95de98efd895e61a50445b0d795a86864f1d30b",
    "arena-hard-v2": "06957ce1b566f9695c8fb1ee770959e0e839398ecea14ecfcd0a7564ef4e00bd",
}
"""Set -> `dataset_hash` of its prompts as chat turns in DeepSpec@afdfa7c, by which stored runs are
found without its file."""
GENERATED: Mapping[str, GeneratedTask] = {open_text.TASK.name: open_text.TASK}
"""Sets of this project."""
ORDER_SEED = 980406  # DeepSpec's
FOLDER = "deepspec_eval"


@register("benchmark.prompts")
@dataclass(frozen=True, eq=False)
class PromptsBenchmark(Benchmark):
    """One set of prompts."""

    name: str
    dataset: str
    """A name of CAPS or GENERATED."""
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
        require_known("prompt set", self.dataset, [*CAPS, *GENERATED])
        if self.generated:
            require_known("split", self.split, GENERATED[self.dataset].splits)
            return
        if self.data_dir is None:
            raise DllmBenchError(
                f"Benchmark {self.name!r} reads {FOLDER}/{self.dataset}.jsonl and has no data "
                "directory; name the one that holds it with paths.data=DIR."
            )
        data_file(self.data_dir, f"{FOLDER}/{self.dataset}.jsonl", self.name)

    @cached_property
    def items(self) -> list[Item]:
        """The chosen prompts in DeepSpec's order; an `id` ends in the line of the prompt."""
        self.check()
        if self.generated:
            every = GENERATED[self.dataset].items(self.split)
            return choose_items(every, self.limit, self.repeats)
        file = data_file(str(self.data_dir), f"{FOLDER}/{self.dataset}.jsonl", self.name)
        with naming_file(file):
            rows = [
                {"id": f"prompts/{self.dataset}/{i}", "prompt": row["turns"][0]}
                for i, row in enumerate(read_jsonl(file))
            ]
        if len(rows) > CAPS[self.dataset]:
            random.Random(ORDER_SEED).shuffle(rows)
        return repeat_items(rows[: CAPS[self.dataset]][: self.limit], self.repeats)

    def requests(self, encode: Encode) -> Sequence[Request]:
        """Return one request per prompt."""
        return text_requests(self.items, self._prompt, encode, self.max_new_tokens, ())

    def _prompt(self, item: Item) -> str | Turns:
        text = str(item["prompt"])
        return [{"role": "user", "content": text}] if self.chat else text

    def dataset_hash(self) -> str:
        """Return sha256 over the prompts and their form; without data, that of DeepSpec's."""
        unread = self.data_dir is None and self.chat and self.repeats == 1
        known = CHAT_HASHES.get(self.dataset) if unread else None
        return known or content_hash({"items": self.items, "form": self.chat})

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Return NaN for every text, with the verdict "not graded"."""
        items = answered_items(texts, self.items, self.name)
        return {item["id"]: SampleScore(math.nan, "not graded", {}) for item in items}
