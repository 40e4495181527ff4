"""A run on the second CUDA device looks for that device, waits for it and takes its times there."""

from __future__ import annotations

from unittest.mock import Mock, call

import torch

from dllm_bench.decoding.rounds import Clock
from dllm_bench.store.groups import Hardware
from dllm_bench.store.inputs import missing_device, wait_for

NAMES = ["NVIDIA A100", "NVIDIA H200"]


def test_the_second_device_is_looked_for_waited_for_and_timed(monkeypatch) -> None:
    cuda = Mock(current_stream="stream of {}".format)
    cuda.device_count.return_value, cuda.get_device_name = len(NAMES), lambda i: NAMES[i or 0]
    cuda.Event.return_value.elapsed_time.return_value = 2.0
    monkeypatch.setattr(torch, "cuda", cuda)
    for asked, missing in (
        ({"device": "cuda:1", "match": "H200"}, ""),
        ({"device": "cuda", "match": "H200"}, "a GPU (H200)"),
        ({"device": "cuda:2"}, "a GPU (CUDA:2)"),
    ):
        assert missing_device(Hardware(asked)) == missing
    wait_for("cuda:1")
    clock = Clock(torch.device("cuda", 1))
    clock.mark()
    assert clock.spans_ms() == [2.0]
    record = call("stream of cuda:1")
    assert cuda.Event.return_value.record.mock_calls == [record, record]
    assert [str(*waited.args) for waited in cuda.synchronize.mock_calls] == ["cuda:1", "cuda:1"]
