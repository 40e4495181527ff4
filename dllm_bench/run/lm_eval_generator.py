"""The generator behind lm-eval's command line: our model and decoder as one function.

The configuration is composed as for `dllm-bench run`, and a request is decoded and its text cut as
in the runner, so both give the same text for a prompt. Nothing is stored or timed here; lm-eval
keeps its own results.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.run import runner
from dllm_bench.run.dependencies import REAL, Dependencies, Loaded
from dllm_bench.store.inputs import is_served
from dllm_bench.store.spec import RunSpec

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Turns
    from dllm_bench.core.decoder import Decoder


@dataclass
class LmEvalGenerator:
    """(prompt, new tokens, stop strings) -> text, one request at a time.

    A prompt that comes again is another sample with another seed, as repeats of a task intend.
    """

    spec: RunSpec
    decoder: Decoder
    loaded: Loaded
    seen: Counter[str] = field(default_factory=Counter)  # prompt hash -> how often it came

    def __call__(self, prompt: str | Turns, max_new_tokens: int, stop: tuple[str, ...]) -> str:
        ids = tuple(self.loaded.encode(prompt))
        key = hashlib.sha256(repr(ids).encode()).hexdigest()
        name = f"{key}#{self.seen[key]}"
        self.seen[key] += 1
        request = Request(name, ids, max_new_tokens, stop, str(prompt))
        request = runner.ready(self.spec, self.decoder, self.loaded, request)
        generation = self.decoder.generate(self.loaded.denoiser, request)
        return runner.cut(generation, request, self.loaded).text


def generator(config: Mapping[str, Any], deps: Dependencies = REAL) -> LmEvalGenerator:
    """The generator of a composed run configuration."""
    spec = RunSpec.from_config(config)
    if is_served(spec.model):
        raise DllmBenchError(
            f"Model {spec.model['name']!r} is served; lm-eval can use servers directly, with "
            "--model local-completions or local-chat-completions."
        )
    decoder = deps.decoder(spec)
    deps.prepare(spec)
    return LmEvalGenerator(spec, decoder, deps.model(spec))
