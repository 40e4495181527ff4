"""A run on the second CUDA device looks for it, waits for it, is timed and records graphs there."""

from __future__ import annotations

from unittest.mock import MagicMock, Mock, call

import torch

from dllm_bench.decoding.rounds import Clock
from dllm_bench.models.acceleration import FixedForward, FixedShape, SharedStore
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


def test_graphs_are_recorded_on_the_models_device(monkeypatch) -> None:
    """torch's own stream for recording belongs to whichever device is the current one."""
    cuda = MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    second = torch.device("cuda", 1)
    weight = Mock(is_cuda=True, device=second, new_zeros=torch.zeros)
    forward = object.__new__(FixedForward)
    forward._store, forward.ids_KF = SharedStore(1, (1, 2), 4, weight), weight
    forward.shape = FixedShape(1, 32, 0, ())
    for _ in range(2):
        forward.record(Mock(recordings=0))
    cuda.Stream.assert_called_once_with(second)
    streams = [given.kwargs["stream"] for given in cuda.graph.call_args_list]
    assert streams == [cuda.Stream.return_value] * 2
