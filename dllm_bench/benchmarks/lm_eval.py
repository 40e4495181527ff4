"""Benchmarks that are lm-eval tasks: prompts and grading come from lm-eval, generation from us.

The tasks are the yaml files of `tasks/`, loaded without lm-eval's own index. `LmEvalBenchmark` asks
and grades for our runner; `as_lm` wraps any `generate(prompts) -> texts` as an lm-eval model, so
that lm-eval's own evaluator can run the same tasks. lm-eval is imported when a request is built or
a text is graded; names, data and hashes need none of it. No likelihoods: the models give none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dllm_bench.benchmarks import base, sandbox
from dllm_bench.benchmarks.tasks import data
from dllm_bench.core.request import DllmBenchError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.task import ConfigurableTask

    from dllm_bench.core.protocols import Encode, SampleScore, Turns
    from dllm_bench.core.request import Request

TASKS = Path(__file__).parent / "tasks"
PROMPT_KEYS = (
    "doc_to_text", "doc_to_target", "target_delimiter", "fewshot_delimiter", "fewshot_config",
    "description", "gen_prefix",
)  # fmt: skip
"""What of a task file decides the prompts."""
NO_MATCH = "[invalid]"
"""What lm-eval's regex filter gives where it finds nothing."""
Generate = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True, eq=False)
class LmEvalBenchmark:
    """One lm-eval task with its shots, prompt form and the metric that counts.

    template: "plain", "chat" (one user turn) or "chat_multiturn" (a turn per few-shot example);
    chat: whether the model takes turns, if not the form is "plain" whatever `template` says.
    escape_until: no `stop` string ends a text, the whole budget is used; `hard_stop` always cuts.
    primary: "<metric>,<filter>" of the task file. limit: None for all items of the split.
    """

    name: str
    task: str
    max_new_tokens: int
    primary: str
    shots: int = 0
    template: str = base.PLAIN
    chat: bool = True
    stop: Sequence[str] = ()
    hard_stop: Sequence[str] = ()
    escape_until: bool = False
    split: str = "test"
    limit: int | None = None
    data_dir: str | None = None
    allow_code_execution: bool = False

    def check(self) -> None:
        """Raise for what would fail later: names, data files, consent. Loads neither."""
        base.known("lm-eval task", self.task, data.SOURCES)
        base.known(f"template of {self.name!r}", self.template, base.TEMPLATES)
        base.known(f"primary metric of {self.name!r}", self.primary, _metrics(self.task))
        data.check(self.task, self.split, self.data_dir)
        if self.runs_code:
            sandbox.require_consent(self.allow_code_execution, self.name)

    @property
    def runs_code(self) -> bool:
        """Whether grading executes what the model wrote."""
        return bool(task_file(self.task).get("unsafe_code", False))

    @cached_property
    def items(self) -> list[base.Item]:
        """The chosen items in the fixed order, each with an `id`."""
        return base.choose(data.rows(self.task, self.split, self.data_dir), self.limit)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a text."""
        return base.stops(self.stop, self.hard_stop, self.escape_until)

    @cached_property
    def _lm_eval_task(self) -> ConfigurableTask:
        """The task over exactly these items, in this order."""
        options = {
            "split": self.split,
            "limit": self.limit,
            "data_dir": self.data_dir,
            "shots_count": self.shots,
        }
        return load_task(self.task, options)

    @property
    def scores_fast(self) -> bool:
        """Whether one text is graded in no time, so that a progress line may show the score."""
        return not self.runs_code

    @property
    def _form(self) -> str:
        return self.template if self.chat else base.PLAIN

    def requests(self, encode: Encode) -> Sequence[Request]:
        """One request per item; lm-eval builds the prompts."""
        return base.Requests(self.items, self._prompt, encode, self.max_new_tokens, self.stops)

    def _prompt(self, item: base.Item) -> str | Turns:
        chat, multiturn = base.TEMPLATES[self._form]
        prompt: str | Turns = self._lm_eval_task.fewshot_context(
            dict(item),
            self.shots,
            apply_chat_template=chat,
            fewshot_as_multiturn=multiturn,
            chat_template=_turns if chat else None,
        )
        return prompt

    def dataset_hash(self) -> str:
        """sha256 over items, few-shot examples, prompt form and stop strings."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        file = task_file(self.task)
        form = {key: file[key] for key in PROMPT_KEYS if key in file}
        return base.content_hash(
            {
                "items": self.items,
                "shots": data.shots(self.task, self.shots, self.data_dir),
                "form": [form, self._form, list(self.stops)],
            }
        )

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Grade texts with the task's filters and metrics; needs no model."""
        if self.runs_code:
            sandbox.require_consent(self.allow_code_execution, self.name)
        items = base.by_id(texts, self.items, self.name)
        if not items:
            return {}
        cut = [base.cut(texts[item["id"]], self.stops) for item in items]
        task, instances = self._lm_eval_task, _answered(self.task, items, cut)
        task._instances = instances
        task.apply_filters()
        grade: Callable[[Instance], SampleScore] = lambda one: _grade(task, one, self.primary)  # noqa: E731
        scores = (
            sandbox.map_in_threads(grade, instances) if self.runs_code else map(grade, instances)
        )
        return {item["id"]: score for item, score in zip(items, scores, strict=True)}


