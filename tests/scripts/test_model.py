"""The modelled time of a round counts what a forward on the CPU computes, reads and starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dllm_bench.api.random_model import random_model
from scripts.perf import model
from scripts.perf.model import DREAM_ROUND, DeviceConstants, OperationCounter, Round

SMALL = Round({**model.PROBE, "layers": 3}, vocab=64, prefix=8, branches=3, window=16)


def test_operations_are_those_of_a_forward() -> None:
    """torch counts the attention only where it is written as matrix products."""
    forward = model.probe(SMALL, own=False)  # torch counts no product in place
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        forward()
    assert counted.get_total_flops() == replace(SMALL, own_layers=False).operations


def test_weights_are_those_that_rows_are_multiplied_with() -> None:
    module = random_model(SMALL.vocab, SMALL.shape).module
    matrices = {name: p.numel() for name, p in module.named_parameters() if p.dim() == 2}
    assert SMALL.weights == sum(matrices.values()) - matrices["model.embed_tokens.weight"]


@pytest.mark.parametrize("own", [False, True], ids=["modules", "own layers"])
def test_launches_grow_by_the_layer(own: bool) -> None:
    forward, counter = model.probe(SMALL, own), OperationCounter()
    forward()
    with counter, counter.kernels():
        forward()
    assert counter.count == replace(SMALL, own_layers=own).launches


def test_own_layers_keep_their_launches() -> None:
    """Norm, projections, rotation, attention, projection; norm, projections, SwiGLU, projection.
    Branches: attention over the prefix, over their windows, and both joined.
    """
    assert model.launches(2, branches=8) - model.launches(1, branches=8) == 11
    assert model.launches(2, branches=1) - model.launches(1, branches=1) == 9
    assert replace(DREAM_ROUND, branches=8).launches <= 350


def test_a_recorded_forward_is_started_at_once() -> None:
    """What the host starts does not grow with the layers; what the device computes does."""
    one = replace(DREAM_ROUND, branches=8, replayed=True)
    half = replace(one, shape={**one.shape, "layers": one.shape["layers"] // 2})
    assert one.started == half.started <= 16
    assert one.launches > half.launches > 100


def test_the_slowest_part_decides() -> None:
    def ms(**changes: float) -> dict[str, float]:
        fast = DeviceConstants(bytes_per_s=1e30, flop_per_s=1e30, gap_s=0.0, launch_s=0.0)
        return model.modelled_ms(DREAM_ROUND, replace(fast, **changes))

    one, launches = DREAM_ROUND, DREAM_ROUND.launches
    assert ms(bytes_per_s=1e12)["round ms"] == pytest.approx(one.bytes / 1e9)
    assert ms(flop_per_s=1e12)["device ms"] == pytest.approx(one.operations / 1e9)
    assert ms(gap_s=1e-3)["device ms"] == pytest.approx(launches)
    assert ms(gap_s=1e-3, launch_s=2e-3)["round ms"] == pytest.approx(2 * launches)
