"""A run on the second CUDA device looks for that device, waits for it and takes its times there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm_bench.decoding.rounds import Clock
from dllm_bench.store.groups import Hardware
from dllm_bench.store.inputs import missing_device, wait_for

NAMES = ["NVIDIA A100", "NVIDIA H200"]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Return two devices; what was called with which of them."""
    calls: list[tuple[str, Any]] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self, stream: object) -> None:
            calls.append(("record", stream))

        def elapsed_time(self, later: object) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(NAMES))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: NAMES[index or 0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device=None: calls.append(("wait", str(device)))
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return calls


def test_the_second_device_is_the_one_that_is_looked_for(called: list[tuple[str, Any]]) -> None:
    assert missing_device(Hardware({"device": "cuda:1", "match": "H200"})) == ""
    assert missing_device(Hardware({"device": "cuda", "match": "H200"})) == "a GPU (H200)"
    assert missing_device(Hardware({"device": "cuda:2"})) == "a GPU (CUDA:2)"


def test_the_second_device_is_waited_for_and_timed(called: list[tuple[str, Any]]) -> None:
    wait_for("cuda:1")
    clock = Clock(torch.device("cuda", 1))
    clock.mark()
    assert clock.spans_ms() == [2.0]
    stream = ("record", "stream of cuda:1")
    assert called == [("wait", "cuda:1"), stream, stream, ("wait", "cuda:1")]
