"""Our decoders as a model of lm-eval, and lm-eval's own command line with that model.

`DllmBenchLM` wraps a `PromptGenerator`. `execute` runs lm-eval with the model under the name
"dllm_bench". Only decoder=likelihood gives likelihoods. Importing this module imports lm-eval.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lm_eval.models  # noqa: F401 (else lm-eval would not register its own models)
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import model_registry, register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import setup_logging
from tqdm import tqdm

from dllm_bench.api.compose import compose
from dllm_bench.benchmarks.items import cut_at_stop
from dllm_bench.core.benchmark import Turns
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import require_known
from dllm_bench.runs.dependencies import REAL
from dllm_bench.store.spec import RunSpec

if TYPE_CHECKING:
    from dllm_bench.api.generation import PromptGenerator

MODEL = "dllm_bench"
"""Name of our models on lm-eval's command line."""
LM_EVAL_DEFAULT = "hf"
"""The model that lm-eval takes if none is named."""
GREEDY = {"do_sample": False, "temperature": 0.0, "num_beams": 1}
"""Generation settings that ask for nothing at these values."""
FOLLOWED = ("until", "max_gen_toks", "top_p", "top_k", "min_p", "seed")
"""Generation settings of a task, by lm-eval's names, that are followed, or that ask for nothing
where the task does not sample."""
ANY_DEVICE = "auto"
"""Stands for the device that `hardware` chooses; lm-eval itself would ask for cuda:0."""


class DllmBenchLM(LM):
    """An lm-eval model around what decodes prompts."""

    def __init__(self, generate: PromptGenerator) -> None:
        super().__init__()
        self._generate = generate
        self._turns: dict[str, Turns] = {}

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> DllmBenchLM:
        """Return the model for the settings of lm-eval's command line.

        lm-eval calls the folder of results by the entry "pretrained", so it is set to a name that
        differs between decoders and settings of one model.
        """
        device = (additional_config or {}).get("device", ANY_DEVICE)
        own = {} if device == ANY_DEVICE else {"+model.device": device}
        generate = generator([f"{name}={value}" for name, value in {**arg_dict, **own}.items()])
        arg_dict["pretrained"] = generate.name
        return cls(generate)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return texts, each cut at the stop strings of its request.

        DllmBenchError, before anything is decoded, for a generation setting that is not followed.
        """
        for request in requests:
            generation_settings(request.args[1])
        shown = tqdm(requests, disable=disable_tqdm, desc="Running generate_until requests")
        return [self._answer(*request.args) for request in shown]

    def _answer(self, prompt: str, settings: Mapping[str, Any]) -> str:
        budget, stops = generation_settings(settings)
        text = cut_at_stop(self._generate(self._turns.get(prompt, prompt), budget, stops), stops)
        self.cache_hook.add_partial("generate_until", (prompt, settings), text)
        return text

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy decoding gives it) of each continuation.

        DllmBenchError, before anything is decoded, for a decoder that generates texts.
        """
        shown = tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood requests")
        return [self._scored("loglikelihood", request) for request in shown]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, whole, after the token that begins a text."""
        shown = tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood_rolling requests")
        return [self._scored("loglikelihood_rolling", request)[0] for request in shown]

    def _scored(self, kind: str, request: Instance) -> tuple[float, bool]:
        context, continuation = ("", *request.args)[-2:]
        said = self._generate.likelihood(self._turns.get(context, context), continuation)
        answer = (said.nats, said.greedy)
        stored = answer[0] if kind == "loglikelihood_rolling" else answer
        self.cache_hook.add_partial(kind, request.args, stored)
        return answer

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the turns as a text; the model's own template renders them later.

        Where a task begins the answer itself (gen_prefix), that is a last turn of the assistant,
        which rendering continues whatever `add_generation_prompt` says.
        """
        text = json.dumps(chat_history, ensure_ascii=False)
        self._turns[text] = chat_history
        return text

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return a name for lm-eval's cache; the model always uses its own template."""
        return self._generate.name

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval adds to the "config" of its results: TPF, TPS, forwards and all
        metrics."""
        metrics = self._generate.metrics().items()
        return {MODEL: {name: value for name, value in metrics if value is not None}}

    @property
    def tokenizer_name(self) -> str:
        """Tells apart lm-eval's cached requests of different models."""
        return self._generate.name


def generator(overrides: Sequence[str]) -> PromptGenerator:
    """Return what decodes prompts with a model and decoder of this package."""
    from dllm_bench.api.generation import PromptGenerator  # imports torch

    spec = RunSpec.from_config(compose(overrides))
    if spec.model.is_served:
        raise DllmBenchError(
            f"Model {spec.model.name!r} is served; lm-eval can use servers directly, with "
            "--model local-completions or local-chat-completions."
        )
    decoder = REAL.decoder(spec)
    REAL.prepare(spec)
    return PromptGenerator(spec, decoder, REAL.model(spec))


def generation_settings(given: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return (new tokens, stop strings) of a task's `generation_kwargs`, under any of lm-eval's
    names.

    DllmBenchError for a setting that would change the text and is not followed here.
    """
    normal: dict[str, Any] = dict(normalize_gen_kwargs(dict(given)))
    refused = [
        f"{name}={value}"
        for name, value in normal.items()
        if name not in FOLLOWED and value is not None and value != GREEDY.get(name)
    ]
    if refused:
        raise DllmBenchError(
            f"The task asks for {', '.join(refused)}, and a decoder samples and searches by its "
            "own settings alone, so that would be ignored; override it (--gen_kwargs "
            "do_sample=False leaves sampling out) and set decoder.score.temperature where the "
            "decoder has it."
        )
    return int(normal["max_gen_toks"]), tuple(filter(None, normal["until"] or ()))


def check_model(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a model that lm-eval does not have, and its own default where no checkpoint is named.

    DllmBenchError, in place of the error that lm-eval ends with after it has read the tasks.
    """
    if name == LM_EVAL_DEFAULT and "pretrained" not in settings:
        raise DllmBenchError(
            f"lm-eval was given --model {name}, which is its default, without pretrained=…; for a "
            f"model and decoder of this package add --model {MODEL}, for a checkpoint that "
            "transformers runs --model_args pretrained=PATH."
        )
    require_known("model of lm-eval", name, model_registry)


def execute(parsed: Namespace) -> None:
    """Run lm-eval's own command line with our models as `--model dllm_bench --model_args ...`."""
    setup_logging()
    if MODEL not in model_registry:
        register_model(MODEL)(DllmBenchLM)
    if hasattr(parsed, "model") and not parsed.config:
        check_model(parsed.model or LM_EVAL_DEFAULT, parsed.model_args or {})
    if getattr(parsed, "model", None) == MODEL and not (parsed.device or parsed.config):
        parsed.device = ANY_DEVICE
    try:
        parsed.func(parsed)
    except ValueError as error:  # raised by lm-eval for a name in --tasks
        if not str(error).startswith("Tasks not found"):
            raise
        raise DllmBenchError(f"{error}; `dllm-bench lm-eval ls tasks` lists them.") from error
