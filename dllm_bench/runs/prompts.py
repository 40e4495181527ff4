"""Decode prompts from outside a benchmark: the requests of `dllm_bench.generate` and of lm-eval.

Requests are prepared, decoded and cut as in the runner, so all three give the same text for a
prompt. Nothing is stored here.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dllm_bench.benchmarks.items import likelihoods_of, option_of, request_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Likelihood, Request, filling
from dllm_bench.metrics.definitions import measure_all
from dllm_bench.metrics.sample_stats import SampleStats
from dllm_bench.runs import runner
from dllm_bench.runs.dependencies import REAL, Dependencies, Loaded
from dllm_bench.store.inputs import wait_for
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import RunSpec

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Turns
    from dllm_bench.core.decoder import Decoder
    from dllm_bench.core.denoiser import Denoiser


@dataclass
class PromptGenerator:
    """(prompt, new tokens, stop strings) -> text, one request at a time.

    A repeated prompt is another sample with another seed, as repetitions of a task intend.
    """

    spec: RunSpec
    decoder: Decoder
    loaded: Loaded
    seen: Counter[str] = field(default_factory=Counter)  # prompt hash -> how often it came
    stats: list[SampleStats] = field(default_factory=list)  # one per text so far

    @property
    def name(self) -> str:
        """Model, decoder and hash of the settings."""
        return f"{self.spec.model.name}-{self.spec.label}-{self.spec.short}"

    def request(
        self, prompt: str | Turns, max_new_tokens: int | None, stop: tuple[str, ...]
    ) -> Request:
        """Return the request for a prompt, ready for the decoder; without `max_new_tokens` the
        prompt's own masks are filled.
        """
        ids = tuple(self.loaded.encode(prompt))
        request = Request(self._name(ids), ids, max_new_tokens or 1, stop, str(prompt))
        if max_new_tokens is None:
            request = filling(request, self.loaded.denoiser.special)
        return self._ready(request)

    def _name(self, ids: tuple[int, ...]) -> str:
        """Return the id of a request, from its tokens and how often they came."""
        key = hashlib.sha256(repr(ids).encode()).hexdigest()
        name = f"{key}#{self.seen[key]}"
        self.seen[key] += 1
        return name

    def _ready(self, request: Request) -> Request:
        return runner.ready(self.spec, self.decoder, self.loaded, request)

    def __call__(self, prompt: str | Turns, max_new_tokens: int, stop: tuple[str, ...]) -> str:
        return self._decoded(self.request(prompt, max_new_tokens, stop)).text

    def likelihood(self, context: str | Turns, continuation: str) -> Likelihood:
        """Return the log-likelihood of a continuation; of a whole text after an empty context.

        DllmBenchError if the decoder generates texts.
        """
        if not self.decoder.summary().scores_options:
            raise DllmBenchError(
                f"A likelihood was asked for, and {self.spec.label} generates text; choose "
                "decoder=likelihood (LLaDA's Monte-Carlo bound; decoder.draws, decoder.guidance) "
                "or decoder=likelihood_exact (decoder.block)."
            )
        option = option_of(context, continuation, self.loaded.encode)
        made = request_of(self._name((*option.prompt_ids, -1, *option.ids)), [option])
        return likelihoods_of(self._decoded(self._ready(made)).text)[0]

    def _decoded(self, request: Request) -> SampleRecord:
        """Decode a request and keep its counts."""
        sample = timed_sample(self.decoder, request, self.loaded, self.loaded.denoiser)
        self.stats.append(sample.stats())
        return sample

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of all texts so far, by name."""
        return measure_all(self.stats)


def timed_sample(
    decoder: Decoder, request: Request, loaded: Loaded, denoiser: Denoiser
) -> SampleRecord:
    """Decode a prepared request under the clock, with the model's denoiser or one that wraps it."""
    started_at = time.time()
    decoded = runner.timed(
        lambda: decoder.generate(denoiser, request),
        request,
        loaded,
        wait=lambda: wait_for(loaded.denoiser.device),
    )
    return runner.sample_record(request, decoded, loaded, started_at)


def generator(config: Mapping[str, Any], deps: Dependencies = REAL) -> PromptGenerator:
    """Return the generator of a composed run configuration."""
    spec = RunSpec.from_config(config)
    if spec.model.is_served:
        raise DllmBenchError(
            f"Model {spec.model.name!r} is served; lm-eval can use servers directly, with "
            "--model local-completions or local-chat-completions."
        )
    decoder = deps.decoder(spec)
    deps.prepare(spec)
    return PromptGenerator(spec, decoder, deps.model(spec))
