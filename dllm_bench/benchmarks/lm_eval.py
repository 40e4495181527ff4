"""Benchmarks that are lm-eval tasks: lm-eval builds the prompts and grades, our decoders generate.

The tasks are the yaml files of `tasks/`, loaded without lm-eval's own index. lm-eval is imported
only when a request is built or a text is graded; names, data and hashes do not need it.
`api/lm_eval_model.py` is the other direction: our decoders as a model of lm-eval.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dllm_bench.benchmarks import items, sandbox
from dllm_bench.benchmarks.bounded import UnreadableAnswerError, call_bounded, unreadable
from dllm_bench.benchmarks.embedded import FrozenTask
from dllm_bench.benchmarks.tasks import NOTHING, sources
from dllm_bench.core.benchmark import (
    Encode,
    GradedAnswer,
    SampleScore,
    Turns,
    judge_error,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Likelihood, Request
from dllm_bench.registry import register, require_known

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

TASKS = Path(__file__).parent / "tasks"
TASKS_MODULE = f"{__package__}.tasks."
PROMPT_KEYS = (
    "doc_to_text", "doc_to_target", "target_delimiter", "fewshot_delimiter", "fewshot_config",
    "description", "gen_prefix", "doc_to_choice",
)  # fmt: skip
"""Entries of a task file that decide the prompts."""
ENDINGS = ("timeout", "crashed")
"""Metrics of code tasks that say how a wrong program ended."""


@register("benchmark.lm_eval")
@dataclass(frozen=True, eq=False, kw_only=True)
class LmEvalBenchmark(items.BenchmarkSettings, items.ItemsBenchmark):
    """One lm-eval task with its number of shots, prompt form and primary metric.

    template: "plain", "chat" (one user turn) or "chat_multiturn" (a turn per few-shot example).
    """

    task: str
    """Name of a file in `tasks/`."""
    limit: int | None = None
    """Number of items; None for all items of the split."""

    def check(self) -> None:
        """Raise DllmBenchError for unknown names, absent data files or missing consent."""
        task_file(self.task)
        require_known(f"template of {self.name!r}:", self.template, items.TEMPLATES)
        require_known(f"primary metric of {self.name!r}:", self.primary, metric_names(self.task))
        if self.runs_code:
            sandbox.require_consent(self.allow_code_execution, self.name)
        sources.check(self._source, self.split, self.data_dir)
        if self.shots and self._shots_from:
            sources.check(self._source, self._shots_from, self.data_dir)

    @property
    def runs_code(self) -> bool:
        """Whether the task file says that grading runs programs that a model wrote."""
        return bool(task_file(self.task).get("unsafe_code", False))

    @property
    def item_set(self) -> FrozenTask | None:
        return sources.GENERATED.get(self._source)

    @property
    def scores_fast(self) -> bool:
        """Whether no program has to run for a grade."""
        return not self.runs_code

    @property
    def _source(self) -> str:
        return str(task_file(self.task)["dataset_kwargs"]["source"])

    @property
    def _shots_from(self) -> str | None:
        split: str | None = task_file(self.task)["dataset_kwargs"].get("shots_from")
        return split

    def all_items(self) -> Sequence[items.Item]:
        return sources.rows(self._source, self.split, self.data_dir)

    @cached_property
    def _lm_eval_task(self) -> ConfigurableTask:
        """lm-eval's task over exactly these items, in this order."""
        chosen = {"items": self.items, "data_dir": self.data_dir, "shots_count": self.shots}
        return load_task(self.task, chosen)

    @property
    def _template(self) -> str:
        """The template this model can take."""
        return self.template if self.chat else items.PLAIN

    def prompt(self, item: items.Item) -> str | Turns:
        """Return the prompt that lm-eval builds."""
        chat, multiturn = items.TEMPLATES[self._template]
        task = self._lm_eval_task
        prompt: str | Turns = task.fewshot_context(
            dict(item),
            self.shots,
            apply_chat_template=chat,
            fewshot_as_multiturn=multiturn,
            chat_template=_keep_turns if chat else None,
            gen_prefix=task.doc_to_prefix(dict(item)),
        )
        return prompt

    def form(self) -> dict[str, object]:
        file = task_file(self.task)
        entries = {key: file[key] for key in PROMPT_KEYS if key in file}
        shots = sources.shots(self._source, self._shots_from, self.shots, self.data_dir)
        return {"shots": shots, "form": [entries, self._template, list(self.stops)]}

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Grade texts with the task's filters and metrics; needs no model."""
        if self.runs_code:
            sandbox.require_consent(self.allow_code_execution, self.name)
        readings = self._readings(texts)
        mapped: Any = sandbox.map_in_threads if self.runs_code else map
        graded = mapped(self._grade, readings)
        return {one.item["id"]: score for one, score in zip(readings, graded, strict=True)}

    def answers(self, texts: Mapping[str, str]) -> dict[str, GradedAnswer]:
        """Return the task's target, what each filter finds in the text, and its metrics."""
        chosen = self.primary.rpartition(",")[2]
        return {
            reading.item["id"]: GradedAnswer(
                call_bounded(read_target, "", self.task, dict(reading.item)),
                str(reading.filtered.get(chosen, "")),
                {name: str(found) for name, found in reading.filtered.items()},
                reading.metrics,
            )
            for reading in self._readings(texts)
        }

    def _readings(self, texts: Mapping[str, str]) -> list[Reading]:
        """Return the texts after the task's filters and, unless programs have to run, its
        metrics."""
        return [self._reading(item, texts[item["id"]]) for item in self.answered(texts)]

    def _reading(self, item: items.Item, whole: str) -> Reading:
        text = items.cut_at_stop(whole, self.stops)
        try:
            found = call_bounded(read_answer, text, self.task, dict(item), not self.runs_code)
        except UnreadableAnswerError as error:
            return Reading(item, text, error=error)
        return Reading(item, text, *found)

    def _grade(self, reading: Reading) -> SampleScore:
        """Return all metrics of one answer as "<metric>,<filter>"; how a program ended is the
        verdict."""
        if reading.error is not None:
            kept = (name for name in metric_names(self.task) if name.split(",")[0] not in ENDINGS)
            return unreadable(reading.error, kept)
        metrics = reading.metrics
        if self.runs_code:
            metrics = _task_metrics(self._lm_eval_task, reading.item, reading.filtered)
        require_known(f"metric of task {self.task}:", self.primary, metrics)
        return _sample_score(reading, metrics, self.primary)


