"""HTTP to an OpenAI-compatible server: one request asked until it is answered, errors as sentences.

Refused connections, cut or broken streams, time-outs, 429 and 5xx are tried again (Retry-After
wins over the growing wait); what another try cannot mend ends at once. Times are those of the try
that succeeded. The key is sent and nowhere else: whatever a server says is searched for it.
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
from dllm_bench.serving.stream import Answer, Stream, TryError, message

if TYPE_CHECKING:
    import httpx2

    from dllm_bench.core.benchmark import Turns
    from dllm_bench.core.denoiser import Denoiser

CONNECT_S = 10.0
LONGEST_WAIT_S = 300.0
PASSING = (408, 425, 429)  # and 5xx
SHOWN = 200  # characters of what a server said
TOLD = ("id", "root", "owned_by", "max_model_len")  # of a server's entry for a model


@dataclass(frozen=True)
class AnsweredRequest:
    """An answer with how it was got: tries, and the clock at the first one's start and the end."""

    answer: Answer
    tries: int
    began: float
    ended: float


@dataclass
class Client:
    """A connection that several threads share, in the place of a loaded model."""

    model: ServedModel
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    http: httpx2.Client = field(init=False, repr=False)
    key: str | None = field(init=False, repr=False)

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
        """Let the connections go."""
        self.http.close()

    def ask(self, request: Request) -> AnsweredRequest:
        """The answer to `request`; a sentence when no try gave one."""
        path, body = self.model.question(request)
        began, tries = self.clock(), self.model.retries + 1
        for turn in range(tries):
            try:
                answer = self._try(path, body)
                return AnsweredRequest(answer, turn + 1, began, self.clock())
            except TryError as failure:
                if turn + 1 == tries:
                    raise DllmBenchError(self._given_up(request, tries, failure)) from None
                wait_s = failure.wait_s
                self.sleep(self.model.backoff_s * 2**turn if wait_s is None else wait_s)
        raise AssertionError("unreachable")

    def _try(self, path: str, body: dict[str, Any]) -> Answer:
        import httpx2

        started = self.clock()
        stream = Stream(lambda: self.clock() - started, self.model.timeout_s)
        try:
            with self.http.stream("POST", self._address(path), json=body) as response:
                if response.status_code != 200:
                    raise self._refusal(response)
                return stream.read(response.iter_bytes())
        except httpx2.TimeoutException:
            raise TryError(f"nothing came for {stream.elapsed():.3g} s") from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TryError(f"{type(error).__name__}: {error}") from None

    def listed(self) -> list[dict[str, Any]]:
        """The models the server lists, none where it says nothing; a sentence if there is no server
        or it lets nobody in.
        """
        import httpx2

        try:
            response = self.http.get(self._address("models"))
        except httpx2.HTTPError as error:
            raise DllmBenchError(
                f"No server answers at {self.model.url} ({self._shown(str(error))}); start it, or "
                "name its address with model.url=http://HOST:PORT/v1."
            ) from None
        if response.status_code in (401, 403):
            raise self._refusal(response)
        try:
            entries = json.loads(self._hidden(response.text))["data"]
            return [entry for entry in entries if isinstance(entry, dict)]
        except (ValueError, KeyError, TypeError):
            return []

    def describe(self) -> dict[str, Any]:
        """What the server says of the model, as far as it does not change from start to start."""
        found = next((one for one in self.listed() if one.get("id") == self.model.name), {})
        return {name: found[name] for name in TOLD if found.get(name) is not None}

    def _refusal(self, response: httpx2.Response) -> Exception:
        """What to make of a status that is not 200."""
        status = response.status_code
        said = self._said(response)
        if status in PASSING or status >= 500:
            return TryError(f"it answered {status} ({said})", retry_after(response))
        engine, start = self.model, f"The server at {self.model.url} answered {status} ({said})"
        if status in (401, 403):
            mend = (
                f"the key in ${engine.key_env} does not open it" if self.key else "it wants a key"
            )
            return DllmBenchError(f"{start}: {mend}; name the variable with model.key_env=NAME.")
        return DllmBenchError(
            f"{start} when asked for model {engine.name!r}; mend model.name, model.url (it ends in "
            "/v1), model.chat or what the message names."
        )

    def _said(self, response: httpx2.Response) -> str:
        text = response.read().decode(errors="replace")
        try:
            text = message(json.loads(text))
        except ValueError:
            text = " ".join(text.split())
        return self._shown(text) or "without a word"

    def _given_up(self, request: Request, tries: int, failure: TryError) -> str:
        return (
            f"The server at {self.model.url} gave no answer to {request.id!r} in {tries} tries; "
            f"the last time {self._shown(str(failure))}. Finished samples are kept: look at the "
            "server (model.timeout_s, model.concurrency), and give the same command again."
        )

    def _shown(self, text: str) -> str:
        """What may be shown of a server's words: without the key, and not too many."""
        return self._hidden(text)[:SHOWN]

    def _hidden(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text

    def _address(self, path: str) -> str:
        return f"{self.model.url.rstrip('/')}/{path}"

    @cached_property
    def tokenizer(self) -> Any:
        """The local tokenizer that counts where the server does not; None where none is named."""
        from dllm_bench.models.sources import checkpoint_folder
        from dllm_bench.models.text import read_tokenizer

        source = self.model.tokenizer
        return read_tokenizer(checkpoint_folder(source, None)) if source else None

    def tokens_in(self, text: str) -> int | None:
        """Tokens of a text by the local tokenizer."""
        if self.tokenizer is None:
            return None
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    # --- what a loaded model has -----------------------------------------------------------------

    @property
    def denoiser(self) -> Denoiser:
        """There are no logits to be had."""
        raise DllmBenchError(
            f"Model {self.model.name!r} is served at {self.model.url}: its server decodes, and "
            "gives texts alone; use dllm-bench run, or a model that is loaded here."
        )

    def encode(self, text: str | Turns, /) -> list[int]:
        """The prompt's JSON, byte by byte."""
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Inverse of `encode`."""
        return bytes(ids).decode(errors="replace")

    def attention_warning(self, attention: str, block: int) -> str | None:
        """Nothing is known of the server's attention."""
        return None


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds the server asks to wait: a number or a date; None where it names neither."""
    text = response.headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S)
