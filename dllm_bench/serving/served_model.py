"""Settings of a model behind an OpenAI-compatible HTTP server, and the requests it is sent.

The server tokenises, so prompts have no token ids here: the bytes of a prompt's JSON replace them,
and can be decoded to the benchmark's text or chat turns. The key is read from the environment
variable that the settings name; it is never part of a stored or shown value. HTTP itself is in
`client`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import SplitResult, urlsplit

from dllm_bench.core.declared import CheckedFields, Range
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.models.text import library_errors_named
from dllm_bench.registry import RUNTIME, register

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Turns

ADDRESS = re.compile(r"https?://[\w.\-\[\]:]*[\w\]](/\S*)?")
MOST_IN_FLIGHT = 4096  # each is a thread
YEAR_S = 365 * 86400
RESERVED = tuple("model messages prompt max_tokens temperature seed stop stream n best_of".split())


@register("model.served")
@dataclass(frozen=True, eq=False)
class ServedModel(CheckedFields):
    """Which model to request, where, and how; checked when it is made."""

    name: str
    """The server's name for the model."""
    url: str = field(metadata=RUNTIME)
    """Address of the API, like http://127.0.0.1:8000/v1; without a secret, since it is stored."""
    engine: str | None = None
    """Engine, version and hardware in the user's words; tells runs on two engines apart."""
    chat: bool = True
    """Whether benchmarks make their prompts of chat turns; otherwise they are plain text."""
    concurrency: Annotated[int, Range(1, MOST_IN_FLIGHT)] = 1
    """Requests in flight."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of every request; None removes an entry."""
    tokenizer: str | None = field(default=None, metadata=RUNTIME)
    """Source of a tokenizer that counts tokens if the server does not."""
    key_env: str | None = field(default=None, metadata=RUNTIME)
    """Environment variable that holds the key; None for a server without keys."""
    timeout_s: Annotated[float, Range(0.001, YEAR_S)] = field(default=600.0, metadata=RUNTIME)
    """Longest time of one try."""
    retries: Annotated[int, Range(0, 100)] = field(default=4, metadata=RUNTIME)
    """Number of further tries after a failure that may be temporary."""
    backoff_s: Annotated[float, Range(0, YEAR_S)] = field(default=1.0, metadata=RUNTIME)
    """Wait before the first retry; doubled for each further one, to 300 s at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = urlsplit(self.url)
        # not shown, since a run stores the url
        if "@" in self.url or parts.query or parts.fragment:
            raise DllmBenchError(
                f"model.url of {self.name!r} holds a user name, a password, a query or a '#'; "
                "give the plain address, and the key in an environment variable named by "
                "model.key_env."
            )
        if not ADDRESS.fullmatch(self.url) or not valid_port(parts):
            raise DllmBenchError(
                f"Model {self.name!r} has model.url={self.url!r}, which is no address of a server; "
                "write it like http://127.0.0.1:8000/v1."
            )
        reserved = [name for name in self.body if name in RESERVED]
        if reserved:
            raise DllmBenchError(
                f"Model {self.name!r} has model.body.{reserved[0]}, which other settings decide "
                "(a request has one answer); set those instead (model.name, model.temperature, "
                "seed, benchmark.…)."
            )
        failed = f"Model {self.name!r} has a model.body that JSON cannot hold"
        with library_errors_named(failed, "give finite numbers"):
            json.dumps(dict(self.body), allow_nan=False)

    @property
    def key(self) -> str | None:
        """The key, from the environment; DllmBenchError if the variable is not set."""
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env)
        if not key:
            # what is no usual name may be the key itself
            named = self.key_env if self.key_env.isupper() else "that model.key_env names"
            raise DllmBenchError(
                f"Model {self.name!r} takes its key from the environment variable {named}, which "
                "is not set; export it, or set model.key_env=null for a server without keys."
            )
        if not (key.isascii() and key.isprintable() and key.strip() == key):
            raise DllmBenchError(
                f"The key in the environment variable {self.key_env} has characters that an HTTP "
                "header cannot hold (a space or line end around it, or other than ASCII); export "
                "it again."
            )
        return key

    def http_request(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Return (path below the url, JSON body): turns go to chat/completions, text to
        completions."""
        prompt = prompt_of(request)
        is_text = isinstance(prompt, str)
        begun = not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
        entries = {
            "model": self.name,
            "prompt" if is_text else "messages": prompt,
            "max_tokens": request.max_new_tokens,
            "temperature": self.temperature,
            "seed": request.seed,
            "stop": list(request.stop) or None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "add_generation_prompt": False if begun else None,  # as vLLM and SGLang name it
            "continue_final_message": begun or None,
            **self.body,
        }
        body = {name: value for name, value in entries.items() if value is not None}
        return ("completions" if is_text else "chat/completions"), body


def valid_port(parts: SplitResult) -> bool:
    """Return whether an address has a port that exists, or none."""
    try:
        return parts.port != 0
    except ValueError:
        return False


def encode(prompt: str | Turns) -> list[int]:
    """Return the bytes of the prompt's JSON, in place of token ids."""
    plain = prompt if isinstance(prompt, str) else [dict(turn) for turn in prompt]
    return list(json.dumps(plain, ensure_ascii=False).encode(errors="surrogatepass"))


def prompt_of(request: Request) -> str | list[dict[str, str]]:
    """Invert `encode`: return text or chat turns."""
    return json.loads(bytes(request.prompt_ids).decode(errors="surrogatepass"))


def warmup_prompt(prompt: str | Sequence[Mapping[str, str]], start: str) -> list[int]:
    """Return a prompt for warming up that begins with `start`, so the server can cache no prefix of
    it."""
    if isinstance(prompt, str):
        return encode(start + prompt)
    first, *rest = prompt
    return encode([{**first, "content": start + first["content"]}, *rest])