@dataclass(frozen=True)
class Reading:
    """What was read of an answer."""

    item: items.Item
    text: str
    filtered: Mapping[str, Any] = field(default_factory=dict)
    """Filter -> what it finds."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """"<metric>,<filter>" -> value; empty if a program has to run for it."""
    error: UnreadableAnswerError | None = None
    """Why nothing could be read."""


_TO_READ: dict[str, ConfigurableTask] = {}
"""Task -> lm-eval's task over one item, whose filters and metrics are used."""


def read_answer(
    text: str, task: str, item: items.Item, graded: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return (what each filter of a task finds in the text, metrics); {} for metrics unless
    `graded`."""
    from lm_eval.api.instance import Instance

    loaded = task_over(task, item)
    instance = Instance("generate_until", dict(item), ("", {}), 0, (task, 0, 1), resps=[text])
    loaded._instances = [instance]
    loaded.apply_filters()
    filtered = dict(instance.filtered_resps)
    return filtered, _task_metrics(loaded, item, filtered) if graded else {}


def read_target(_: str, task: str, item: items.Item) -> str:
    """Return the right answer of an item; called by a helper, so that this process imports no
    lm-eval."""
    return str(task_over(task, item).doc_to_target(dict(item))).strip()


def task_over(task: str, item: items.Item) -> ConfigurableTask:
    """Return lm-eval's task, whose filters and metrics are used, over one item; loaded once."""
    if task not in _TO_READ:
        _TO_READ[task] = load_task(task, {"items": [item], "shots_count": 0})
    return _TO_READ[task]


def _keep_turns(turns: Turns, add_generation_prompt: bool = True) -> Turns:
    """Keep the turns, which `encode` renders later; lm-eval takes this as the chat template."""
    return turns


def _task_metrics(
    task: ConfigurableTask, item: items.Item, filtered: Mapping[str, Any]
) -> dict[str, float]:
    return {
        f"{metric},{key}": float(value)
        for key, answer in filtered.items()
        for metric, value in task.process_results(dict(item), [answer]).items()
    }


def _sample_score(reading: Reading, metrics: Mapping[str, float], primary: str) -> SampleScore:
    value, chosen = metrics[primary], primary.rpartition(",")[2]
    if math.isnan(value):
        return judge_error(f"the sandbox gave no verdict for {reading.item['id']}")
    verdict = "wrong"
    if value:
        verdict = "correct"
    elif not reading.text.strip():
        verdict = "empty"
    elif endings := [name for name in ENDINGS if metrics.get(f"{name},{chosen}")]:
        verdict = endings[0]
    elif reading.filtered[chosen] == NOTHING:
        verdict = "no_answer"
    kept = {name: v for name, v in metrics.items() if name.split(",")[0] not in ENDINGS}
    return SampleScore(value, verdict, kept)


def task_names() -> list[str]:
    """Return names of the task files, sorted."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


class TaskFileLoader(yaml.SafeLoader):
    """SafeLoader that knows lm-eval's `!function`."""


TaskFileLoader.add_constructor(
    "!function", lambda loader, node: str(node.value).removeprefix(TASKS_MODULE)
)


@cache
def task_file(task: str) -> Mapping[str, Any]:
    """Return the parsed yaml of a task; a function it names becomes that name, ours without the
    package.

    The name of a prompt function enters the dataset hash, which a move of the package must not
    change.
    """
    require_known("lm-eval task", task, task_names())
    return dict(yaml.load((TASKS / f"{task}.yaml").read_text(encoding="utf-8"), TaskFileLoader))


def metric_names(task: str) -> list[str]:
    """Return names "<metric>,<filter>" of a task's metrics."""
    file = task_file(task)
    return [f"{m['metric']},{f['name']}" for m in file["metric_list"] for f in file["filter_list"]]


def load_task(task: str, options: Mapping[str, Any]) -> ConfigurableTask:
    """Return lm-eval's task for a file of `tasks/`; `options` go to `sources.dataset`."""
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=dict(options))
    loaded: ConfigurableTask = manager.load(task)["tasks"][task]
    return loaded


