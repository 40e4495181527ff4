"""Benchmarks that are lm-eval tasks: prompts and grading come from lm-eval, generation from us.

The tasks are the yaml files of `tasks/`, loaded without lm-eval's own index. `LmEvalBenchmark` asks
and grades for our runner; `as_lm` wraps a `generate(prompt, budget, stops) -> text` as an lm-eval
model, and `command_line` is lm-eval's own, with that model under a name. lm-eval is imported when a
request is built or a text is graded; names, data and hashes need none of it. No likelihoods: the
models give none.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dllm_bench.benchmarks.items import (
    PLAIN,
    TEMPLATES,
    Item,
    LazyRequests,
    active_stops,
    answered_items,
    choose_items,
    content_hash,
    cut_at_stop,
    require_known,
)
from dllm_bench.benchmarks.sandbox import execution as sandbox
from dllm_bench.benchmarks.tasks import sources
from dllm_bench.core.choices import unknown_name
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import register

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.task import ConfigurableTask

    from dllm_bench.core.benchmark import Encode, SampleScore, Turns
    from dllm_bench.core.request import Request

TASKS = Path(__file__).parent / "tasks"
PROMPT_KEYS = (
    "doc_to_text", "doc_to_target", "target_delimiter", "fewshot_delimiter", "fewshot_config",
    "description", "gen_prefix",
)  # fmt: skip
"""What of a task file decides the prompts."""
NO_MATCH = "[invalid]"
"""What lm-eval's regex filter gives where it finds nothing."""
ENDINGS = ("timeout", "crashed")
"""Metrics of code tasks that tell how a wrong program ended."""
MODEL = "dllm_bench"
"""The name of our models on lm-eval's command line."""
MAX_NEW_TOKENS = 256  # lm-eval's own budget where a task names none
Generate = Callable[["str | Turns", int, tuple[str, ...]], str]
"""(prompt text or chat turns, new tokens, stop strings) -> text."""
Build = Callable[[Mapping[str, Any]], Generate]
"""Settings of `--model_args` -> what generates."""


@register("benchmark.lm_eval")
@dataclass(frozen=True, eq=False)
class LmEvalBenchmark:
    """One lm-eval task with its shots, prompt form and the metric that counts.

    template: "plain", "chat" (one user turn) or "chat_multiturn" (a turn per few-shot example);
    chat: whether the model takes turns, if not the form is "plain" whatever `template` says.
    escape_until: no `stop` string ends a text, the whole budget is used; `hard_stop` always cuts.
    primary: "<metric>,<filter>" of the task file. limit: None for all items of the split; repeats:
    how often each is asked (avg@k, pass@k).
    """

    name: str
    task: str
    max_new_tokens: int
    primary: str
    shots: int = 0
    template: str = PLAIN
    chat: bool = True
    stop: Sequence[str] = ()
    hard_stop: Sequence[str] = ()
    escape_until: bool = False
    split: str = "test"
    limit: int | None = None
    repeats: int = 1
    data_dir: str | None = None
    allow_code_execution: bool = False

    def check(self) -> None:
        """Raise for what would fail later: names, data files, consent. Loads neither."""
        require_known("lm-eval task", self.task, task_names())
        require_known(f"template of {self.name!r}", self.template, TEMPLATES)
        require_known(f"primary metric of {self.name!r}", self.primary, _metrics(self.task))
        sources.check(self._source, self.split, self.data_dir)
        if self.shots and self._shots_from:
            sources.check(self._source, self._shots_from, self.data_dir)
        if self.runs_code:
            sandbox.require_consent(self.allow_code_execution, self.name)

    @property
    def runs_code(self) -> bool:
        """Whether grading executes what the model wrote."""
        return bool(task_file(self.task).get("unsafe_code", False))

    @property
    def _source(self) -> str:
        return str(task_file(self.task)["dataset_kwargs"]["source"])

    @property
    def drawn(self) -> bool:
        """Whether code of the package makes the items, so that nothing is read for them."""
        return not sources.SOURCES[self._source].files

    @property
    def _shots_from(self) -> str | None:
        found: str | None = task_file(self.task)["dataset_kwargs"].get("shots_from")
        return found

    @cached_property
    def items(self) -> list[Item]:
        """The chosen items in the fixed order, each with an `id`."""
        return choose_items(
            sources.rows(self._source, self.split, self.data_dir), self.limit, self.repeats
        )

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a text."""
        return active_stops(self.stop, self.hard_stop, self.escape_until)

    @cached_property
    def _lm_eval_task(self) -> ConfigurableTask:
        """The task over exactly these items, in this order."""
        options = {
            "split": self.split,
            "limit": self.limit,
            "repeats": self.repeats,
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
        return self.template if self.chat else PLAIN

    def requests(self, encode: Encode) -> Sequence[Request]:
        """One request per item; lm-eval builds the prompts."""
        return LazyRequests(self.items, self._prompt, encode, self.max_new_tokens, self.stops)

    def _prompt(self, item: Item) -> str | Turns:
        chat, multiturn = TEMPLATES[self._form]
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
        return content_hash(
            {
                "items": self.items,
                "shots": sources.shots(self._source, self._shots_from, self.shots, self.data_dir),
                "form": [form, self._form, list(self.stops)],
            }
        )

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        """Grade texts with the task's filters and metrics; needs no model."""
        if self.runs_code:
            sandbox.require_consent(self.allow_code_execution, self.name)
        items = answered_items(texts, self.items, self.name)
        if not items:
            return {}
        cut = [cut_at_stop(texts[item["id"]], self.stops) for item in items]
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


