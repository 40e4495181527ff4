"""HTTP client of an OpenAI-compatible server: send a request until it is answered.

Refused connections, cut or broken streams, time-outs, 429 and 5xx are tried again, after the wait
that the server requests (Retry-After) or else a growing one; other errors end the request at once
with a DllmBenchError. Times are those of the try that succeeded. The key is only used in the
request header: `core.output` removes it from everything that is stored or shown.

One thread reads all connections (asyncio), which allows a time limit for a whole try. The limits of
a blocking client apply to each read, so a server that keeps sending single bytes would never reach
them.

`AnswerStream` reads one streamed answer, server-sent events. The time to first token is that of the
first event with content (of an empty answer: of its end). Token counts are the server's own; events
are not counted, since one may hold several tokens. An answer is complete if the server gave a
finish reason other than abort or error; otherwise a `TryError` is raised and nothing of the answer
is kept. Nothing a server sends is trusted: sizes are limited, types are checked.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import STRUCK, keep_out, strike_out, strike_out_of
from dllm_bench.core.request import Request
from dllm_bench.models.text import library_errors_named
from dllm_bench.serving.served_model import ServedModel, encode

if TYPE_CHECKING:
    import httpx2

    from dllm_bench.core.benchmark import Turns
    from dllm_bench.core.denoiser import Denoiser

CONNECT_S = 10.0
LONGEST_WAIT_S = 300.0
RETRIED_STATUS = (408, 425, 429)  # and 5xx
SHOWN = 200  # characters of a server's message
ERROR_BYTES = 2**16  # read of a server's message
LIST_BYTES = 2**23  # limit of a server's list of models
STABLE_FIELDS = ("id", "root", "owned_by", "max_model_len")  # in a server's entry for a model
PREFIX, DONE = b"data:", b"[DONE]"
CONTENT = ("content", "reasoning_content", "reasoning")  # of a chat delta; the first is the text
EVENT_BYTES = 2**22  # a longer event ends the try
ANSWER_BYTES = 2**26  # all events of an answer
MOST_TOKENS = 10**9  # a larger count is none
SHOWN_VALUE = 40  # characters of a wrong value in a message

T = TypeVar("T")


class Client:
    """A connection to a server, shared by several threads; used in place of a loaded model."""

    def __init__(self, model: ServedModel) -> None:
        import httpx2

        self.model, self.clock, self.stopped = model, time.perf_counter, threading.Event()
        self.sleep: Callable[[float], object] = self.stopped.wait
        self.key, seats = model.key, model.concurrency
        keep_out(self.key)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        headers["Accept-Encoding"] = "identity"  # so that sizes are limited as they are received
        failed = "The environment's settings of proxies or certificates cannot be used"
        todo = "correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
        with library_errors_named(failed, todo):
            self.http = httpx2.AsyncClient(
                base_url=model.url.rstrip("/"),
                headers=headers,
                timeout=httpx2.Timeout(None, connect=CONNECT_S),  # `_within` limits a whole try
                limits=httpx2.Limits(max_connections=seats, max_keepalive_connections=seats),
            )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the requests in flight, whose callers get an exception, and send no more."""

        def cancel() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()

        self.stopped.set()
        self.loop.call_soon_threadsafe(cancel)

    def close(self) -> None:
        """End the requests in flight, and close the connections."""
        self.stop()
        asyncio.run_coroutine_threadsafe(self.http.aclose(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _within(self, exchange: Callable[..., Coroutine[Any, Any, T]], *given: Any) -> T:
        """Return the result of one exchange with the server; TimeoutError after
        `model.timeout_s`."""

        async def limited() -> T:
            if self.stopped.is_set():
                raise asyncio.CancelledError
            async with asyncio.timeout(self.model.timeout_s):
                return await exchange(*given)

        return asyncio.run_coroutine_threadsafe(limited(), self.loop).result()

    def complete(self, request: Request) -> Answer:
        """Send `request` and return its answer; DllmBenchError if every try fails."""
        path, body = self.model.http_request(request)
        began, tries = self.clock(), 0
        while True:
            tries += 1
            try:
                answer = self._try(path, body)
                return replace(answer, tries=tries, began=began, ended=self.clock())
            except TryError as failure:
                if tries > self.model.retries:
                    raise DllmBenchError(
                        f"The server at {self.model.url} gave no answer to {request.id!r} in "
                        f"{tries} tries; in the last one {self._printable(str(failure))}. Finished "
                        "samples are kept: check the server (model.timeout_s, model.concurrency), "
                        "and run the same command again."
                    ) from None
                backoff_s = self.model.backoff_s
                growing_s = min(backoff_s * 2 ** (tries - 1), max(backoff_s, LONGEST_WAIT_S))
                self.sleep(growing_s if failure.wait_s is None else failure.wait_s)

    def _try(self, path: str, body: dict[str, Any]) -> Answer:
        import httpx2

        started = self.clock()
        stream = AnswerStream(lambda: self.clock() - started)
        try:
            return self._cleaned(self._within(self._stream, path, body, stream))
        except TimeoutError:
            raise TryError(
                f"it took longer than model.timeout_s={self.model.timeout_s:g}, after "
                f"{stream.received} bytes"
            ) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TryError(f"{type(error).__name__}: {error}") from None

    async def _stream(self, path: str, body: dict[str, Any], stream: AnswerStream) -> Answer:
        sent = json.dumps(body).encode()  # ASCII: a prompt may hold what UTF-8 cannot
        headers = {"Content-Type": "application/json"}
        async with self.http.stream("POST", path, content=sent, headers=headers) as response:
            if response.status_code != 200:
                raise self._status_error(response, await read_start(response, ERROR_BYTES))
            async for chunk in response.aiter_raw():
                stream.feed(chunk)
        return stream.close()

    def _cleaned(self, answer: Answer) -> Answer:
        """Return the answer without the key, and with halves of surrogate pairs joined or
        replaced."""
        whole = answer.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text, problems = strike_out(whole), [*map(strike_out, answer.problems)]
        if whole.count("\ufffd") > answer.text.count("\ufffd"):
            problems.append("lone surrogates in the text are replaced by U+FFFD")
        if text != whole:
            problems.append(f"the key in the text is replaced by {STRUCK}")
        finish = self._printable(answer.finish)
        return replace(answer, text=text, finish=finish, problems=tuple(problems))

    def list_models(self) -> list[dict[str, Any]]:
        """Return the server's entries for its models; empty if it lists none.

        DllmBenchError if no server answers, if it refuses access, or if it sends too much.
        """
        import httpx2

        try:
            response, text = self._within(self._get_models)
        except (httpx2.HTTPError, httpx2.StreamError, TimeoutError) as error:
            found = self._printable(str(error)) or f"none in {self.model.timeout_s:g} s"
            raise DllmBenchError(
                f"No server answers at {self.model.url} ({found}); start it, or name its address "
                "with model.url=http://HOST:PORT/v1."
            ) from None
        if response.status_code in (401, 403):
            raise self._status_error(response, text)
        if len(text) > LIST_BYTES:
            raise DllmBenchError(
                f"The server at {self.model.url} sent more than {LIST_BYTES >> 20} MiB as its list "
                "of models; name the address of an OpenAI-compatible server with model.url."
            )
        try:
            return [entry for entry in parse_json(text)["data"] if isinstance(entry, dict)]
        except (ValueError, KeyError, TypeError):
            return []

    async def _get_models(self) -> tuple[httpx2.Response, bytes]:
        """Return the response and the content read from it."""
        async with self.http.stream("GET", "models") as response:
            return response, await read_start(response, LIST_BYTES)

    def model_names(self) -> list[str]:
        """Return the names of the server's models, as they may be shown."""
        return [self._printable(str(entry.get("id"))) for entry in self.list_models()]

    def describe(self) -> dict[str, Any]:
        """Return the server's entry for the model: the fields that stay the same after a
        restart."""
        entries = (one for one in self.list_models() if one.get("id") == self.model.name)
        entry = next(entries, {})
        return {
            name: value if is_count(value) else self._printable(str(value))
            for name in STABLE_FIELDS
            if (value := entry.get(name)) is not None
        }

    def _status_error(self, response: httpx2.Response, content: bytes) -> Exception:
        """Return the error for a status other than 200: TryError if another try may succeed."""
        status, text = response.status_code, content[:ERROR_BYTES].decode(errors="replace")
        try:
            text = error_message(parse_json(text))
        except ValueError:
            text = " ".join(text.split())
        reason = self._printable(text) or "no message"
        if status in RETRIED_STATUS or status >= 500:
            return TryError(f"it answered {status} ({reason})", retry_after(response))
        model, start = self.model, f"The server at {self.model.url} answered {status} ({reason})"
        if status in (401, 403):
            cause = f"it rejects the key in ${model.key_env}" if self.key else "it requires a key"
            return DllmBenchError(f"{start}: {cause}; name the variable with model.key_env=NAME.")
        return DllmBenchError(
            f"{start} to a request for model {model.name!r}; correct model.name, model.url (it "
            "ends in /v1), model.chat or what the message names."
        )

    def _printable(self, text: str) -> str:
        """Return a server's message in a form safe to show: without key and control characters, and
        cut."""
        return "".join(one if one.isprintable() else "\ufffd" for one in strike_out(text)[:SHOWN])

    @cached_property
    def tokenizer(self) -> Any:
        """The local tokenizer, for servers that do not count tokens; None if none is named."""
        from dllm_bench.models.sources import checkpoint_folder
        from dllm_bench.models.text import read_tokenizer

        source = self.model.tokenizer
        return read_tokenizer(checkpoint_folder(source, None)) if source else None

    def tokens_in(self, text: str) -> int | None:
        """Return the number of tokens of a text by the local tokenizer; None without one."""
        if self.tokenizer is None:
            return None
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    # --- the interface of a loaded model ---------------------------------------------------------

    @property
    def denoiser(self) -> Denoiser:
        """Always raises DllmBenchError, because a server returns no logits."""
        raise DllmBenchError(
            f"Model {self.model.name!r} is served at {self.model.url}: the server decodes and "
            "returns nothing but text; use dllm-bench run, or a model that is loaded here."
        )

    def encode(self, text: str | Turns, /) -> list[int]:
        """Return the bytes of the prompt's JSON, in place of token ids."""
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Invert `encode`."""
        return bytes(ids).decode(errors="replace")

    def attention_warning(self, attention: str, block: int) -> str | None:
        """Return no warning: the server's attention is unknown."""
        return None


async def read_start(response: httpx2.Response, limit: int) -> bytes:
    """Return the content of a response, or somewhat more than the first `limit` bytes of a longer
    one."""
    read = bytearray()
    async for chunk in response.aiter_raw():
        read += chunk
        if len(read) > limit:
            break
    return bytes(read)


def retry_after(response: httpx2.Response) -> float | None:
    """Return seconds to wait by the header Retry-After, a number or a date; None without one."""
    text = response.headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_WAIT_S)


# --- one streamed answer --------------------------------------------------------------------------


class TryError(Exception):
    """A try failed and another may succeed. wait_s: the wait that the server requests, or None."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Answer:
    """A complete answer; `seconds` and `ttft_s` are counted from sending the request."""

    text: str
    seconds: float  # to the end of the answer
    ttft_s: float  # to the first content
    finish: str  # the server's finish reason
    tokens: int | None = None  # new tokens by the server's count; None if it gave none
    prompt_tokens: int | None = None  # the same for the prompt
    problems: tuple[str, ...] = ()  # what was wrong with it and is left out or replaced
    tries: int = 1
    began: float = 0.0  # clock at the start of the first try
    ended: float = 0.0  # clock at the end of the last


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
        if self.finish in ("abort", "error"):  # as vLLM, SGLang and LMDeploy end half an answer
            raise TryError(f"the server broke off its answer with finish_reason {self.finish!r}")
        problems: list[str] = []
        prompt, new = (
            checked_count(f"{name}_tokens", self.usage, problems)
            for name in ("prompt", "completion")
        )
        text = "".join(self.parts)
        if text and new == 0:
            new = None
            problems.append("completion_tokens was 0 for a text, and is left out")
        return Answer(text, self.seconds, self.ttft_s, self.finish, new, prompt, tuple(problems))

    def _read_line(self, line: bytes) -> None:
        content = line[len(PREFIX) :].strip()
        if not line.startswith(PREFIX) or content == DONE:
            return
        try:
            self._take(parse_json(content))
        except ValueError:
            raise TryError(f"it sent no JSON object but {as_text(content)[:1024]!r}") from None
        except (AttributeError, KeyError, TypeError):
            raise TryError(f"an event has an unknown form: {as_text(content)!r}") from None

    def _take(self, event: Any) -> None:
        """Add one event; TypeError or AttributeError if it or a part of it has another type."""
        if event.get("error"):
            raise TryError(f"the server reported an error: {error_message(event)}")
        self.usage = checked(event.get("usage") or self.usage, dict)
        choices = event.get("choices") or []
        for choice in [one for one in choices if one.get("index") in (None, 0)][:1]:
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
    if count is None or is_count(count):
        return count
    shown = repr(strike_out_of(count))[:SHOWN_VALUE]
    problems.append(f"{name} was {shown} instead of a count, and is left out")
    return None


def is_count(value: Any) -> bool:
    """Return whether a value that a server sent can be a number of tokens."""
    return type(value) is int and 0 <= value <= MOST_TOKENS


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError for anything else, a too deeply nested one
    included."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def as_text(content: bytes) -> str:
    """Return what a server sent, as a message may show it."""
    return strike_out(content.decode(errors="replace"))


def error_message(body: object) -> str:
    """Return a server's error message, in any of the forms in use."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return " ".join(str(inner).split())
