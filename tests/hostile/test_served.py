"""Hostile servers: each ends in one sentence or a marked sample, and the run can be resumed.

Every case is a run of one request, answered in a hostile way; the others are answered well.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch.local import run
from dllm_bench.runs.loggers import WandbLogger
from dllm_bench.serving.client import Client, retry_after
from dllm_bench.serving.served_model import ServedModel
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_record, read_samples
from tests.served.server import DONE, ReceivedRequest, Reply, Server, event, piece, said
from tests.tiers import covering

KEY = "sk-secret-0123456789"
GOOD = said("#### 1", new=3, chat=False)
MIB = b"x" * 2**20
SHORT_S = 0.3  # time limit of a try, where a case needs it
TOO_LONG = f"longer than model.timeout_s={SHORT_S}"
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


@dataclass(frozen=True)
class Case:
    """What a server sends, and words of the sentence or of the sample's mark."""

    reply: Callable[[], Reply]
    words: str
    kept: bool = False  # whether the sample is kept, with a mark
    timeout_s: float = 20.0


def refused(words: str, *pieces: bytes, **settings: Any) -> Case:
    return Case(lambda: Reply(list(pieces), **settings), words)


def marked(words: str, *pieces: bytes) -> Case:
    return Case(lambda: Reply([*pieces, piece("", False, "stop"), DONE]), words, kept=True)


def counted(count: str) -> bytes:
    """Return the event that counts tokens, with any JSON as the count."""
    return b'data: {"choices": [], "usage": {"completion_tokens": %s}}\n\n' % count.encode()


def choice(said: str) -> bytes:
    return b'data: {"choices": [%s]}\n\n' % said.encode()


def raw(words: str, *pieces: bytes) -> Case:
    return Case(lambda: Reply(list(pieces), raw=True), words, timeout_s=SHORT_S)


def slowly(pieces: Iterable[bytes], pause_s: float = 0.02) -> Iterator[bytes]:
    for one in pieces:
        time.sleep(pause_s)
        yield one


def dripping(byte: bytes, *start: bytes, **settings: Any) -> Case:
    """Return a server that sends a byte now and then, for a minute."""
    pieces = [*start, *[byte] * 3000]
    return Case(lambda: Reply(slowly(pieces), **settings), TOO_LONG, timeout_s=SHORT_S)


def endless(words: str, *start: bytes, chunk: bytes = MIB, **settings: Any) -> Case:
    """Yield a server that sends 100 chunks, of which only the first few may be read."""

    def pieces() -> Iterator[bytes]:
        yield from start
        for sent in range(100):
            assert sent < 90, "the client reads without a limit"
            yield chunk

    return Case(lambda: Reply(pieces(), **settings), words)