# --- likelihoods ----------------------------------------------------------------------------------


@register("benchmark.likelihood")
@dataclass(frozen=True, eq=False)
class LikelihoodBenchmark(LmEvalBenchmark):
    """One lm-eval task of likelihoods (`output_type: multiple_choice`).

    lm-eval builds contexts and continuations and grades the log-likelihoods: `acc` for the
    likeliest option, `acc_norm` for the likeliest per character. Prompts are plain text, as for
    base models.
    """

    @property
    def asks_likelihoods(self) -> bool:
        """Always."""
        return True

    def check(self) -> None:
        """Raise DllmBenchError for unknown names, absent data, or another template than plain."""
        super().check()
        if self.template != items.PLAIN:
            raise DllmBenchError(
                f"Benchmark {self.name!r} scores continuations of plain text, and "
                f"benchmark.template={self.template} was asked for; set it to {items.PLAIN}."
            )

    def request(self, item: items.Item, encode: Encode) -> Request:
        """Return the request of an item, with an option per choice."""
        pairs = self.pairs(item)
        made = [items.option_of(*pair, encode) for pair in pairs]
        return items.request_of(item["id"], made, "\n".join(map("".join, pairs)))

    def pairs(self, item: items.Item) -> list[tuple[str, str]]:
        """Return (context, continuation) of each choice, as lm-eval builds them."""
        task = self._lm_eval_task
        context = task.fewshot_context(dict(item), self.shots)
        made = task.construct_requests(dict(item), context, metadata=(self.task, 0, 1))
        return [instance.args for instance in made]

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Grade stored likelihoods by the task's metrics; needs no model."""
        return {i["id"]: self._score(i, texts[i["id"]]) for i in self.answered(texts)}

    def _score(self, item: items.Item, text: str) -> SampleScore:
        try:
            metrics = self._metrics(item, items.likelihoods_of(text))
        except ValueError:
            return SampleScore(0.0, "no_answer", dict.fromkeys(metric_names(self.task), 0.0))
        value = metrics[self.primary]
        return SampleScore(value, "correct" if value else "wrong", metrics)

    def _metrics(self, item: items.Item, said: Sequence[Likelihood]) -> dict[str, float]:
        """Return lm-eval's metrics of one item; ValueError without a number for each option."""
        task, results = task_over(self.task, item), [(one.nats, one.greedy) for one in said]
        options = len(task.doc_to_choice(dict(item)))
        if len(said) != options or any(math.isnan(nats) for nats, _ in results):
            raise ValueError(f"{len(said)} likelihoods, or one that is no number")
        found = task.process_results(dict(item), results)
        return {f"{name},none": float(value) for name, value in found.items()}

    def answers(self, texts: Mapping[str, str]) -> dict[str, GradedAnswer]:
        """Return the right choice, the most likely one, and the likelihoods of all."""
        return {i["id"]: self._answer(i, texts[i["id"]]) for i in self.answered(texts)}

    def _answer(self, item: items.Item, text: str) -> GradedAnswer:
        task, doc = task_over(self.task, item), dict(item)
        choices: list[str] = list(task.doc_to_choice(doc))
        gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        right = gold if isinstance(gold, int) else choices.index(gold)
        try:
            said = items.likelihoods_of(text)
            metrics = self._metrics(item, said)
        except ValueError:
            return GradedAnswer(choices[right], "")
        best = max(range(len(said)), key=lambda i: said[i].nats)
        shown = " | ".join(f"{one.nats:.2f} ± {one.error:.2f}" for one in said)
        return GradedAnswer(choices[right], choices[best], {"none": shown}, metrics)
