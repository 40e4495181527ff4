"""Asking a server: what is sent, what is counted, and what becomes of every fault on the way."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from dllm_bench.cli import doctor_torch
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.serving.client import AnswerStream, Client
from dllm_bench.serving.served_model import ServedModel, encode, prompt_of, warmup_prompt
from dllm_bench.store.groups import RunConfig
from tests.served.server import DONE, Reply, Server, event, piece, said, scripted, usage

MODEL = {"_target_": "dllm_bench.serving.served_model.ServedModel", "name": "served"}
KEY = "sk-secret-0123456789"
TURNS = [{"role": "user", "content": "How many?\u2028Ä"}]
CUT = Reply([piece("half of a "), piece("text")], whole=False)


def request(prompt: Any = "Question", stop: tuple[str, ...] = ()) -> Request:
    return Request("item-1", tuple(encode(prompt)), 32, stop, seed=7)


def client(url: str, **settings: Any) -> tuple[Client, list[float]]:
    """Return a client that notes its waits instead of waiting."""
    waits: list[float] = []
    engine = ServedModel("tiny", url, **{"backoff_s": 0.5, "retries": 2, **settings})
    asker = Client(engine)
    asker.sleep = waits.append
    return asker, waits


def refused(url: str, **settings: Any) -> str:
    """Return the sentence of a request that gets no answer."""
    with pytest.raises(DllmBenchError) as found:
        client(url, **settings)[0].complete(request())
    return str(found.value)


@pytest.mark.parametrize("prompt", ["", "a\nb\u2028", "\ud800", TURNS])
def test_a_prompt_survives_its_bytes(prompt: Any) -> None:
    assert prompt_of(request(prompt)) == prompt


@pytest.mark.parametrize(("prompt", "path"), [("Q", "completions"), (TURNS, "chat/completions")])
def test_text_is_completed_and_turns_are_chatted(prompt: Any, path: str) -> None:
    with Server(scripted(said("x", new=1, chat=prompt is TURNS))) as server:
        asker, _ = client(server.url, temperature=0.5, body={"top_p": 0.9, "seed_": None})
        assert asker.complete(request(prompt, stop=("\n\n",))).text == "x"
    (received,) = server.received
    assert received.path == f"/v1/{path}"
    assert received.body == {
        "model": "tiny",
        "prompt" if path == "completions" else "messages": prompt,
        "max_tokens": 32,
        "temperature": 0.5,
        "seed": 7,
        "stop": ["\n\n"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_p": 0.9,
    }


def test_a_begun_answer_is_to_be_continued() -> None:
    begun = [*TURNS, {"role": "assistant", "content": "def f():"}]
    with Server(scripted(said("x", new=1, chat=True))) as server:
        client(server.url)[0].complete(request(begun))
    body = server.received[0].body
    assert body["messages"][-1] == begun[-1]
    assert (body["add_generation_prompt"], body["continue_final_message"]) == (False, True)


def test_a_warm_up_shares_no_prefix_with_what_is_measured() -> None:
    for prompt in ("Question: how?", TURNS):
        other = json.loads(bytes(warmup_prompt(prompt, "Warm-up 1. ")))
        first = other if isinstance(prompt, str) else other[0]["content"]
        assert first.startswith("Warm-up 1. ") and first.endswith(("how?", "Ä"))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"url": "127.0.0.1:8000"}, "http://"),
        ({"url": f"http://me:{KEY}@host/v1"}, "model.key_env"),
        ({"url": f"http://host/v1?key={KEY}"}, "model.key_env"),
        ({"url": f"http://host/v1#key={KEY}"}, "model.key_env"),
        ({"url": f"me:{KEY}@host/v1"}, "model.key_env"),
        ({"concurrency": 0}, "concurrency 0"),
        ({"body": {"max_tokens": 3}}, "model.body.max_tokens"),
        ({"body": {"best_of": 2}}, "model.body.best_of"),
        ({"body": {"n": 2}}, "a request has one answer"),
        ({"timeout_s": float("inf")}, "timeout_s inf"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"body": {"top_p": float("nan")}}, "model.body"),
        ({"url": "http://host:99999/v1"}, "no address"),
    ],
)
def test_settings_that_cannot_hold_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(DllmBenchError) as found:
        ServedModel(**{"name": "tiny", "url": "http://host/v1", **settings})
    assert word in str(found.value) and KEY not in str(found.value)


def read(*timed: tuple[float, bytes]) -> Any:
    """Return an answer whose pieces come at the given times."""
    clock = [0.0]
    stream = AnswerStream(lambda: clock[0])
    for clock[0], content in timed:
        stream.feed(content)
    return stream.close()


def test_times_are_those_of_content_and_tokens_those_of_the_server() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    half = len(piece("two")) // 2
    answer = read(
        (0.1, role),
        (0.5, piece("one ") + piece("two")[:half]),
        (0.7, piece("two")[half:] + b": a comment\n\n"),
        (0.8, piece("", finish="length").replace(b"\n", b"\r\n")),
        (0.9, usage(11, 7)),
        (1.0, DONE),
    )
    assert (answer.text, answer.finish) == ("one two", "length")
    assert (answer.ttft_s, answer.seconds) == (0.5, 1.0)
    assert (answer.tokens, answer.prompt_tokens) == (7, 11)


OTHER = event({"choices": [{"index": 1, "delta": {"content": "other"}}]})
THOUGHT = event({"choices": [{"delta": {"reasoning_content": "hm"}}]})


@pytest.mark.parametrize(
    ("timed", "text", "ttft_s"),
    [
        ([(0.2, event({"choices": []})), (0.3, piece("", finish="stop")), (0.4, DONE)], "", 0.3),
        ([(0.1, piece("a\u2028b\x85c", finish="stop"))], "a\u2028b\x85c", 0.1),
        ([(0.1, THOUGHT), (0.6, piece("so", finish="stop"))], "so", 0.1),
        ([(0.1, OTHER), (0.2, piece("so", finish="stop")), (0.3, OTHER)], "so", 0.2),
    ],
    ids=["an empty answer has an end", "no line ends within it", "thinking is no text", "a choice"],
)
def test_events_are_no_tokens_and_times_are_those_of_the_first_content(timed, text, ttft_s) -> None:
    answer = read(*timed)
    assert (answer.text, answer.ttft_s, answer.tokens) == (text, ttft_s, None)


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    busy = [
        Reply(status=429, headers={"Retry-After": "3"}),
        Reply([b"<html>down"], status=503),
        Reply(status=500, headers={"Retry-After": date}),
    ]
    with Server(scripted(*busy, said("yes", new=2))) as server:
        asker, waits = client(server.url, retries=3)
        received = asker.complete(request())
    assert (received.text, received.tries) == ("yes", 4)
    assert waits == [3.0, 1.0, 300.0]  # requested, twice the half second, cut down
    sent = [one.body for one in server.received]
    assert all(body == sent[0] for body in sent)


@pytest.mark.parametrize(
    "fault",
    [
        CUT,
        Reply([piece("half"), DONE]),  # ends well, and nobody said why
        Reply([piece("half"), b'data: {"choices": [{"del\n\n']),
        Reply([piece("half"), event({"error": {"message": "out of memory"}})]),
        Reply([piece("half"), event({"choices": "none"})]),
        said("half", finish="abort"),
    ],
    ids=["cut", "no finish_reason", "no JSON", "error inside", "another form", "broken off"],
)
def test_a_broken_stream_is_asked_again_and_never_half_counted(fault: Reply) -> None:
    with Server(scripted(fault, said("whole", new=3))) as server:
        received = client(server.url)[0].complete(request())
    assert (received.text, received.tokens, received.tries) == ("whole", 3, 2)


def test_in_the_end_there_is_a_sentence() -> None:
    with Server(scripted(CUT)) as server:
        sentence = refused(server.url)
    assert len(server.received) == 3
    for words in ("'item-1' in 3 tries", "RemoteProtocolError", "same command"):
        assert words in sentence


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    assert "ConnectError" in refused(url)
    with pytest.raises(DllmBenchError, match="No server answers at .*model.url="):
        client(url)[0].describe()


@pytest.mark.parametrize(
    ("status", "key_env", "words"),
    [
        (401, "TEST_KEY", "$TEST_KEY"),
        (401, None, "model.key_env=NAME"),
        (404, "TEST_KEY", "'tiny'; correct model.name"),
    ],
)
def test_the_key_is_sent_and_never_shown(status, key_env, words, monkeypatch) -> None:
    """Servers repeat what they were sent; the second time across the end of what is shown."""
    monkeypatch.setenv("TEST_KEY", KEY)
    repeated = {"error": {"message": f"{KEY} is wrong {'.' * 160} {KEY}"}}
    with Server(scripted(Reply([json.dumps(repeated).encode()], status=status))) as server:
        sentence = refused(server.url, key_env=key_env, retries=0)
    assert server.received[0].headers.get("Authorization") == (f"Bearer {KEY}" if key_env else None)
    assert words in sentence and f"{status}" in sentence
    assert not key_env or KEY[:6] not in sentence
    assert KEY not in repr(client(server.url, key_env=key_env)[0])


def test_what_a_server_says_of_its_models() -> None:
    entry = {"id": "tiny", "created": 17, "owned_by": "vllm", "max_model_len": 2048, "root": None}
    with Server(scripted(said("x")), entry) as server:
        told = client(server.url)[0].describe()
        (line,) = doctor_torch.model_lines(RunConfig({"model": {**MODEL, "url": server.url}}))
    assert told == {"id": "tiny", "owned_by": "vllm", "max_model_len": 2048}
    assert line[0] == doctor_torch.OK and "lists tiny:" in line[2]
    (line,) = doctor_torch.model_lines(RunConfig({"model": {**MODEL, "url": server.url}}))
    assert line[0] == doctor_torch.REQUIRED_MISSING and "No server answers" in line[2]


def test_a_key_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY", raising=False)
    with pytest.raises(DllmBenchError, match="TEST_KEY, which is not set"):
        client("http://host/v1", key_env="TEST_KEY")
    with pytest.raises(DllmBenchError, match="that model.key_env names, which is not set"):
        client("http://host/v1", key_env=KEY)
    monkeypatch.setenv("ALL_PROXY", f"unknown://me:{KEY}@host")
    with pytest.raises(DllmBenchError, match=r"proxies .* URL\('unknown://me:\[secure]@host'"):
        client("http://host/v1")