ESCAPED = "".join(f"\\u{ord(one):04x}" for one in KEY)
SECRET_EVENT = piece(f"Bearer {KEY[:9]}", False) + piece(f"{KEY[9:]} #### 1", False)
CASES = {
    # the key
    "key in the text, over two events": marked("the key in the text", SECRET_EVENT),
    "key escaped": marked("key", choice(f'{{"text": "{ESCAPED}"}}')),
    "key as a finish reason": Case(lambda: said("1", chat=False, finish=KEY), "", kept=True),
    "key in an error event": refused("reported an error: ***", event({"error": KEY})),
    "key in an unknown event": refused("unknown form", event({"choices": KEY})),
    "key instead of JSON": refused("no JSON object", b"data: " + KEY.encode() + b"\n\n"),
    "key in a refusal": refused("answered 404 (***)", KEY.encode(), status=404),
    "key with terminal codes": refused("\ufffd[2J***", b"\x1b[2J" + KEY.encode(), status=500),
    "key as a count": marked("was '***'", piece("1", False), counted(f'"{KEY}"')),
    "key in a count": marked("***", piece("1", False), counted(f'[{{"{KEY}": "{ESCAPED}"}}]')),
    "key in an error's parts": refused("***", event({"error": {"code": [{KEY: KEY}]}})),
    "key in a header": refused("answered 503", status=503, headers={"X-Key": KEY}),
    "key as the wait": refused("answered 429", status=429, headers={"Retry-After": KEY}),
    # counts
    **{
        f"{count} tokens": marked("completion_tokens was", piece("1", False), counted(count))
        for count in ('"lots" 0 -7 NaN Infinity 2.5 true [1] {} 1' + "0" * 99).split()
    },
    "usage as text": refused("unknown form", b'data: {"usage": "many"}\n\n'),
    # texts
    "lone surrogate": marked("lone surrogates", choice(r'{"text": "a\ud800b"}')),
    "surrogate at the end": marked("lone surrogates", choice(r'{"text": "a\udfff"}')),
    "content as a number": refused("unknown form", choice('{"text": 5}')),
    "delta as a text": refused("unknown form", choice('{"delta": "a"}')),
    "choices as a number": refused("unknown form", b'data: {"choices": 5}\n\n'),
    "finish reason as a number": refused("unknown form", choice('{"finish_reason": 5}')),
    "no UTF-8": refused("no JSON object", b'data: {"choices": "\xff\xfe"}\n\n'),
    "null bytes": refused("no JSON object", b"data: \0\0\0\n\n"),
    "deep nesting": refused("no JSON object", b"data: " + b"[" * 200_000 + b"\n\n"),
    "deep error": refused("answered 500", b'{"error":' * 20_000, status=500),
    "an integer without end": refused("no JSON object", b"data: " + b"9" * 5000 + b"\n\n"),
    "a list as an event": refused("unknown form", b"data: []\n\n"),
    # sizes
    "an event of 100 MiB": endless("event of more than 4 MiB", b"data: "),
    "an answer of 100 MiB": endless("answer of more than 64 MiB", chunk=b": " + MIB + b"\n"),
    "an error of 100 MiB": endless("answered 500 (xxx", status=500),
    # time
    "silence": Case(lambda: Reply(slowly([DONE], 9 * SHORT_S)), "after 0 bytes", timeout_s=SHORT_S),
    "a byte now and then": dripping(b"x"),
    "comments now and then": dripping(b": still here\n\n"),
    "a status line without end": dripping(b"x", b"HTTP/1.1 200 ", raw=True),
    "a header without end": dripping(b"x", HEAD, b"X-Pad: ", raw=True),
    "an error now and then": dripping(b"x", status=500),
    # HTTP
    "no HTTP": raw("RemoteProtocolError", b"SSH-2.0-OpenSSH_9.6\r\n"),
    "nothing at all": raw("RemoteProtocolError", b""),
    "status 999": refused("answered 999", status=999),
    "a wrong chunk": raw("RemoteProtocolError", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "a length that lies": raw("RemoteProtocolError", HEAD + b"Content-Length: 99\r\n\r\ndata:"),
    "two lengths": raw("RemoteProtocolError", HEAD + b"Content-Length: 1, 2\r\n\r\n"),
    "a header of 1 MiB": raw("RemoteProtocolError", HEAD, b"X-Pad: " + MIB + b"\r\n\r\n"),
    "a redirection": refused("answered 302", status=302, headers={"Location": "http://[::1]:1/"}),
    "compressed": refused("finish_reason", MIB[:99], headers={"Content-Encoding": "gzip"}),
    "Retry-After: nan": refused("answered 429", status=429, headers={"Retry-After": "nan"}),
    "the end before the reason": refused("without a finish_reason", piece("half", False), DONE),
}  # fmt: skip


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    settings = ["model.name=tiny", "model.chat=false", "model.retries=0", "model.key_env=TEST_KEY"]
    return RunSpec.from_config(compose(["benchmark=minigsm", "limit=1", "model=served", *settings]))


@pytest.fixture(autouse=True)
def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)


def stored_text(folder: Path) -> str:
    """Return everything that is stored below a folder."""
    stored = [path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()]
    assert len(stored) > 3
    return "\n".join(stored)


def attempt(spec: RunSpec, url: str, timeout_s: float, folder: Path) -> SampleRecord:
    there = replace(spec, model={**spec.model, "url": url, "timeout_s": timeout_s})
    run(there, store=Store(folder))
    (sample,) = read_samples(Store(folder).path(there)).values()
    return sample


@pytest.mark.parametrize("name", covering(9, CASES))
def test_a_hostile_answer_ends_in_a_sentence_or_a_mark(name, spec, tmp_path) -> None:
    case = CASES[name]

    def answer(received: ReceivedRequest) -> Reply:
        return case.reply() if len(server.received) == 2 else GOOD

    started = time.monotonic()
    with Server(answer) as server:
        if case.kept:
            sample = attempt(spec, server.url, case.timeout_s, tmp_path)
            assert sample.served and case.words in " ".join(sample.served.problems)
            assert sample.counts["emitted"] is None
        else:
            with pytest.raises(DllmBenchError, match="in 1 tries|answered [34]") as failure:
                attempt(spec, server.url, case.timeout_s, tmp_path)
            assert case.words in str(failure.value) and KEY not in str(failure.value)
            assert str(failure.value).isprintable() and len(str(failure.value)) < 600
            assert attempt(spec, server.url, 20.0, tmp_path).text == "#### 1"
    assert time.monotonic() - started < 30
    assert KEY not in stored_text(tmp_path)


