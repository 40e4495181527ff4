"""Reads one streamed answer of an OpenAI-compatible server: server-sent events to an `Answer`.

The time to first token is that of the first event with content (of an empty answer: of its end).
Token counts are the server's own; events are not counted, since one may hold several tokens. An
answer is complete if the server gave a finish reason; otherwise a `TryError` is raised and nothing
of the answer is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX, DONE = b"data:", b"[DONE]"
CONTENT = ("content", "reasoning_content", "reasoning")  # of a chat delta; the first is the text


class TryError(Exception):
    """A try failed and another may succeed. wait_s: the wait that the server requests, or None."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Answer:
    """A complete answer; times are seconds from sending the request."""

    text: str
    seconds: float  # to the end of the answer
    ttft_s: float  # to the first content
    finish: str  # the server's finish reason
    tokens: int | None = None  # new tokens by the server's count; None if it gave none
    prompt_tokens: int | None = None  # the same for the prompt


@dataclass
class AnswerStream:
    """An answer that is being received."""

    elapsed: Callable[[], float]  # seconds since the request was sent
    timeout_s: float
    parts: list[str] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    finish: str | None = None
    ttft_s: float | None = None
    seconds: float = 0.0

    def read(self, chunks: Iterable[bytes]) -> Answer:
        """Read all chunks into the whole answer; TryError if it is incomplete or too late."""
        for line in split_lines(chunks):
            self.seconds = self.elapsed()
            if self.seconds > self.timeout_s:
                raise TryError(f"it took longer than model.timeout_s={self.timeout_s:g}")
            content = line[len(PREFIX) :].strip()
            if line.startswith(PREFIX) and content != DONE:
                try:
                    self._take(parse_event(content))
                except (AttributeError, KeyError, TypeError):
                    raise TryError(f"an event has an unknown form: {content!r}") from None
        if self.finish is None or self.ttft_s is None:
            raise TryError("the stream ended without a finish_reason")
        prompt, new = (self.usage.get(f"{name}_tokens") for name in ("prompt", "completion"))
        return Answer("".join(self.parts), self.seconds, self.ttft_s, self.finish, new, prompt)

    def _take(self, event: Mapping[str, Any]) -> None:
        """Add one event."""
        if event.get("error"):
            raise TryError(f"the server reported an error: {error_message(event)}")
        self.usage = event.get("usage") or self.usage
        for choice in (event.get("choices") or [])[:1]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            self.parts.append(delta.get(CONTENT[0]) or "")
            self.finish = choice.get("finish_reason") or self.finish
            if self.ttft_s is None and (self.finish or any(delta.get(name) for name in CONTENT)):
                self.ttft_s = self.seconds


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines ended by a newline only, as the protocol does; a text may hold other separators."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    yield rest


def parse_event(content: bytes) -> Mapping[str, Any]:
    """The JSON object of one event; TryError if it is none."""
    try:
        event = json.loads(content)
        if isinstance(event, dict):
            return event
    except ValueError:
        pass
    raise TryError(f"it sent no JSON object but {content.decode(errors='replace')!r}")


def error_message(body: object) -> str:
    """A server's error message, in any of the forms in use."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return " ".join(str(inner).split())
