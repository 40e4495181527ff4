"""Texts behind stored ids: tokens by the model's tokenizer, prompts by the benchmark.

Neither is stored with a run. A prompt is given only where its ids have the hash the sample was
decoded with, so that what is shown is what the model read; without tokenizer or data there is none,
and tokens are numbers. What runs share is read once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dllm_bench.cli.views import Decode, decoder_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import RunSpec, digest


@dataclass
class Texts:
    """Tokenizers and prompts of the runs looked at so far."""

    decoders: dict[str, Decode] = field(default_factory=dict)
    requests: dict[str, list[Request]] = field(default_factory=dict)

    def decode(self, spec: RunSpec) -> Decode:
        """Token ids to text."""
        key = digest(spec.model)
        if key not in self.decoders:
            try:
                self.decoders[key] = decoder_of(spec.model)
            except DllmBenchError:
                self.decoders[key] = numbers
        return self.decoders[key]

    def prompts(self, spec: RunSpec, samples: Mapping[str, SampleRecord]) -> dict[str, str]:
        """Sample -> prompt, where it is known."""
        return {
            request.id: readable(request.prompt)
            for request in self._requests(spec)
            if request.id in samples and prompt_sha256(request) == samples[request.id].prompt_sha256
        }

    def _requests(self, spec: RunSpec) -> list[Request]:
        """The requests of a run as they are today, none where they cannot be made here."""
        key = digest([spec.model, spec.benchmark, spec.limit])
        if key not in self.requests:
            try:
                self.requests[key] = requests_of(spec)
            except DllmBenchError:
                self.requests[key] = []
        return self.requests[key]


def requests_of(spec: RunSpec) -> list[Request]:
    """The requests of a run."""
    from dllm_bench.models.load import load_text_codec
    from dllm_bench.serving import served_model
    from dllm_bench.store.inputs import benchmark_of, is_served, model_spec

    served = is_served(spec.model)
    encode = served_model.encode if served else load_text_codec(model_spec(spec.model)).encode
    every = benchmark_of(spec.benchmark).requests(encode)
    repeats = int(spec.benchmark.get("repeats", 1))
    return list(islice(every, None if spec.limit is None else spec.limit * repeats))


def prompt_sha256(request: Request) -> str:
    """The hash a sample keeps of its prompt."""
    return hashlib.sha256(repr(request.prompt_ids).encode()).hexdigest()


def numbers(ids: Sequence[int]) -> str:
    """Token ids as they are, for want of a tokenizer."""
    return str(list(ids))


def readable(prompt: str) -> str:
    """A prompt as text; chat turns, kept as JSON, each under its role."""
    try:
        turns = json.loads(prompt)
        return "\n\n".join(f"{turn['role']}:\n{turn['content']}" for turn in turns)
    except (ValueError, TypeError, KeyError):
        return prompt
