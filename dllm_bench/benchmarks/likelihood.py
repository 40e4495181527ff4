"""Benchmarks that are lm-eval tasks of likelihoods (`output_type: multiple_choice`).

lm-eval builds contexts and continuations and grades the log-likelihoods: `acc` for the likeliest
option, `acc_norm` for the likeliest per character. Prompts are plain text, as for base models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dllm_bench.benchmarks import options
from dllm_bench.benchmarks.items import PLAIN, Item, LazyRequests, answered_items
from dllm_bench.benchmarks.lm_eval import LmEvalBenchmark, metric_names, task_over
from dllm_bench.core.benchmark import Encode, GradedAnswer, SampleScore
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Likelihood, Request
from dllm_bench.registry import register


class OptionRequests(LazyRequests):
    """Requests with options, built on access."""

    def __init__(self, benchmark: LikelihoodBenchmark, encode: Encode) -> None:
        super().__init__(benchmark.items, lambda item: "", encode, 1, ())
        self._benchmark = benchmark

    def _build(self, item: Item) -> Request:
        pairs = self._benchmark.pairs(item)
        made = [options.option_of(*pair, self._encode) for pair in pairs]
        return options.request_of(item["id"], made, "\n".join(map("".join, pairs)))


@register("benchmark.likelihood")
@dataclass(frozen=True, eq=False)
class LikelihoodBenchmark(LmEvalBenchmark):
    """One lm-eval task of likelihoods with its number of shots and primary metric."""

    @property
    def asks_likelihoods(self) -> bool:
        """Always."""
        return True

    def check(self) -> None:
        """Raise DllmBenchError for unknown names, absent data, or another template than plain."""
        super().check()
        if self.template != PLAIN:
            raise DllmBenchError(
                f"Benchmark {self.name!r} scores continuations of plain text, and "
                f"benchmark.template={self.template} was asked for; set it to {PLAIN}."
            )

    def requests(self, encode: Encode) -> Sequence[Request]:
        """Return one request per item, with an option per choice."""
        return OptionRequests(self, encode)

    def pairs(self, item: Item) -> list[tuple[str, str]]:
        """Return (context, continuation) of each choice, as lm-eval builds them."""
        task = self._lm_eval_task
        context = task.fewshot_context(dict(item), self.shots)
        made = task.construct_requests(dict(item), context, metadata=(self.task, 0, 1))
        return [instance.args for instance in made]

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Grade stored likelihoods by the task's metrics; needs no model."""
        items = answered_items(texts, self.items, self.name)
        return {item["id"]: self._score(item, texts[item["id"]]) for item in items}

    def _score(self, item: Item, text: str) -> SampleScore:
        try:
            said = options.likelihoods_of(text)
        except ValueError:
            return SampleScore(0.0, "no_answer", dict.fromkeys(metric_names(self.task), 0.0))
        metrics = self._metrics(item, said)
        value = metrics[self.primary]
        return SampleScore(value, "correct" if value else "wrong", metrics)

    def _metrics(self, item: Item, said: Sequence[Likelihood]) -> dict[str, float]:
        """Return lm-eval's metrics of one item."""
        results = [(one.nats, one.greedy) for one in said]
        found = task_over(self.task, item).process_results(dict(item), results)
        return {f"{name},none": float(value) for name, value in found.items()}

    def answers(self, texts: Mapping[str, str]) -> dict[str, GradedAnswer]:
        """Return the right choice, the most likely one, and the likelihoods of all."""
        items = answered_items(texts, self.items, self.name)
        return {item["id"]: self._answer(item, texts[item["id"]]) for item in items}

    def _answer(self, item: Item, text: str) -> GradedAnswer:
        task = task_over(self.task, item)
        choices, right = task.doc_to_choice(dict(item)), right_choice(task, item)
        try:
            said = options.likelihoods_of(text)
        except ValueError:
            return GradedAnswer(choices[right], "")
        best = max(range(len(said)), key=lambda i: said[i].nats)
        shown = " | ".join(f"{one.nats:.2f} ± {one.error:.2f}" for one in said)
        metrics = self._metrics(item, said)
        return GradedAnswer(choices[right], choices[best], {"none": shown}, metrics)


def right_choice(task: Any, item: Item) -> int:
    """Return the index of the right choice; of an item of lm-eval's task."""
    doc: dict[str, Any] = dict(item)
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    return gold if isinstance(gold, int) else list(task.doc_to_choice(doc)).index(gold)
