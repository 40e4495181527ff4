"""A real HTTP server on loopback that speaks the OpenAI interface, streaming, a thread per request.

What it answers is a function: `scripted` plays replies in order, broken ones too; `Causal` decodes
with a checkpoint through transformers' own class.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

Plain = dict[str, Any]
DONE = b"data: [DONE]\n\n"


@dataclass
class Reply:
    """Pieces of a body, each sent at once; `whole` is False for one that breaks off after them.
    `raw`: the pieces are the whole response, without status, headers and chunks around them."""

    pieces: Iterable[bytes] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True
    raw: bool = False


@dataclass
class ReceivedRequest:
    """A request as it came."""

    path: str
    body: Plain
    headers: Mapping[str, str]


Answering = Callable[[ReceivedRequest], Reply]


class Quiet(ThreadingHTTPServer):
    """A client that went away is no news."""

    daemon_threads = True

    def handle_error(self, *_: Any) -> None: ...


class Server:
    """The server while the `with` block runs; `received` are the requests for texts, in order."""

    def __init__(self, answer: Answering, model: Plain | None = None) -> None:
        self.answer = answer
        listed = [model or {"id": "tiny", "object": "model", "owned_by": "tests"}]
        self.models = Reply([json.dumps({"object": "list", "data": listed}).encode()])
        self.received: list[ReceivedRequest] = []
        self.http = Quiet(("127.0.0.1", 0), type("Bound", (Handler,), {"of": self}))
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    of: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.reply(self.of.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        received = ReceivedRequest(self.path, body, dict(self.headers))
        self.of.received.append(received)
        self.reply(self.of.answer(received))

    def reply(self, reply: Reply) -> None:
        """Send a reply, chunk by chunk."""
        if reply.raw:
            self.close_connection = True
            for piece in reply.pieces:
                self.wfile.write(piece)
            return
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Transfer-Encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in reply.pieces:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()
        if reply.whole:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True


def event(plain: Plain) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(plain, ensure_ascii=False).encode() + b"\n\n"


def piece(text: str, chat: bool = True, finish: str | None = None) -> bytes:
    """Return an event with a part of the text."""
    said: Plain = {"delta": {"content": text}} if chat else {"text": text}
    return event({"choices": [{"index": 0, **said, "finish_reason": finish}]})


def usage(prompt: int, new: int) -> bytes:
    """Return the event that counts tokens."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new}})


def said(*texts: str, new: int | None = None, finish: str = "stop", chat: bool = True) -> Reply:
    """Return a whole answer; without `new` the server does not count."""
    counts = [] if new is None else [usage(5, new)]
    return Reply([*(piece(text, chat) for text in texts), piece("", chat, finish), *counts, DONE])


def scripted(*replies: Reply) -> Answering:
    """Return the replies in order, the last one ever after."""
    left = list(replies)
    lock = threading.Lock()

    def answer(received: ReceivedRequest) -> Reply:
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return answer


class Causal:
    """Greedy decoding of a causal checkpoint, by transformers alone; the end token is counted."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self.decoded = cache(self._decoded)

    def __call__(self, received: ReceivedRequest) -> Reply:
        body = received.body
        return self.decoded(body["prompt"], body["max_tokens"], tuple(body.get("stop", ())))

    @torch.inference_mode()
    def _decoded(self, prompt: str, most: int, stops: tuple[str, ...]) -> Reply:
        """Return a text up to a stop string, in pieces of a few letters."""
        fed_1P = torch.tensor([self.tokenizer.encode(prompt, add_special_tokens=False)])
        ends = {"stop_strings": list(stops) or None, "tokenizer": self.tokenizer}
        whole_1L = self.model.generate(fed_1P, max_new_tokens=most, do_sample=False, **ends)
        ids = whole_1L[0, fed_1P.shape[1] :].tolist()
        whole = self.tokenizer.decode(ids, skip_special_tokens=True)
        cuts = [at for stop in stops if (at := whole.find(stop)) >= 0]
        text = whole[: min(cuts, default=len(whole))]
        finish = "stop" if cuts or ids[-1] == self.tokenizer.eos_token_id else "length"
        parts = (text[at : at + 3] for at in range(0, len(text), 3))
        return said(*parts, new=len(ids), finish=finish, chat=False)
