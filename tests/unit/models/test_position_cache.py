"""The buffers of a request's K/V: how often they move, and that nothing is lost then."""

from __future__ import annotations

import torch

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.kv import LENGTHENS, PositionCache

LENGTH, BRANCHES = 16, 40


def test_buffers_of_a_rising_need_move_a_few_times_and_the_trace_counts_them() -> None:
    """Branches behind a prefix that grows by a position need more room in every forward."""
    cache, generator = PositionCache(2, LENGTH), torch.Generator().manual_seed(0)
    moved = []
    for start in range(LENGTH):
        feed, count = (start, start + 1), BRANCHES if start else 1
        plan = ForwardPlan(ForwardKind.DENOISE, feed, feed, feed)
        fresh = torch.randn(1, 2, count, 4, generator=generator)
        cache.begin(plan, LENGTH)
        for layer in range(2):
            before = cache.positions[layer].stored
            known = None if before is None else before[0][:, :, :start].clone()
            keys, values = cache.update(fresh, -fresh, layer)
            assert known is None or keys[:, :, :start].equal(known)
            assert keys[:, :, start:].equal(fresh) and values[:, :, start:].equal(-fresh)
        moved.append(cache.execution.moved)
        cache.hold(plan, torch.zeros(count, 1, 3))
        cache.keep(plan, torch.tensor(count - 1))
    assert moved == [False, True, True] + [False] * (LENGTH - 3)
    kept = cache.positions[0].stored
    assert kept is not None and kept[0].shape[2] < LENGTHENS * (LENGTH + BRANCHES)
