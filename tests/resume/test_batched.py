"""A run in batches: the samples of one at a time, stored as they end, no times of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.launch.local import run
from dllm_bench.metrics.definitions import definition
from dllm_bench.metrics.sample_stats import NO_TIME
from dllm_bench.runs.progress import summary
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store, read_samples
from tests.resume import fakes

TIMED = [
    *("tps/decode", "tps/e2e", "tps/no_first_step", "tps/max", "tps/top10", "step_ms"),
    *("latency/mean", "latency/p50", "latency/p95", "latency/no_first_step"),
]


@dataclass
class Many(fakes.FakeDecoder):
    """Ends in another order than it began; fails once it ended so many."""

    breaks_after: int | None = None
    asked: list[str] = field(default_factory=list)

    def _draw(self, request: Request) -> tuple[int, ...]:
        """Of the request alone, as random numbers of a masked decoder are."""
        torch.manual_seed(request.seed)
        return super()._draw(request)

    def generate_stream(
        self, model: Any, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        waiting, going, ended = iter(requests), list[Request](), 0
        while going := [*going, *islice(waiting, batch - len(going))]:
            self.asked += [request.id for request in going if request.id not in self.asked]
            yield self.generate(model, going.pop())
            ended += 1
            if ended == self.breaks_after:
                raise RuntimeError("by design")


def made(root: Path, decoder: Any, n: int = 7, batch: int = 3, **changes: Any) -> RunRecord:
    deps = fakes.deps(decoder=decoder, **changes)
    return run(fakes.spec(n, batch=batch), store=Store(root), deps=deps)


def untimed(record: RunRecord) -> dict[str, Any]:
    """Return all columns but those of time."""
    clocked = {*fakes.CLOCKED, "began_s", "ended_s", "session"}
    return {name: column for name, column in record.columns.items() if name not in clocked}


def test_samples_are_those_of_one_at_a_time(tmp_path: Path) -> None:
    side_by_side, alone = made(tmp_path, Many()), made(tmp_path, Many(), batch=1)
    assert side_by_side.identity_hash != alone.identity_hash
    assert untimed(side_by_side) == untimed(alone)
    assert side_by_side.score == alone.score
    stored = list(read_samples(Store(tmp_path).path(side_by_side.spec)))
    assert stored == [f"item-{i}" for i in (2, 3, 4, 5, 6, 1, 0)], "as they ended"
    assert side_by_side.columns["id"] == [f"item-{i}" for i in range(7)], "as they were asked"


def test_no_request_has_a_time_of_its_own(tmp_path: Path) -> None:
    now = [0.0]
    record = made(tmp_path, Many(clock=now, pause_s=1.0), clock=lambda: now[0])
    for name in fakes.CLOCKED:
        assert record.columns[name] == [None] * 7
    for name in TIMED:
        assert record.summary[name] is None
        assert definition(name).why_undefined(record.samples) == NO_TIME
    assert record.summary["requests/s"] == 1.0
    tokens = sum(record.columns["emitted"])
    assert record.summary["tps/throughput"] == pytest.approx(tokens / 7)
    assert record.summary["tpf/emitted"] == tokens / sum(record.columns["forwards"])
    assert f"left empty: {NO_TIME}" in summary(record)
    sample = read_samples(Store(tmp_path).path(record.spec))["item-0"]
    assert "ms" not in sample.trace


def test_a_broken_batch_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", Many())
    with pytest.raises(RuntimeError, match="by design"):
        made(tmp_path / "broken", Many(breaks_after=4))
    asked: list[str] = []
    record = made(tmp_path / "broken", Many(asked=asked))
    assert set(asked) == {"item-0", "item-1", "item-6"}, "two of them warm up as well"
    assert untimed(record) == untimed(whole)
    assert [session.samples for session in record.sessions] == [4, 3]
    assert record.summary["requests/s"] is not None


def refused(**changes: Any) -> str:
    with pytest.raises(DllmBenchError) as error:
        run(fakes.spec(2, **changes), store=Store(Path("nowhere")), deps=fakes.deps())
    return str(error.value)


def test_what_has_no_batches_is_refused() -> None:
    cpu = fakes.spec(2).hardware
    assert "baseline" in refused(batch=2, baseline={"_target_": "elsewhere"})
    for several in ("branch_parallel", "tensor_parallel"):
        assert "asks for several" in refused(batch=2, hardware={**cpu, several: 2})
    assert "not compiled" in refused(batch=2, model={"name": "fake", "compile": "max"})
