"""What is stored, as text: tokens by the model's tokenizer, prompts and answers by the benchmark,
numbers, and lines for the terminal and the pages.

Samples store their prompt. One that does not has the benchmark's of today, if its ids have the hash
that the sample was decoded with, so that what is shown is what the model was given. Without a
tokenizer (an object's is kept where its run was made) tokens are shown as numbers. Tokenizers and
prompts that runs share are read once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks.items import in_passes
from dllm_bench.core.benchmark import GradedAnswer
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.metrics.accuracy import MeanScore, percent_of
from dllm_bench.models.sources import checkpoint_folder
from dllm_bench.models.text import read_token_texts, read_tokenizer
from dllm_bench.paths import user_folder
from dllm_bench.store import inputs
from dllm_bench.store.cache import Compose, on_this_machine
from dllm_bench.store.files import is_file, write_atomic
from dllm_bench.store.groups import BenchmarkGroup, ModelGroup
from dllm_bench.store.record import RunRecord, SampleRecord, prompt_sha256, whole_texts
from dllm_bench.store.spec import SHOWN, RunSpec, digest

SNIPPET = 90  # characters of a text that is shown in one line
DecodeTokens = Callable[[Sequence[int]], str]  # token ids to text


@dataclass
class TextSource:
    """Token texts and prompts of runs, cached.

    compose: overrides to the run configuration. It says where tokenizers and data lie: the paths
    that a record names are not opened.
    decoders: by digest of the model's configuration.
    requests: by digest of model, benchmark and limit.
    """

    compose: Compose
    decoders: dict[str, DecodeTokens] = field(default_factory=dict)
    requests: dict[str, list[Request]] = field(default_factory=dict)

    def decode(self, spec: RunSpec) -> DecodeTokens:
        """Return a function from token ids to text, by the tokenizer of the run's model."""
        key = digest([spec.model, spec.inputs.get("tokenizer")])
        if key not in self.decoders:
            self.decoders[key] = ids_as_text
            with suppress(DllmBenchError):
                self.decoders[key] = self._decoder(spec)
        return self.decoders[key]

    def _decoder(self, spec: RunSpec) -> DecodeTokens:
        """Return a function from token ids to text, by the tokenizer of a checkpoint or an object.

        An object's tokenizer is the one that was kept.
        """
        if not spec.model.is_object:
            return token_decoder(on_this_machine("model", spec.model, self.compose))
        folder = kept_tokenizer(spec.inputs.get("tokenizer"))
        return (folder and read_token_texts(folder)) or ids_as_text

    def prompts(self, spec: RunSpec, samples: Mapping[str, SampleRecord]) -> dict[str, str]:
        """Return sample id -> prompt, if it is the one that the sample was decoded with."""
        stored = {key: readable(one.prompt) for key, one in samples.items() if one.prompt}
        if samples and len(stored) == len(samples):
            return stored
        made = {
            request.id: readable(request.prompt)
            for request in self._requests(spec)
            if request.id in samples and prompt_sha256(request) == samples[request.id].prompt_sha256
        }
        return {**made, **stored}

    def answers(
        self, spec: RunSpec, samples: Mapping[str, SampleRecord]
    ) -> Mapping[str, GradedAnswer]:
        """Return sample id -> what was graded; empty if the items are not those of the run."""
        try:
            benchmark = inputs.benchmark_of(self._here(spec).benchmark)
            if benchmark.dataset_hash() != spec.inputs.get("dataset"):
                return {}
            return benchmark.answers(whole_texts(samples.values()))
        except DllmBenchError:
            return {}

    def _requests(self, spec: RunSpec) -> list[Request]:
        """Return the requests the run would have today; none if they cannot be made on this
        machine."""
        key = digest([spec.model, spec.benchmark, spec.limit])
        if key not in self.requests:
            self.requests[key] = []
            with suppress(DllmBenchError):
                self.requests[key] = requests_of(self._here(spec))
        return self.requests[key]

    def _here(self, spec: RunSpec) -> RunSpec:
        """Return the run with its model and benchmark as this machine's configuration has them."""
        model = on_this_machine("model", spec.model, self.compose)
        benchmark = on_this_machine("benchmark", spec.benchmark, self.compose)
        return replace(spec, model=ModelGroup(model), benchmark=BenchmarkGroup(benchmark))


