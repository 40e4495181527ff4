"""`Engine`: a model behind an OpenAI-compatible HTTP server, as settings with their own checks.

The server tokenises, so a prompt has no token ids here: bytes of its JSON stand for them, and give
back the text or the chat turns that a benchmark made. The key is read from the environment variable
that the settings name and is part of no value that is stored or shown. Speaking HTTP is `client`'s.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.registry import register

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Turns

ADDRESS = re.compile(r"https?://[\w.\-\[\]:]*[\w\]](/\S*)?")
OURS = ("model", "messages", "prompt", "max_tokens", "temperature", "seed", "stop", "stream")


@register("model.served")
@dataclass(frozen=True, eq=False)
class ServedModel:
    """Which model to ask for, where, and how. `engine`: engine and hardware in the user's words.

    concurrency: requests in flight; body: further entries of every request (None takes one out);
    tokenizer: counts tokens where the server does not; timeout_s: of one try; retries: after a try
    that failed and may succeed; backoff_s: wait before the first of them, doubled each time.
    """

    name: str
    url: str
    engine: str | None = None
    chat: bool = True
    concurrency: int = 1
    temperature: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    key_env: str | None = None
    timeout_s: float = 600.0
    retries: int = 4
    backoff_s: float = 1.0

    def __post_init__(self) -> None:
        self._check_url()
        for name, least in (("concurrency", 1), ("retries", 0), ("timeout_s", 0.001)):
            if getattr(self, name) < least:
                raise DllmBenchError(
                    f"Model {self.name!r} has model.{name}={getattr(self, name)}; give {least} or "
                    "more."
                )
        taken = [name for name in self.body if name in OURS]
        if taken:
            raise DllmBenchError(
                f"Model {self.name!r} has model.body.{taken[0]}, which follows from the other "
                "settings; set those (model.name, model.temperature, seed, benchmark.…)."
            )

    def _check_url(self) -> None:
        """The url is stored with a run, so it holds no secret; it is not shown where it does."""
        parts = urlsplit(self.url)
        if parts.username or parts.password or parts.query:
            raise DllmBenchError(
                f"model.url of {self.name!r} holds a user name, a password or a query; give the "
                "plain address, and the key in an environment variable named by model.key_env."
            )
        if not ADDRESS.fullmatch(self.url):
            raise DllmBenchError(
                f"Model {self.name!r} has model.url={self.url!r}, which is no address of a server; "
                "write it like http://127.0.0.1:8000/v1."
            )

    @property
    def key(self) -> str | None:
        """The key, from the environment."""
        if self.key_env is None:
            return None
        found = os.environ.get(self.key_env)
        if not found:
            raise DllmBenchError(
                f"Model {self.name!r} takes its key from the environment variable {self.key_env}, "
                "which is not set; export it, or set model.key_env=null for a server without keys."
            )
        return found

    def question(self, request: Request) -> tuple[str, dict[str, Any]]:
        """(path below the url, body) that asks for `request`: turns are chatted, text completed."""
        prompt = prompt_of(request)
        plain = isinstance(prompt, str)
        asked = {
            "model": self.name,
            "prompt" if plain else "messages": prompt,
            "max_tokens": request.max_new_tokens,
            "temperature": self.temperature,
            "seed": request.seed,
            "stop": list(request.stop) or None,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }
        body = {name: value for name, value in asked.items() if value is not None}
        return ("completions" if plain else "chat/completions"), body


def encode(prompt: str | Turns) -> list[int]:
    """Bytes of the prompt's JSON, in place of token ids."""
    plain = prompt if isinstance(prompt, str) else [dict(turn) for turn in prompt]
    return list(json.dumps(plain, ensure_ascii=False).encode(errors="surrogatepass"))


def prompt_of(request: Request) -> str | list[dict[str, str]]:
    """Inverse of `encode`: text, or chat turns."""
    text = bytes(request.prompt_ids).decode(errors="surrogatepass")
    prompt: str | list[dict[str, str]] = json.loads(text)
    return prompt


def begin_otherwise(prompt: str | Sequence[Mapping[str, str]], start: str) -> list[int]:
    """A prompt for warming up: as long, and without a prefix the server could keep for later."""
    if isinstance(prompt, str):
        return encode(start + prompt)
    first, *rest = prompt
    return encode([{**first, "content": start + first["content"]}, *rest])
