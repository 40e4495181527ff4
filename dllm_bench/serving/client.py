"""HTTP client of an OpenAI-compatible server: send a request until it is answered.

Refused connections, cut or broken streams, time-outs, 429 and 5xx are tried again, after the wait
that the server requests (Retry-After) or else a growing one; other errors end the request at once
with a DllmBenchError. Times are those of the try that succeeded. The key goes into the request
header and nowhere else: it is removed from whatever a server returns before that is shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.serving.served_model import ServedModel, encode
from dllm_bench.serving.stream import Answer, AnswerStream, TryError, error_message

if TYPE_CHECKING:
    import httpx2

    from dllm_bench.core.benchmark import Turns
    from dllm_bench.core.denoiser import Denoiser

CONNECT_S = 10.0
LONGEST_WAIT_S = 300.0
RETRIED_STATUS = (408, 425, 429)  # and 5xx
SHOWN = 200  # characters of a server's message
STABLE_FIELDS = ("id", "root", "owned_by", "max_model_len")  # of a server's entry for a model


@dataclass(frozen=True)
class AnsweredRequest:
    """An answer, and what it took to get it."""

    answer: Answer
    tries: int
    began: float  # clock at the start of the first try
    ended: float  # clock at the end of the last


@dataclass
class Client:
    """A connection to a server, shared by several threads; takes the place of a loaded model."""

    model: ServedModel
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    http: httpx2.Client = field(init=False, repr=False)
    key: str | None = field(init=False, repr=False)  # secret, or None

    def __post_init__(self) -> None:
        import httpx2

        self.key = self.model.key
        seats = self.model.concurrency
        self.http = httpx2.Client(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx2.Timeout(self.model.timeout_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=seats, max_keepalive_connections=seats),
        )

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def complete(self, request: Request) -> AnsweredRequest:
        """Send `request` and return its answer; DllmBenchError if every try fails."""
        path, body = self.model.http_request(request)
        began, tries = self.clock(), self.model.retries + 1
        for turn in range(tries):
            try:
                answer = self._try(path, body)
                return AnsweredRequest(answer, turn + 1, began, self.clock())
            except TryError as failure:
                if turn + 1 == tries:
                    raise DllmBenchError(self._failed_message(request, tries, failure)) from None
                wait_s = failure.wait_s
                self.sleep(self.model.backoff_s * 2**turn if wait_s is None else wait_s)
        raise AssertionError("unreachable")

    def _try(self, path: str, body: dict[str, Any]) -> Answer:
        import httpx2

        started = self.clock()
        stream = AnswerStream(lambda: self.clock() - started, self.model.timeout_s)
        try:
            with self.http.stream("POST", self._address(path), json=body) as response:
                if response.status_code != 200:
                    raise self._status_error(response)
                return stream.read(response.iter_bytes())
        except httpx2.TimeoutException:
            raise TryError(f"nothing arrived for {stream.elapsed():.3g} s") from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TryError(f"{type(error).__name__}: {error}") from None

    def list_models(self) -> list[dict[str, Any]]:
        """The server's entries for its models; empty if it lists none.

        DllmBenchError if no server answers, or if it refuses access.
        """
        import httpx2

        try:
            response = self.http.get(self._address("models"))
        except httpx2.HTTPError as error:
            raise DllmBenchError(
                f"No server answers at {self.model.url} ({self._printable(str(error))}); start it, "
                "or name its address with model.url=http://HOST:PORT/v1."
            ) from None
        if response.status_code in (401, 403):
            raise self._status_error(response)
        try:
            entries = json.loads(self._without_key(response.text))["data"]
            return [entry for entry in entries if isinstance(entry, dict)]
        except (ValueError, KeyError, TypeError):
            return []

    def describe(self) -> dict[str, Any]:
        """The server's entry for the model: the fields that stay the same after a restart."""
        entries = (one for one in self.list_models() if one.get("id") == self.model.name)
        entry = next(entries, {})
        return {name: entry[name] for name in STABLE_FIELDS if entry.get(name) is not None}

    def _status_error(self, response: httpx2.Response) -> Exception:
        """The error for a status other than 200: TryError if another try may succeed."""
        status = response.status_code
        reason = self._reason(response)
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

    def _reason(self, response: httpx2.Response) -> str:
        """The server's message with an error status."""
        text = response.read().decode(errors="replace")
        try:
            text = error_message(json.loads(text))
        except ValueError:
            text = " ".join(text.split())
        return self._printable(text) or "no message"

    def _failed_message(self, request: Request, tries: int, failure: TryError) -> str:
        return (
            f"The server at {self.model.url} gave no answer to {request.id!r} in {tries} tries; "
            f"in the last one {self._printable(str(failure))}. Finished samples are kept: check "
            "the server (model.timeout_s, model.concurrency), and run the same command again."
        )

    def _printable(self, text: str) -> str:
        """A server's message as it may be shown: without the key, and cut."""
        return self._without_key(text)[:SHOWN]

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text

    def _address(self, path: str) -> str:
        return f"{self.model.url.rstrip('/')}/{path}"

    @cached_property
    def tokenizer(self) -> Any:
        """The local tokenizer, for servers that do not count tokens; None if none is named."""
        from dllm_bench.models.sources import checkpoint_folder
        from dllm_bench.models.text import read_tokenizer

        source = self.model.tokenizer
        return read_tokenizer(checkpoint_folder(source, None)) if source else None

    def tokens_in(self, text: str) -> int | None:
        """Number of tokens of a text by the local tokenizer; None without one."""
        if self.tokenizer is None:
            return None
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    # --- the interface of a loaded model ---------------------------------------------------------

    @property
    def denoiser(self) -> Denoiser:
        """Not available: a server returns no logits. Always raises DllmBenchError."""
        raise DllmBenchError(
            f"Model {self.model.name!r} is served at {self.model.url}: the server decodes and "
            "returns nothing but text; use dllm-bench run, or a model that is loaded here."
        )

    def encode(self, text: str | Turns, /) -> list[int]:
        """The bytes of the prompt's JSON, in place of token ids."""
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Inverse of `encode`."""
        return bytes(ids).decode(errors="replace")

    def attention_warning(self, attention: str, block: int) -> str | None:
        """None: the server's attention is unknown."""
        return None


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds to wait by the header Retry-After, a number or a date; None without one."""
    text = response.headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S)