def token_decoder(model: Mapping[str, Any]) -> DecodeTokens:
    """Return a function from token ids to text by a model's own tokenizer; special tokens stay."""
    spec = inputs.model_spec(model)
    folder = checkpoint_folder(spec.path, spec.revision)
    if decode := read_token_texts(folder):
        return decode
    tokenizer = read_tokenizer(folder)
    return lambda ids: str(tokenizer.decode(list(ids))) if tokenizer else str(list(ids))


def requests_of(spec: RunSpec) -> list[Request]:
    """Return the requests of a run, made by its benchmark."""
    # torch takes seconds to import
    from dllm_bench.models.load import load_text_codec
    from dllm_bench.serving import served_model

    model = spec.model
    codec: Any = served_model if model.is_served else load_text_codec(inputs.model_spec(model))
    every = inputs.benchmark_of(spec.benchmark).requests(codec.encode)
    return in_passes(every, spec.limit, spec.repeats)


def ids_as_text(ids: Sequence[int]) -> str:
    """Write token ids as numbers, for a model without a tokenizer."""
    return str(list(ids))


def readable(prompt: str) -> str:
    """Return a prompt as text; the turns of a chat, stored as JSON, each below its role."""
    try:
        return "\n\n".join(f"{turn['role']}:\n{turn['content']}" for turn in json.loads(prompt))
    except (ValueError, TypeError, KeyError):
        return prompt


SHA256 = re.compile(r"[0-9a-f]{64}")


def kept_tokenizer(sha256: object) -> Path | None:
    """Return the folder of the tokenizer with this hash; None if it is not a hash."""
    is_hash = isinstance(sha256, str) and SHA256.fullmatch(sha256)
    return user_folder() / "tokenizers" / str(sha256) if is_hash else None


def keep_tokenizer(tokenizer: Any, sha256: object) -> None:
    """Write the tokenizer of a model object into this user's cache directory, as tokenizer.json, so
    that other processes can show the texts of its runs; one without that form is skipped.
    """
    folder, backend = kept_tokenizer(sha256), getattr(tokenizer, "backend_tokenizer", None)
    if folder is None or backend is None or is_file(folder / "tokenizer.json"):
        return
    with suppress(DllmBenchError):  # then ids are shown
        write_atomic(folder / "tokenizer.json", backend.to_str())


# --- numbers and lines ---------------------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` decimals, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """Return a number with four significant digits, or all digits before the point if they are
    more; empty if there is none."""
    return "" if value is None else f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"


def percent(score: MeanScore | None) -> str:
    """Return a score in percent with its interval, or a dash."""
    return "–" if score is None else percent_of(score.mean, score.low, score.high)


def commit(environment: Mapping[str, Any]) -> str:
    """Return the commit a run was made with, and whether the code had local changes."""
    if not environment.get("commit"):
        return "unknown (not run from a checkout)"
    changed = " with local changes" if environment.get("dirty") else ""
    return f"{environment['commit'][:SHOWN]}{changed}"


def looked_up(records: Sequence[RunRecord]) -> str:
    """Return when, and by which commit, records that a command found complete were made."""
    dates = sorted(f"{datetime.fromtimestamp(one.sealed_at, UTC):%Y-%m-%d}" for one in records)
    first, *others = dict.fromkeys(commit(record.environment) for record in records)
    made = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    by = f"by {1 + len(others)} commits" if others else f"by commit {first}"
    return f"looked up: made on {made} {by}"


def printable(text: str) -> str:
    """Return the text with control, format and other invisible characters written as in Python
    source."""
    return "".join(repr(character)[1:-1] for character in text)


def printable_lines(text: str) -> str:
    """Return the text as `printable` does; line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def snippet(text: str) -> str:
    """Return the beginning of a text as one line."""
    line = " ".join(text.split())
    return printable(line[:SNIPPET]) + ("…" if len(line) > SNIPPET else "")


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
