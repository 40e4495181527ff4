"""A process that is lost while others wait for it in a collective costs no finished sample.

Killed or asleep, one sentence names it, nobody is left waiting, and the run goes on with the same
or another number of processes to the record of an undisturbed one.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import local
from dllm_bench.methods.common import Pipeline, Threshold
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.runs.progress import Observer
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import SAMPLES, Store
from tests.pieces import Table
from tests.processes.test_rank_groups import CASES
from tests.resume import fakes

pytestmark = [pytest.mark.xdist_group("dist"), pytest.mark.timeout(400)]

N, FATAL = 6, 30  # samples; the forward in which the second process is lost
WAITS_S, LESS_S = 20.0, 5.0  # for another process; for the one that is lost
DECODER = replace(CASES["lopa"], schedule=Pipeline(4, 0.5, 0.5), select=Threshold(1.0, strict=True))
PAIR = {"branch_parallel": 2, "timeout_s": WAITS_S}


class Dies(Table):
    """The second process is killed in a forward, as the kernel does when memory is out."""

    forwards = 0

    def forward(self, tokens_KL: Any, plan: Any, kv: Any) -> Any:
        self.forwards += 1
        if self.forwards == FATAL and dist.get_rank() == 1:
            self.lose()
        return super().forward(tokens_KL, plan, kv)

    def lose(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Sleeps(Dies):
    """It falls asleep instead, for much longer than the others wait."""

    def lose(self) -> None:
        time.sleep(600)


@dataclass
class Words:
    """A model of 96 tokens whose text is their numbers."""

    denoiser: Table = field(default_factory=Table)

    def encode(self, text: Any) -> list[int]:
        return [3 + ord(c) % 60 for c in str(text)]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def attention_warning(self, attention: str, block: int) -> str | None:
        return None


def deps(model: type[Table] = Table) -> Dependencies:
    return fakes.deps(model=Words(model()), decoder=DECODER)


def spec(**hardware: Any) -> RunSpec:
    plain = fakes.spec(N)
    return replace(plain, hardware={**plain.hardware, **hardware})


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        pytest.param(Dies, "Process 1 of 2 .*exit code -9", id="killed"),
        pytest.param(Sleeps, "Process 0 of 2 .*failed", id="asleep", marks=pytest.mark.exhaustive),
    ],
)
def test_a_lost_process_is_named_and_the_run_goes_on(model, sentence, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(DllmBenchError, match=sentence):
        local.run(spec(**PAIR | {"timeout_s": LESS_S}), store=store, deps=deps(model))
    kept = (store.path(spec(**PAIR)) / SAMPLES).read_text().splitlines()
    assert 0 < len(kept) < N
    replicas = 1 if model is Dies else 2
    logger = Mock(Observer)
    again = spec(**PAIR, replicas=replicas)
    record = local.run(again, store=store, deps=deps(), logger=logger)
    assert [name for name, *_ in logger.mock_calls][-2:] == ["finish", "close"]
    assert (store.path(spec(**PAIR)) / SAMPLES).read_text().splitlines()[: len(kept)] == kept
    alone = local.run(spec(), store=store, deps=deps())
    assert fakes.timeless(record)["columns"] == fakes.timeless(alone)["columns"]