def _turns(turns: Turns, add_generation_prompt: bool = True) -> Turns:
    """In place of a chat template: the turns themselves, `encode` renders them."""
    return turns


def _answered(task: str, items: Sequence[base.Item], texts: Sequence[str]) -> list[Instance]:
    """lm-eval's record of a question and its answer."""
    from lm_eval.api.instance import Instance

    return [
        Instance("generate_until", dict(item), ("", {}), 0, (task, i, 1), resps=[text])
        for i, (item, text) in enumerate(zip(items, texts, strict=True))
    ]


def _grade(task: ConfigurableTask, instance: Instance, primary: str) -> SampleScore:
    """All metrics of one answer as "<metric>,<filter>"."""
    from dllm_bench.core.protocols import SampleScore

    metrics = {
        f"{metric},{key}": float(value)
        for key, answer in instance.filtered_resps.items()
        for metric, value in task.process_results(instance.doc, [answer]).items()
    }
    value, chosen = metrics[primary], primary.rpartition(",")[2]
    verdict = "wrong"
    if value:
        verdict = "correct"
    elif not instance.resps[0].strip():
        verdict = "empty"
    elif metrics.get(f"timeout,{chosen}"):
        verdict = "timeout"
    elif instance.filtered_resps[chosen] == NO_MATCH:
        verdict = "no_answer"
    return SampleScore(value, verdict, metrics)


@cache
def task_file(task: str) -> Mapping[str, Any]:
    """The parsed yaml of a task; functions it names stay names."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: str(node.value))
    return dict(yaml.load((TASKS / f"{task}.yaml").read_text(encoding="utf-8"), Loader))


def _metrics(task: str) -> list[str]:
    """Names "<metric>,<filter>" a task gives."""
    file = task_file(task)
    return [f"{m['metric']},{f['name']}" for m in file["metric_list"] for f in file["filter_list"]]


def load_task(task: str, options: Mapping[str, Any]) -> ConfigurableTask:
    """An lm-eval task of `tasks/`; `options` go to `data.dataset`."""
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DllmBenchError(
            f"Benchmark {task!r} is an lm-eval task and lm-eval cannot be imported ({error}); "
            "install it with pip install lm-eval."
        ) from error
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=dict(options))
    loaded: ConfigurableTask = manager.load(task)["tasks"][task]
    return loaded


@cache
def _lm_class() -> type[LM]:
    """The adapter class; made on demand, as lm-eval is imported on demand."""
    from lm_eval.api.model import LM

    class DllmBenchLM(LM):
        """An lm-eval model around a function from prompts to texts."""

        def __init__(self, generate: Generate, render: Callable[[Turns], str] | None) -> None:
            super().__init__()
            self._generate, self._render = generate, render

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            """Texts, each cut at its request's stop strings."""
            texts = self._generate([request.args[0] for request in requests])
            until = [request.args[1].get("until", ()) for request in requests]
            stops = [[one] if isinstance(one, str) else one for one in until]
            return [base.cut(text, stop) for text, stop in zip(texts, stops, strict=True)]

        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
            raise _no_likelihood(requests)

        def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
            raise _no_likelihood(requests)

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            """The prompt text of chat turns."""
            if self._render is None:
                raise DllmBenchError(
                    "lm-eval asked for a chat template and this model was given none; "
                    "pass render=... or turn the template off."
                )
            return self._render(chat_history)

    return DllmBenchLM


def _no_likelihood(requests: Sequence[object]) -> DllmBenchError:
    return DllmBenchError(
        f"A task asked for {len(requests)} likelihoods; a diffusion decoder gives none, "
        "so choose a task that generates (output_type generate_until)."
    )


def as_lm(generate: Generate, render: Callable[[Turns], str] | None = None) -> LM:
    """An lm-eval model around `generate`; `render` makes a prompt text of chat turns."""
    return _lm_class()(generate, render)
