"""One streamed answer of an OpenAI-compatible server: server-sent events to an `Answer`.

Time to first token is that of the first event with content (or, of an empty answer, of its end).
Tokens are the server's own count; events are never counted, since one may hold several tokens.
An answer counts when the server said why it ended; anything else is a `TryError`, and nothing of it
is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX, DONE = b"data:", b"[DONE]"
CONTENT = ("content", "reasoning_content", "reasoning")  # of a chat delta; the first is the text


class TryError(Exception):
    """A try that gave no answer and may give one next time; wait_s: what the server asks for."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Answer:
    """What came, and when: seconds from sending the request. tokens: by the server, None if unsaid;
    finish: the server's reason to end.
    """

    text: str
    seconds: float
    ttft_s: float
    finish: str
    tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass
class Stream:
    """An answer while it comes. elapsed: seconds since the request was sent."""

    elapsed: Callable[[], float]
    timeout_s: float
    parts: list[str] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    finish: str | None = None
    ttft_s: float | None = None
    seconds: float = 0.0

    def read(self, chunks: Iterable[bytes]) -> Answer:
        """The whole answer."""
        for line in lines(chunks):
            self.seconds = self.elapsed()
            if self.seconds > self.timeout_s:
                raise TryError(f"it took longer than model.timeout_s={self.timeout_s:g}")
            content = line[len(PREFIX) :].strip()
            if line.startswith(PREFIX) and content != DONE:
                try:
                    self._take(event(content))
                except (AttributeError, KeyError, TypeError):
                    raise TryError(f"an event has an unknown form: {content!r}") from None
        if self.finish is None or self.ttft_s is None:
            raise TryError("the stream ended without a finish_reason")
        prompt, new = (self.usage.get(f"{name}_tokens") for name in ("prompt", "completion"))
        return Answer("".join(self.parts), self.seconds, self.ttft_s, self.finish, new, prompt)

    def _take(self, said: Mapping[str, Any]) -> None:
        if said.get("error"):
            raise TryError(f"the server reported an error: {message(said)}")
        self.usage = said.get("usage") or self.usage
        for choice in (said.get("choices") or [])[:1]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            self.parts.append(delta.get(CONTENT[0]) or "")
            self.finish = choice.get("finish_reason") or self.finish
            if self.ttft_s is None and (self.finish or any(delta.get(name) for name in CONTENT)):
                self.ttft_s = self.seconds


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines as the protocol ends them; a text may hold other line separators."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    yield rest


def event(content: bytes) -> Mapping[str, Any]:
    """The JSON object of one event."""
    try:
        found = json.loads(content)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise TryError(f"it sent no JSON object but {content.decode(errors='replace')!r}")


def message(said: object) -> str:
    """What a server says of an error, in any of the forms in use."""
    inner = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return " ".join(str(inner).split())
