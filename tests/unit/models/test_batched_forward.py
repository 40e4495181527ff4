"""A batched forward equals the forwards of each request alone: logits, features, caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import VOCAB, load_denoiser
from tests.unit.models.forms import FIRST, LENGTH, RELATIVE, gap
from tests.unit.models.test_adapters import gemma4, llama, qwen2, qwen3

FEEDS = [  # (start, stop) of every request in three forwards, beginning with the prompts
    [(0, 9), (0, 1), (0, 14), (0, 4)],
    [(9, 10), (1, 8), (14, 17), (4, 6)],
    [(10, 16), (8, 9), (17, 18), (6, 13)],
]
TAPS = (-1, 1)


def plan(feed: tuple[int, int], kind: ForwardKind = ForwardKind.VERIFY) -> ForwardPlan:
    rows = (feed[1] - 1, feed[1] + 1) if feed[1] - feed[0] > 1 else (feed[1], feed[1] + 1)
    return ForwardPlan(kind, feed, rows, feed, "block_causal", 1, feature_layers=TAPS)


def keep(caches: list[PositionCache], plans: list[ForwardPlan]) -> None:
    for kv, found in zip(caches, plans, strict=True):
        kv.keep(found, FIRST)


def stored(kv: PositionCache) -> list[Tensor]:
    layers = [layer.stored for layer in kv.positions]
    return [part[:, :, : kv.length] for pair in layers for part in pair if part is not None]


@pytest.fixture(params=[qwen2, qwen3, llama, gemma4], ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> TransformerDenoiser:
    """Gemma's layers see a window of 6 positions, less than is fed."""
    make: Callable[[], torch.nn.Module] = request.param
    torch.manual_seed(0)
    theirs = make()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(str(tmp_path))  # type: ignore[operator]
    return load_denoiser(tmp_path)


def test_batched_requests_equal_unbatched_ones(model: TransformerDenoiser) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(4, VOCAB, (1, LENGTH - r), generator=generator) for r in range(4)]
    together, alone = ([model.new_cache(t.shape[1]) for t in tokens] for _ in range(2))
    for feeds in FEEDS:
        plans = [plan(feed) for feed in feeds]
        found = model.forward_batch(tokens, plans, together)
        expected = [model.forward(*each) for each in zip(tokens, plans, alone, strict=True)]
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert gap(one, other) < RELATIVE
        for one, other in zip(together, alone, strict=True):
            assert one.features is not None
            torch.testing.assert_close(one.features, other.features, atol=1e-4, rtol=1e-4)
        keep(together, plans)
        keep(alone, plans)
    for one, other in zip(together, alone, strict=True):
        assert one.length == other.length
        for mine, theirs in zip(stored(one), stored(other), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