LISTS = {
    "80 MiB": endless("more than 8 MiB"),
    "a byte now and then": replace(dripping(b" "), words="No server answers"),
    "deep": refused("", b'{"data":' * 20_000),
    "a number": refused("", b"5"),
    "entries of other types": refused("", b'{"data": [5, null, "tiny", []]}'),
    "no UTF-8": refused("", b"\xff\xfe\xfd"),
    "no HTTP": replace(raw("", b"hello\r\n"), words="No server answers"),
    "the key": refused("", json.dumps({"data": [{"id": "tiny", "owned_by": KEY}]}).encode()),
    "surrogates": refused("", rb'{"data": [{"id": "tiny", "owned_by": "\ud800\u001b[2J"}]}'),
    "a length beyond 64 bits": refused(
        "", b'{"data":[{"id":"tiny","max_model_len":1%s}]}' % (b"0" * 30)
    ),
    "a list as an owner": refused("", b'{"data": [{"id": "tiny", "owned_by": [[1]]}]}'),
}


@pytest.mark.parametrize("name", covering(4, LISTS))
def test_a_hostile_list_of_models_is_read_within_limits(name, spec, tmp_path) -> None:
    case = LISTS[name]
    with Server(lambda received: GOOD) as server:
        server.models = case.reply()
        if case.words:
            with pytest.raises(DllmBenchError, match=case.words):
                attempt(spec, server.url, case.timeout_s, tmp_path)
            server.models = Reply([b'{"data": []}'])
        assert attempt(spec, server.url, 20.0, tmp_path).text == "#### 1"
    assert KEY not in stored_text(tmp_path)


WAITS = {"-5": 0.0, "inf": 300.0, "1e999": 300.0, "nan": None, "-nan": None, "soon": None}
WAITS |= dict.fromkeys(("Mon, 99 Xxx 99999 99:99:99 GMT", "Fri, 31 Dec 9999 23:59:59 -2400"))


@pytest.mark.parametrize("header", WAITS)
def test_a_wait_is_a_number_within_limits(header: str) -> None:
    import httpx2

    assert retry_after(httpx2.Response(429, headers={"Retry-After": header})) == WAITS[header]


@pytest.mark.parametrize("key", ["ends\n", "two\nlines", "kluč", "\x1b[2J", " "])
def test_a_key_that_no_header_can_hold_is_refused_unseen(key, monkeypatch) -> None:
    monkeypatch.setenv("TEST_KEY", key)
    with pytest.raises(DllmBenchError, match="TEST_KEY") as refusal:
        Client(ServedModel("tiny", "http://host/v1", key_env="TEST_KEY"))
    assert key not in str(refusal.value) or not key.strip()


@pytest.mark.parametrize("key", ["sk-" + "0123456789" * 9, 'sk-"quoted\\key"', "'sk-single'-key"])
def test_no_part_of_a_key_is_stored_or_sent_to_a_logger(key, spec, tmp_path, monkeypatch) -> None:
    """Echoed as a count, a text and a reason: in no file, whole or cut, as it is or as JSON."""
    monkeypatch.setenv("TEST_KEY", key)
    said_key = [piece(key, False), counted(json.dumps(key)), piece("", False, key), DONE]
    wandb = MagicMock(run=None)  # takes what would be sent to Weights & Biases
    wandb.init.return_value.step = 0
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Server(lambda received: Reply(said_key)) as server:
        there = replace(spec, model={**spec.model, "url": server.url})
        run(there, store=Store(tmp_path), logger=WandbLogger())
    shown = str(wandb.mock_calls)
    assert all(call in shown for call in ("init(", ".log(", "Table(", ".finish("))
    for part in (key[:12], json.dumps(key)[1:13], repr(key)[1:13]):
        assert part not in stored_text(tmp_path) and part not in shown
    assert read_record(Store(tmp_path).path(there))


def test_settings_that_hold_the_key_are_not_stored(spec, tmp_path) -> None:
    with Server(lambda received: GOOD) as server:
        attempt(spec, server.url, 20.0, tmp_path / "first")
        there = {**spec.model, "url": server.url, "body": {"user": KEY}}
        with pytest.raises(DllmBenchError, match="hold a key that is in use"):
            run(replace(spec, model=there), store=Store(tmp_path / "second"))
    assert KEY not in stored_text(tmp_path)


def test_a_short_key_is_a_word_and_stays_in_texts(spec, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TEST_KEY", "EMPTY")
    with Server(lambda received: said("EMPTY", new=1, chat=False)) as server:
        assert attempt(spec, server.url, 20.0, tmp_path).text == "EMPTY"
