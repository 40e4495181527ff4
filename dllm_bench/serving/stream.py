"""Reads one streamed answer of an OpenAI-compatible server: server-sent events to an `Answer`.

The time to first token is that of the first event with content (of an empty answer: of its end).
Token counts are the server's own; events are not counted, since one may hold several tokens. An
answer is complete if the server gave a finish reason; otherwise a `TryError` is raised and nothing
of the answer is kept. Nothing a server sends is trusted: sizes are limited, types are checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dllm_bench.core.secrets import strike_out, strike_out_of

PREFIX, DONE = b"data:", b"[DONE]"
CONTENT = ("content", "reasoning_content", "reasoning")  # of a chat delta; the first is the text
EVENT_BYTES = 2**22  # a longer event ends the try
ANSWER_BYTES = 2**26  # all events of an answer
MOST_TOKENS = 10**9  # a larger count is none
SHOWN = 40  # characters of a wrong value in a message


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
    problems: tuple[str, ...] = ()  # what was wrong with it and is left out or replaced


@dataclass
class AnswerStream:
    """An answer that is being received."""

    elapsed: Callable[[], float]  # seconds since the request was sent
    parts: list[str] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    finish: str | None = None
    ttft_s: float | None = None
    seconds: float = 0.0  # when the last bytes arrived
    received: int = 0  # bytes
    line: bytearray = field(default_factory=bytearray)  # the beginning of an unfinished one

    def feed(self, chunk: bytes) -> None:
        """Take bytes as they arrive; TryError if they are no answer, or too many.

        Lines end with a newline only, as the protocol says; a text may hold other separators.
        """
        self.seconds = self.elapsed()
        self.received += len(chunk)
        *whole, rest = chunk.split(b"\n")
        for end in whole:
            self._read_line(bytes(self.line + end))
            self.line.clear()
        self.line += rest
        if len(self.line) > EVENT_BYTES:
            raise TryError(f"it sent an event of more than {EVENT_BYTES >> 20} MiB")
        if self.received > ANSWER_BYTES:
            raise TryError(f"it sent an answer of more than {ANSWER_BYTES >> 20} MiB")

    def close(self) -> Answer:
        """Return the whole answer; TryError if it is incomplete."""
        self._read_line(bytes(self.line))
        if self.finish is None or self.ttft_s is None:
            raise TryError("the stream ended without a finish_reason")
        problems: list[str] = []
        prompt, new = (
            checked_count(f"{name}_tokens", self.usage, problems)
            for name in ("prompt", "completion")
        )
        text = "".join(self.parts)
        return Answer(text, self.seconds, self.ttft_s, self.finish, new, prompt, tuple(problems))

    def _read_line(self, line: bytes) -> None:
        content = line[len(PREFIX) :].strip()
        if not line.startswith(PREFIX) or content == DONE:
            return
        try:
            self._take(parse_event(content))
        except (AttributeError, KeyError, TypeError):
            raise TryError(f"an event has an unknown form: {as_text(content)!r}") from None

    def _take(self, event: Mapping[str, Any]) -> None:
        """Add one event; TypeError or AttributeError if a part of it has another type."""
        if event.get("error"):
            raise TryError(f"the server reported an error: {error_message(event)}")
        self.usage = checked(event.get("usage") or self.usage, dict)
        for choice in (event.get("choices") or [])[:1]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            self.parts.append(checked(delta.get(CONTENT[0]) or "", str))
            self.finish = checked(choice.get("finish_reason") or self.finish, str | None)
            if self.ttft_s is None and (self.finish or any(delta.get(name) for name in CONTENT)):
                self.ttft_s = self.seconds


def checked(value: Any, kind: Any) -> Any:
    """Return the value; TypeError if it is not of the kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind}")
    return value


def checked_count(name: str, usage: Mapping[str, Any], problems: list[str]) -> int | None:
    """Return a server's count of tokens; None, with an entry in `problems`, if it cannot be one."""
    count = usage.get(name)
    if count is None or (type(count) is int and 0 <= count <= MOST_TOKENS):
        return count
    shown = repr(strike_out_of(count))[:SHOWN]
    problems.append(f"{name} was {shown} instead of a count, and is left out")
    return None


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError for anything else, a too deeply nested one
    included."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_event(content: bytes) -> Mapping[str, Any]:
    """Return the JSON object of one event; TryError if it is none."""
    try:
        event = parse_json(content)
        if isinstance(event, dict):
            return event
    except ValueError:
        pass
    raise TryError(f"it sent no JSON object but {as_text(content)[:1024]!r}")


def as_text(content: bytes) -> str:
    """Return what a server sent, as a message may show it."""
    return strike_out(content.decode(errors="replace"))


def error_message(body: object) -> str:
    """Return a server's error message, in any of the forms in use."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return " ".join(str(inner).split())
