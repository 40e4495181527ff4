"""A model, decoder and benchmark without any network inside: made to be run, killed and compared.

The text of a sample depends on its prompt, the seed and torch's random numbers, so that a wrong
resume shows in the tokens.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dllm_bench.benchmarks.items import repeat_items
from dllm_bench.core.benchmark import Benchmark, Encode, SampleScore
from dllm_bench.core.decoder import DecoderSummary
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec

SPECIAL = SpecialTokens(mask=0, eos=1, pad=2)
FIRST = 8  # ids below are special
LETTERS = "abcdefghij"
CLOCKED = ("seconds", "steps_s", "first_step_s")


def spec(n: int = 12, **changes: Any) -> RunSpec:
    """Return a run of `n` samples, not part of one of more; `replace(limit=…)` continues it."""
    run = RunSpec(
        model={"name": "fake"},
        decoder={"_target_": "nowhere", "tau": 0.5, "steps": n},
        benchmark={"name": "letters", "_target_": "nowhere"},
        hardware={"name": "cpu", "device": "cpu", "threads": 1},
        limit=n,
        label="fake",
    )
    return replace(run, **changes)


class FakeModel:
    """One character is one token."""

    denoiser = SimpleNamespace(special=SPECIAL, expect_canvas=lambda length, branches: None)

    def encode(self, text: Any) -> list[int]:
        return [FIRST + ord(c) for c in str(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i - FIRST) for i in ids if i >= FIRST)


@dataclass
class Letters(Benchmark):
    """Prompts "p0", "p1", …; a text is right when it holds an even number of letters a."""

    name: str = "letters"
    n: int = 1000
    stop: tuple[str, ...] = ()
    scores_fast: bool = True

    def requests(self, encode: Encode) -> list[Request]:
        return [Request(f"item-{i}", tuple(encode(f"p{i}")), 12, self.stop) for i in range(self.n)]

    def dataset_hash(self) -> str:
        return "0" * 64

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        return {key: self._grade(text) for key, text in texts.items()}

    def _grade(self, text: str) -> SampleScore:
        right = text.count("a") % 2 == 0
        return SampleScore(float(right), "correct" if right else "wrong", {"length": len(text)})


@dataclass
class Repeating(Letters):
    """Every prompt `repeats` times, ordered as the package's benchmarks order them."""

    repeats: int = 3

    def requests(self, encode: Encode) -> list[Request]:
        items = [{"id": request.id, "of": request} for request in super().requests(encode)]
        return [replace(item["of"], id=item["id"]) for item in repeat_items(items, self.repeats)]


@dataclass
class FakeDecoder:
    """Random letters, an end token somewhere, one mask left at the end."""

    log: Path | None = None
    pause_s: float = 0.0
    clock: list[float] | None = None  # moved by the pause, which is slept without one
    ids: tuple[int, ...] | None = None

    def summary(self) -> DecoderSummary:
        return DecoderSummary()

    def prepare(self, model: Any, request: Request) -> Request:
        return request

    def generate(self, model: Any, request: Request) -> Generation:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {request.id}\n")
        if self.clock is None:
            time.sleep(self.pause_s)
        else:
            self.clock[0] += self.pause_s
        ids = self.ids or self._draw(request)
        born = tuple(-1 if token == SPECIAL.mask else i // 4 for i, token in enumerate(ids))
        one = Forward(ForwardKind.DENOISE, 2, 12, 3)
        forwards = [replace(one, ms=5.0 + i, forced=i % 2) for i in range(3)]
        return Generation(request.id, ids, born, {}, Trace(forwards))

    def _draw(self, request: Request) -> tuple[int, ...]:
        draws = torch.randint(len(LETTERS), (request.max_new_tokens,)).tolist()
        ids = [FIRST + ord(LETTERS[i]) for i in draws]
        ids[6 + draws[0] % 4] = SPECIAL.eos
        ids[-1] = SPECIAL.mask
        return tuple(ids)


@dataclass
class Always:
    """A function that gives `value` for every run; can be sent to another process."""

    value: Any

    def __call__(self, spec: RunSpec) -> Any:
        return self.value


@dataclass
class Mixed:
    """Decoders by a run's limit; `usual` for the other limits."""

    usual: Any
    by_limit: dict[int, Any]

    def __call__(self, spec: RunSpec) -> Any:
        return self.by_limit.get(spec.limit or 0, self.usual)


@dataclass
class BrokenDecoder(FakeDecoder):
    """A bug, at one request or at all."""

    at: str = ""

    def generate(self, model: Any, request: Request) -> Generation:
        if self.at in ("", request.id):
            raise ZeroDivisionError("by design")
        return super().generate(model, request)


class StuckDecoder(FakeDecoder):
    """Thinks about one request for a minute."""

    def generate(self, model: Any, request: Request) -> Generation:
        generation = super().generate(model, request)
        time.sleep(60.0 * (request.id == "item-3"))
        return generation


class DyingDecoder(FakeDecoder):
    """Kills its own process, as the kernel does when memory is out."""

    def generate(self, model: Any, request: Request) -> Generation:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


def calls(log: Path) -> list[list[str]]:
    """Return (process, request) of every decoding that was logged, warming up included."""
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def repeating(limit: int, repeats: int = 3, **changes: Any) -> RunSpec:
    """Return a run of several passes over the items of `Repeating`."""
    return spec(limit, benchmark={**spec().benchmark, "repeats": repeats}, **changes)


def deps(**changes: Any) -> Dependencies:
    """Fake dependencies; keyword arguments replace single values or functions."""
    values = {"model": FakeModel(), "decoder": FakeDecoder(), "benchmark": Letters()}
    made: dict[str, Any] = {name: Always(value) for name, value in values.items()}
    made["prepare"] = Always(None)
    for name, value in changes.items():
        made[name] = Always(value) if name in values and not isinstance(value, Mixed) else value
    return Dependencies(**made)


def timeless(record: RunRecord) -> dict[str, Any]:
    columns = {name: value for name, value in record.columns.items() if name not in CLOCKED}
    times = ("tps/", "latency/", "step_ms")
    summary = {k: v for k, v in record.summary.items() if not k.startswith(times)}
    facts = {"spec": record.spec.to_plain(), "hash": record.identity_hash, "score": record.score}
    return {**facts, "columns": columns, "summary": summary}
