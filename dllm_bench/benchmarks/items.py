"""What all benchmarks share: reading items, choosing and ordering them, hashing, cutting text.

A benchmark's order is a seeded shuffle of its whole split, so that any `limit` takes a mixture of
easy and hard items and a larger limit adds items to a smaller one. Neither a harness nor torch is
imported here.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Encode, Turns

Item = Mapping[str, Any]
REPEAT = "#"

TEMPLATES: Mapping[str, tuple[bool, bool]] = {
    "plain": (False, False),
    "chat": (True, False),
    "chat_multiturn": (True, True),
}
"""template -> (chat turns instead of text, each few-shot example a turn of its own)."""
PLAIN = "plain"
_ASKS: ContextVar[bool] = ContextVar("asks", default=True)


@contextmanager
def local_data_only(alone: bool = True) -> Iterator[None]:
    """Within, items come from this disk or not at all: no server is asked."""
    token = _ASKS.set(not alone)
    try:
        yield
    finally:
        _ASKS.reset(token)


def downloads_allowed() -> bool:
    """Whether items may be asked of a server."""
    return _ASKS.get()


def choose_items(items: Sequence[Item], limit: int | None, repeats: int = 1) -> list[Item]:
    """The first `limit` items (None: all) of a fixed shuffle, each asked `repeats` times."""
    order = random.Random(f"order of {len(items)} items").sample(range(len(items)), len(items))
    return repeat_items([items[i] for i in order[:limit]], repeats)


def repeat_items(items: Sequence[Item], repeats: int) -> list[Item]:
    """Every item `repeats` times, the repetition behind a mark in its id (see `item_id_of`)."""
    if repeats == 1:
        return list(items)
    return [{**one, "id": f"{one['id']}{REPEAT}{k}"} for one in items for k in range(repeats)]


def item_id_of(request_id: str) -> str:
    """The id of the item a request asks, whichever repetition it is."""
    item, mark, count = request_id.rpartition(REPEAT)
    return item if mark and count.isdigit() else request_id


def content_hash(content: object) -> str:
    """sha256 over canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cut_at_stop(text: str, stops: Iterable[str]) -> str:
    """The text before the first occurrence of any stop string."""
    found = [i for i in (text.find(stop) for stop in stops if stop) if i >= 0]
    return text[: min(found)] if found else text


def data_file(data_dir: str, path: str, benchmark: str) -> Path:
    """An existing file of a data directory."""
    file = Path(data_dir).expanduser() / path
    if not file.is_file():
        raise DllmBenchError(
            f"Benchmark {benchmark!r} reads {path}, which is not in {data_dir!r}; "
            "name the directory that holds it with paths.data=DIR."
        )
    return file


def require_cache_or_server(benchmark: str, host: str, cached: Path, file: str) -> None:
    """Raise if data are neither in a cache nor to be had from `host` (asked for a moment only)."""
    if cached.exists() or is_reachable(host):
        return
    raise DllmBenchError(
        f"Benchmark {benchmark!r} has no data directory, nothing lies in {str(cached)!r} and "
        f"{host} cannot be reached; name a directory that holds {file} with paths.data=DIR."
    )


def is_reachable(host: str, timeout_s: float = 0.7) -> bool:
    """Whether a secure connection could be opened; looking a name up may hang, so in a thread."""
    answer: list[bool] = []

    def knock() -> None:
        try:
            socket.create_connection((host, 443), timeout_s).close()
        except OSError:
            return
        answer.append(True)

    if os.environ.get("HF_HUB_OFFLINE", "0") in ("1", "ON", "YES", "TRUE"):
        return False
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(answer)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """One JSON object per line."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def require_known(kind: str, asked: str, table: Iterable[str]) -> None:
    """Raise unless `asked` is one of the table's names."""
    names = sorted(table)
    if asked not in names:
        raise DllmBenchError(f"Unknown {kind} {asked!r}; known are {', '.join(names)}.")


def active_stops(
    stop: Sequence[str], hard_stop: Sequence[str], escape_until: bool
) -> tuple[str, ...]:
    """Strings that end a text: all of them, or with `escape_until` only the hard ones."""
    return tuple(hard_stop) if escape_until else (*stop, *hard_stop)


class LazyRequests(Sequence[Request]):
    """Requests made when they are looked at, so that a limited run prepares no more than it needs.

    prompt_of: item -> text or chat turns; turns are kept as JSON in `Request.prompt`.
    """

    def __init__(
        self,
        items: Sequence[Item],
        prompt_of: Callable[[Item], str | Turns],
        encode: Encode,
        max_new_tokens: int,
        stop: tuple[str, ...],
    ) -> None:
        self._items, self._prompt_of, self._encode = items, prompt_of, encode
        self._max_new_tokens, self._stop = max_new_tokens, stop

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            return [self._make(item) for item in self._items[index]]
        return self._make(self._items[index])

    def _make(self, item: Item) -> Request:
        prompt = self._prompt_of(item)
        text = prompt if isinstance(prompt, str) else json.dumps(list(prompt), ensure_ascii=False)
        ids = tuple(self._encode(prompt))
        return Request(item["id"], ids, self._max_new_tokens, self._stop, text)


def answered_items(texts: Mapping[str, str], items: Sequence[Item], benchmark: str) -> list[Item]:
    """The items the texts answer, in the benchmark's order."""
    unknown = sorted(set(texts) - {item["id"] for item in items})
    if unknown:
        raise DllmBenchError(
            f"Benchmark {benchmark!r} was asked to grade {unknown[0]!r} and {len(unknown) - 1} "
            f"more ids that are not among its {len(items)} items; use the limit, split and data "
            "the texts were made with."
        )
    return [item for item in items if item["id"] in texts]