def _answered(task: str, items: Sequence[Item], texts: Sequence[str]) -> list[Instance]:
    """lm-eval's record of a question and its answer."""
    from lm_eval.api.instance import Instance

    return [
        Instance("generate_until", dict(item), ("", {}), 0, (task, i, 1), resps=[text])
        for i, (item, text) in enumerate(zip(items, texts, strict=True))
    ]


def _grade(task: ConfigurableTask, instance: Instance, primary: str) -> SampleScore:
    """All metrics of one answer as "<metric>,<filter>"; how a program ended is in the verdict."""
    from dllm_bench.core.benchmark import SampleScore

    metrics = {
        f"{metric},{key}": float(value)
        for key, answer in instance.filtered_resps.items()
        for metric, value in task.process_results(instance.doc, [answer]).items()
    }
    if primary not in metrics:
        kind = f"number of task {task.config.task}:"
        raise DllmBenchError(unknown_name(kind, primary, list(metrics)))
    value, chosen = metrics[primary], primary.rpartition(",")[2]
    verdict = "wrong"
    if value:
        verdict = "correct"
    elif not instance.resps[0].strip():
        verdict = "empty"
    elif endings := [name for name in ENDINGS if metrics.get(f"{name},{chosen}")]:
        verdict = endings[0]
    elif instance.filtered_resps[chosen] == NO_MATCH:
        verdict = "no_answer"
    kept = {name: v for name, v in metrics.items() if name.split(",")[0] not in ENDINGS}
    return SampleScore(value, verdict, kept)


def task_names() -> list[str]:
    """The tasks there are."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


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
    """An lm-eval task of `tasks/`; `options` go to `sources.dataset`."""
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
        """An lm-eval model around a function from a prompt to a text."""

        def __init__(self, generate: Generate, name: str) -> None:
            super().__init__()
            self._generate, self._name = generate, name
            self._turns: dict[str, Turns] = {}

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            """Texts, each cut at its request's stop strings."""
            from tqdm import tqdm

            shown = tqdm(requests, disable=disable_tqdm, desc="Running generate_until requests")
            return [self._answer(*request.args) for request in shown]

        def _answer(self, prompt: str, settings: Mapping[str, Any]) -> str:
            until = settings.get("until") or ()
            stops = (until,) if isinstance(until, str) else tuple(until)
            budget = int(settings.get("max_gen_toks") or MAX_NEW_TOKENS)
            text = cut_at_stop(
                self._generate(self._turns.get(prompt, prompt), budget, stops), stops
            )
            self.cache_hook.add_partial("generate_until", (prompt, settings), text)
            return text

        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
            raise _no_likelihood(requests)

        def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
            raise _no_likelihood(requests)

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            """A text that stands for the turns; the model's own template renders them later."""
            if not add_generation_prompt:
                raise DllmBenchError(
                    "The task puts words into the model's mouth (gen_prefix), which chat turns "
                    "cannot carry here; choose a task without, or leave --apply_chat_template out."
                )
            text = json.dumps(chat_history, ensure_ascii=False)
            self._turns[text] = chat_history
            return text

        def chat_template(self, chat_template: bool | str = False) -> str:
            """The model's own template is used, whatever name is asked for."""
            return self._name

        @property
        def tokenizer_name(self) -> str:
            """Tells apart lm-eval's cached requests of different models."""
            return self._name

    return DllmBenchLM


def _no_likelihood(requests: Sequence[object]) -> DllmBenchError:
    return DllmBenchError(
        f"A task asked for {len(requests)} likelihoods; a diffusion decoder gives none, "
        "so choose a task that generates (output_type generate_until)."
    )


def as_lm(generate: Generate, name: str = MODEL) -> LM:
    """An lm-eval model around `generate`."""
    return _lm_class()(generate, name)


@cache
def _registered() -> Any:
    """The class lm-eval makes a model from, under its name; `build` is set before each use."""
    import lm_eval.models  # noqa: F401 (else lm-eval would not look for its own)
    from lm_eval.api.registry import register_model

    class Registered(_lm_class()):  # type: ignore[misc]
        """Our model as lm-eval makes it: from the settings of the command line."""

        build: Build

        @classmethod
        def create_from_arg_obj(
            cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
        ) -> LM:
            device = (additional_config or {}).get("device")
            settings = {**arg_dict, **({"+model.device": device} if device else {})}
            return as_lm(cls.build(settings), json.dumps(settings, sort_keys=True))

    return register_model(MODEL)(Registered)


def command_line(arguments: Sequence[str], build: Build) -> None:
    """lm-eval's own command line, with our models as `--model dllm_bench --model_args ...`."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    _registered().build = staticmethod(build)
    command = sys.argv
    sys.argv = ["dllm-bench lm-eval", *arguments]
    try:
        cli = HarnessCLI()
        cli.execute(cli.parse_args())
    except ValueError as error:  # lm-eval's, of a name in --tasks
        if not str(error).startswith("Tasks not found"):
            raise
        raise DllmBenchError(f"{error}; `dllm-bench lm-eval ls tasks` lists them.") from error
    finally:
        sys.argv = command
