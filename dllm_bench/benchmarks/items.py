"""Settings of a benchmark, and its items: reading, ordering, hashing, making requests.

The order of a benchmark is a seeded shuffle of its whole split. Any `limit` therefore takes a mix
of easy and hard items, and a larger limit adds items to those of a smaller one. This module imports
neither torch nor an evaluation harness.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from dllm_bench.benchmarks.embedded import FrozenTask
from dllm_bench.core.benchmark import Benchmark, Encode, Turns
from dllm_bench.core.declared import Amount, Count, Positive, Range, fits
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Likelihood, Option, Request
from dllm_bench.paths import expanded
from dllm_bench.registry import RUNTIME

Item = Mapping[str, Any]
"""One question with what is needed to grade its answer; has an `id`."""
REPETITION_MARK = "#"
KINDS = {"text": str, "texts": list[str], "list": list | dict, "number": Amount, "count": Count}
"""Kinds of the fields of a data file's rows; MBPP+ has a dict in place of an empty list."""

PLAIN = "plain"
TEMPLATES: Mapping[str, tuple[bool, bool]] = {
    PLAIN: (False, False),
    "chat": (True, False),
    "chat_multiturn": (True, True),
}
"""Prompt template -> (chat turns instead of text, a turn of its own for each few-shot example)."""
_MAY_DOWNLOAD: ContextVar[bool] = ContextVar("may_download", default=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class BenchmarkSettings:
    """Settings of benchmarks; one that has no use for a setting does not take it."""

    name: str
    """Name in records and tables."""
    max_new_tokens: Positive
    primary: str = ""
    """The metric that counts, as "<metric>,<filter>" of a task file."""
    shots: Annotated[int, Range(0, 1000)] = 0
    template: str = PLAIN
    """How prompts are written."""
    chat: bool = True
    """Whether the model takes chat turns; if not, prompts are plain whatever `template` says."""
    stop: Sequence[str] = ()
    """Strings that end a text unless `escape_until` is set."""
    hard_stop: Sequence[str] = ()
    """Strings that always end a text."""
    escape_until: bool = False
    """Use the whole budget of new tokens: only `hard_stop` ends a text."""
    split: str = "test"
    repeats: Annotated[int, Range(1, 1024)] = 1
    """How many samples each item gets (avg@k, pass@k)."""
    data_dir: str | None = field(default=None, metadata=RUNTIME)
    """Directory of original files; None reads from the hub or its cache."""
    allow_code_execution: bool = field(default=False, metadata=RUNTIME)
    """Consent to run programs that a model wrote; without it there is no run."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text."""
        return tuple(self.hard_stop if self.escape_until else (*self.stop, *self.hard_stop))


@contextmanager
def local_data_only(only: bool = True) -> Iterator[None]:
    """Read items from this disk and never download them in the block (`only` False: download)."""
    token = _MAY_DOWNLOAD.set(not only)
    try:
        yield
    finally:
        _MAY_DOWNLOAD.reset(token)


def downloads_allowed() -> bool:
    """Return whether items may be downloaded, see `local_data_only`."""
    return _MAY_DOWNLOAD.get()


def choose_items(items: Sequence[Item], limit: int | None, repeats: int = 1) -> list[Item]:
    """Return the first `limit` items (None: all) of a fixed shuffle, each `repeats` times."""
    order = random.Random(f"order of {len(items)} items").sample(range(len(items)), len(items))
    return repeat_items([items[i] for i in order[:limit]], repeats)


def repeat_items(items: Sequence[Item], repeats: int) -> list[Item]:
    """Return every item `repeats` times; the id of a repetition is `ID#0`, `ID#1`, … if there are
    several.

    `item_id_of` is the inverse for ids.
    """
    if repeats == 1:
        return list(items)
    return [{**it, "id": f"{it['id']}{REPETITION_MARK}{k}"} for it in items for k in range(repeats)]


def item_id_of(request_id: str) -> str:
    """Return the id of a request's item, without the number of the repetition."""
    item, mark, count = request_id.rpartition(REPETITION_MARK)
    return item if mark and count.isdigit() else request_id


def repetition_of(request_id: str) -> int:
    """Return the number of a request's repetition; 0 for an id without one."""
    _, mark, count = request_id.rpartition(REPETITION_MARK)
    return int(count) if mark and count.isdigit() else 0


def in_passes(requests: Iterable[Request], limit: int | None, repeats: int) -> list[Request]:
    """Return the requests of the first `limit` items (None: all): all items once, then all again.

    requests: as `repeat_items` orders them, whose order is part of what a run's hash is made of.
    """
    chosen = list(islice(requests, None if limit is None else limit * repeats))
    return sorted(chosen, key=lambda r: repetition_of(r.id)) if repeats > 1 else chosen


def cut_at_stop(text: str, stops: Iterable[str]) -> str:
    """Return the text before the first occurrence of any stop string."""
    places = [i for i in (text.find(stop) for stop in stops if stop) if i >= 0]
    return text[: min(places)] if places else text


def data_file(data_dir: str, path: str, benchmark: str) -> Path:
    """Return the file `path` of a data directory; DllmBenchError if it does not exist."""
    file = expanded(data_dir) / path
    if not file.is_file():
        raise DllmBenchError(
            f"Benchmark {benchmark!r} reads {path}, which is not in {data_dir!r}; "
            "name the directory that holds it with paths.data=DIR."
        )
    return file


def require_cache_or_server(benchmark: str, host: str, cached: Path, file: str) -> None:
    """Raise if the data are not cached and `host` does not answer within a moment."""
    if cached.exists() or is_reachable(host):
        return
    raise DllmBenchError(
        f"Benchmark {benchmark!r} has no data directory, there is nothing in {str(cached)!r} and "
        f"{host} cannot be reached; name a directory that holds {file} with paths.data=DIR."
    )


def is_reachable(host: str, timeout_s: float = 0.7) -> bool:
    """Return whether port 443 of a host accepts a connection.

    A thread tries it, because looking up the name may hang for longer than the timeout.
    """
    answered = threading.Event()

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((host, 443), timeout_s).close()
            answered.set()

    if os.environ.get("HF_HUB_OFFLINE", "0") in ("1", "ON", "YES", "TRUE"):
        return False
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answered.is_set()


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one a line; DllmBenchError names the line that holds
    none."""
    with file.open("rb") as lines:
        return [_json_object(file, i, line) for i, line in enumerate(lines, 1) if line.strip()]


def _json_object(file: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; the first may begin with a byte order mark."""
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise DllmBenchError(
            f"Line {number} of {file} is not JSON in UTF-8 ({error}); download the file again."
        ) from None
    if not isinstance(row, dict):
        raise DllmBenchError(
            f"Line {number} of {file} is a JSON {type(row).__name__}, but every line has to be an "
            "object; download the file again."
        )
    return row


@contextmanager
def naming_file(file: Path) -> Iterator[None]:
    """Turn an error about the form of a file's rows, raised in the block, into a DllmBenchError."""
    try:
        yield
    except DllmBenchError:
        raise
    except Exception as error:  # data may be wrong in any way
        raise DllmBenchError(
            f"{file} has a row of another form than the published file "
            f"({type(error).__name__}: {error}); download it again."
        ) from None


def require_fields(file: Path, rows: Sequence[Item], fields: Mapping[str, str]) -> None:
    """Raise DllmBenchError, naming file and row, if a row lacks a field, or has it in another kind.

    Of "a or b" a row needs one of the two. fields: name -> its kind, one of `KINDS`.
    """
    for number, row in enumerate(rows, 1):
        missing = [
            name
            for name, kind in fields.items()
            if not any(fits(row.get(one), KINDS[kind]) for one in name.split(" or "))
        ]
        if missing:
            raise DllmBenchError(
                f"Row {number} of {file} has no {', '.join(missing)}, or of another kind than the "
                "published file; download the file again."
            )


# --- benchmarks of items --------------------------------------------------------------------------


class LazyRequests(Sequence[Request]):
    """Requests that are built on access, so that a limited run prepares no more than it needs."""

    def __init__(self, items: Sequence[Item], build: Callable[[Item], Request]) -> None:
        self._items, self._build = items, build

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        found = self._items[index]
        return list(map(self._build, found)) if isinstance(index, slice) else self._build(found)


class ItemsBenchmark(Benchmark):
    """A benchmark that makes a request of each item."""

    max_new_tokens: int
    limit: int | None
    repeats: int
    split: str

    @property
    @abstractmethod
    def item_set(self) -> FrozenTask | None:
        """The set that the package generates; None for items of published files."""

    @abstractmethod
    def all_items(self) -> Sequence[Item]:
        """Return all items of the split, in the original order, each with an `id`."""

    @abstractmethod
    def prompt(self, item: Item) -> str | Turns:
        """Return an item's text or chat turns."""

    @abstractmethod
    def form(self) -> dict[str, object]:
        """Return what decides the requests besides the items."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text."""
        return ()

    @property
    def is_hash_known(self) -> bool:
        return self.item_set is not None

    @cached_property
    def items(self) -> list[Item]:
        """The chosen items in the fixed order."""
        return choose_items(self.all_items(), self.limit, self.repeats)

    def requests(self, encode: Encode) -> Sequence[Request]:
        return LazyRequests(self.items, lambda item: self.request(item, encode))

    def request(self, item: Item, encode: Encode) -> Request:
        """Return the request of an item; `Request.prompt` holds turns as JSON."""
        prompt = self.prompt(item)
        text = prompt if isinstance(prompt, str) else json.dumps([*prompt], ensure_ascii=False)
        return Request(item["id"], tuple(encode(prompt)), self.max_new_tokens, self.stops, text)

    def dataset_hash(self) -> str:
        """Return sha256 over items, few-shot examples, prompt form and stop strings."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        frozen = self.item_set.items_hash(self.split) if self.item_set else None
        items = [frozen, self.limit, self.repeats] if frozen else self.items
        content = {"items": items, **self.form()}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def answered(self, texts: Mapping[str, str]) -> list[Item]:
        """Return the items that `texts` (id -> text) answers, in the benchmark's order."""
        unknown = sorted(set(texts) - {item["id"] for item in self.items})
        if unknown:
            raise DllmBenchError(
                f"Benchmark {self.name!r} was asked to grade {unknown[0]!r} and "
                f"{len(unknown) - 1} more ids that are not among its {len(self.items)} items; use "
                "the limit, split and data the texts were made with."
            )
        return [item for item in self.items if item["id"] in texts]


# --- options to score by likelihood ---------------------------------------------------------------
#
# A context and its continuation are encoded as LLaDA and lm-eval do: together, so that the
# continuation's tokens are those after the context's, with the context's last spaces counted as the
# continuation's. A decoder's likelihoods are stored as the sample's text, a line of JSON, so that
# grading needs no model.


def option_of(context: str | Turns, continuation: str, encode: Encode) -> Option:
    """Return the tokens of a continuation and of its context, encoded together.

    DllmBenchError if a chat template renders the begun answer differently from a new one.
    """
    if isinstance(context, str):
        before, whole = encode(context.rstrip()), encode(context + continuation)
    else:
        begun = context[-1]["content"] if context[-1]["role"] == "assistant" else ""
        turns = list(context[:-1] if begun else context)
        answer = {"role": "assistant", "content": begun + continuation}
        before, whole = encode(context), encode([*turns, answer])
        if whole[: len(before)] != before:
            raise DllmBenchError(
                f"The chat template writes a begun answer ({continuation[:40]!r}) in another way "
                "than the start of one, so its likelihood cannot be told; use plain prompts."
            )
    return Option(tuple(before), tuple(whole[len(before) :]))


def request_of(name: str, options: Sequence[Option], prompt: str = "") -> Request:
    """Return the request that asks for the likelihoods of options, as long as its longest
    option."""
    longest = max(options, key=lambda option: len(option.prompt_ids) + len(option.ids))
    most = max(len(option.ids) for option in options)
    ids = longest.prompt_ids or longest.ids
    return Request(name, ids, max(most, 1), (), prompt, options=tuple(options))


def text_of(likelihoods: Sequence[Likelihood]) -> str:
    """Return the stored text of likelihoods."""
    return json.dumps({"likelihoods": [list(likelihood) for likelihood in likelihoods]})


def likelihoods_of(text: str) -> list[Likelihood]:
    """Invert `text_of`; ValueError for another text."""
    try:
        rows = json.loads(text)["likelihoods"]
        found = [Likelihood(float(nats), float(error), bool(g)) for nats, error, g in rows]
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"no likelihoods of options: {error}") from error
    if not found:
        raise ValueError("likelihoods of no options")
    return found
