"""Laws of the forward: masks, caches and misuse, on tiny random models.

Whole forwards are compared with a second implementation in `test_layouts`, branches with those of
fixed shapes in `test_acceleration`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from dllm_bench.core.denoiser import ForwardPlan, PositionSets
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import SpecialTokens
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.attention import MaskShape, attention_mask, mask_of_sets
from dllm_bench.models.kv import LENGTHENS, PositionCache
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.models.wrapped import FunctionDenoiser
from tests.helpers import IDS, ROLES, VOCAB, tiny_denoiser, whole_forward

LENGTH, PROMPT = 29, 5
MASK = IDS["<|mask|>"]
FIRST = torch.tensor(0)


@pytest.fixture(scope="module", params=("llada", "dream"))
def model(request: pytest.FixtureRequest) -> TransformerDenoiser:
    return tiny_denoiser(request.param, seed=3)


def canvas(seed: int = 0) -> Tensor:
    """Return tokens with about half of the positions after the prompt masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens_1L = torch.randint(0, VOCAB - len(IDS), (1, LENGTH), generator=generator)
    masked_1L = torch.rand(1, LENGTH, generator=generator) < 0.5
    masked_1L[:, :PROMPT] = False
    return tokens_1L.masked_fill(masked_1L, MASK)


def plan(
    feed: tuple[int, int], rows: tuple[int, int] | None = None, store: tuple[int, int] = (0, 0)
) -> ForwardPlan:
    return ForwardPlan(ForwardKind.DENOISE, feed, rows or feed, store)


def forward(model: TransformerDenoiser, what: ForwardPlan, kv: PositionCache) -> None:
    """Make a forward whose K/V are kept."""
    model.forward(canvas(), what, kv)
    kv.keep(what, FIRST)


def test_a_shorter_canvas_hides_the_cached_positions_behind_it(model: TransformerDenoiser) -> None:
    """What is stored may also begin behind what is fed."""
    start, stop, end = 8, 16, 24
    window, logits = plan((start, stop)), []
    for stores in ([(0, LENGTH)], [(0, end)], [(0, 11), (11, end)]):
        kv = model.new_cache(LENGTH)
        for store in stores:
            forward(model, plan((0, LENGTH), (start, stop), store), kv)
        logits.append(model.forward(canvas()[:, :end], window, kv))
    torch.testing.assert_close([logits[0]] * 2, logits[1:], atol=1e-5, rtol=1e-5)


def test_the_cache_changes_with_no_forward_that_is_not_kept_and_with_no_logits(model) -> None:
    """A decoder writes -inf into logits."""
    kv, after = model.new_cache(LENGTH), plan((13, LENGTH))
    forward(model, plan((0, LENGTH), (PROMPT, LENGTH), (0, 13)), kv)
    before = model.forward(canvas(), after, kv)
    expected = before.clone()
    with torch.inference_mode():
        before.fill_(0.0)
    model.forward(canvas(seed=9), plan((8, LENGTH), (PROMPT + 8, LENGTH), (8, 20)), kv)
    assert kv.length == 13
    assert torch.equal(model.forward(canvas(), after, kv), expected)


def test_misuse_raises_an_error(model: TransformerDenoiser) -> None:
    kv = model.new_cache(LENGTH)
    with pytest.raises(ValueError, match="only 0 are cached"):
        model.forward(canvas(), plan((4, LENGTH)), kv)
    with pytest.raises(ValueError, match=r"Rows \(2, 10\) of \(0, 8\)"):
        model.forward(canvas(), plan((0, 8), (2, 10)), kv)
    step = plan((0, LENGTH), (PROMPT, LENGTH), (0, 13))
    with pytest.raises(ValueError, match="last forward"):
        kv.keep(step, FIRST)
    forward(model, step, kv)
    with pytest.raises(ValueError, match="last forward"):
        kv.keep(step, FIRST)
    gap = plan((0, LENGTH), (PROMPT, LENGTH), (20, 25))
    model.forward(canvas(), gap, kv)
    with pytest.raises(ValueError, match="Cannot store"):
        kv.keep(gap, FIRST)


def test_a_shifted_window_needs_the_row_before_it() -> None:
    model = tiny_denoiser("dream", seed=3)
    kv = model.new_cache(LENGTH)
    forward(model, plan((0, LENGTH), (0, 8), (0, LENGTH)), kv)
    with pytest.raises(DllmBenchError, match=r"shifted by one .* position 12"):
        model.forward(canvas(), plan((12, 20)), kv)
    inside = model.forward(canvas(), plan((12, 20), (13, 20)), kv)
    whole = whole_forward(model, canvas())[:, 13:20]
    torch.testing.assert_close(inside, whole, atol=1e-5, rtol=1e-5)


SPECIAL = SpecialTokens(**ROLES)


def test_a_function_gives_every_row_where_no_branch_sees_them_all(model) -> None:
    ends_K, last = torch.tensor([9, 12]), 20
    what = replace(plan((0, last), (PROMPT, last)), visible_K=ends_K)
    function = FunctionDenoiser(partial(whole_forward, model), SPECIAL, shifted=False)
    found, law = (
        one.forward(canvas().expand(2, -1), what, one.new_cache(LENGTH))
        for one in (function, model)
    )
    assert found.shape == law.shape
    for end, of_function, of_model in zip(ends_K - PROMPT, found, law, strict=True):
        torch.testing.assert_close(of_function[:end], of_model[:end], atol=1e-5, rtol=1e-5)


def test_a_module_as_a_function_is_evaluated_and_keeps_its_modes() -> None:
    module = nn.Sequential(nn.Embedding(VOCAB, 4), nn.Dropout(), nn.Linear(4, VOCAB).eval())
    model, what = FunctionDenoiser(module, SPECIAL, shifted=False), plan((0, LENGTH))
    one, other = (model.forward(canvas(), what, model.new_cache(0)) for _ in range(2))
    assert one.equal(other)
    assert [part.training for part in module] == [True, True, False]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda ids: torch.zeros(*ids.shape, 40), "logits of 40 tokens.*mask=95"),
        (lambda ids: torch.zeros(*ids.shape, VOCAB, dtype=torch.long), "returned torch.int64"),
        (lambda ids: torch.zeros(*ids.shape, VOCAB).numpy(), r"returned float32 \(1, 1, 96\)"),
    ],
)
def test_a_function_of_other_logits_is_refused(function, words: str) -> None:
    with pytest.raises(DllmBenchError, match=words):
        FunctionDenoiser(function, SPECIAL, shifted=False)


def naive(shape: MaskShape, visible: list[int] | None) -> Tensor:
    """(Q, keys) True where seen, position by position."""
    fed, cached = list(range(*shape.feed)), [p for span in shape.cached for p in range(*span)]
    keys = [(None, p) for p in cached] + [(k, p) for k in range(shape.branches) for p in fed]

    def sees(branch: int, query: int, owner: int | None, key: int) -> bool:
        own = owner is None or owner == branch
        open_ = owner is None or visible is None or key < visible[owner]
        ordered = shape.block == 0 or shape.block_index(key) <= shape.block_index(query)
        return own and open_ and ordered

    queries = [(k, p) for k in range(shape.branches) for p in fed]
    return torch.tensor([[sees(*query, *key) for key in keys] for query in queries])


def test_the_mask_of_sets_is_that_of_equal_spans() -> None:
    fed, cached, ends_K = torch.arange(4, 9), torch.arange(4), torch.tensor([7])
    spans = plan((4, 9))
    for window, visible_K, alone in product((0, 3), (None, ends_K), (None, 6)):
        shape = MaskShape(1, (4, 9), ((0, 4),), window=window, alone=alone)
        expected = attention_mask(shape, visible_K, torch.float32, torch.device("cpu"))
        sets = PositionSets(fed, cached, fed)
        scattered = replace(spans, sets=sets, visible_K=visible_K, alone=alone)
        mask = mask_of_sets(scattered, window, torch.float32)
        if mask is None or expected is None:
            assert mask is expected
        else:
            assert torch.equal(mask, expected.expand_as(mask))


@pytest.mark.parametrize("seed", range(40))
def test_masks_equal_the_rule_position_by_position(seed: int) -> None:
    draw = random.Random(seed)
    start, fed, branches = draw.randint(0, 9), draw.randint(1, 9), draw.randint(1, 3)
    stop = start + fed
    spans = [(0, start), (stop, stop + draw.randint(0, 4))]
    cached = tuple(span for span in spans if span[0] < span[1])
    shape = MaskShape(branches, (start, stop), cached, draw.randint(1, 6), draw.choice([0, 3]))
    visible = [draw.randint(start + 1, stop) for _ in range(branches)] if seed % 2 else None
    ends_K = None if visible is None else torch.tensor(visible)
    mask = attention_mask(shape, ends_K, torch.float32, torch.device("cpu"))
    expected = naive(shape, visible)
    if mask is None:
        assert expected.all()
    else:
        assert torch.equal((mask == 0).expand(1, 1, *expected.shape)[0, 0], expected)


@pytest.mark.parametrize("shape", [MaskShape(1, (9, 13), ((0, 9),)), MaskShape(3, (5, 8), ())])
def test_rows_of_masks_begin_where_a_cuda_device_can_read(shape: MaskShape) -> None:
    """torch's kernel reads eight numbers of bfloat16 at a time; a view that begins elsewhere
    crashes it."""
    for stop in (*range(13, 22), *range(1020, 1030)):
        causal = MaskShape(1, (stop - 4, stop), ((0, stop - 4),), block=1)
        for one in (replace(shape, block=2), causal):
            mask = attention_mask(one, None, torch.bfloat16, torch.device("cpu"))
            assert mask is not None
            assert mask.storage_offset() % 8 == mask.stride(2) % 8 == 0
        assert torch.equal(mask[0, 0] == 0, naive(causal, None))


CANVAS, BRANCHES = 16, 40


def test_buffers_of_a_rising_need_move_a_few_times_and_the_trace_counts_them() -> None:
    """Branches behind a prefix that grows by a position need more room in every forward."""
    cache, generator = PositionCache(2, CANVAS), torch.Generator().manual_seed(0)
    moved = []
    for start in range(CANVAS):
        feed, count = (start, start + 1), BRANCHES if start else 1
        step = plan(feed, store=feed)
        fresh = torch.randn(1, 2, count, 4, generator=generator)
        cache.begin(step, CANVAS)
        for layer in range(2):
            before = cache.positions[layer].stored
            known = None if before is None else before[0][:, :, :start].clone()
            keys, values = cache.update(fresh, -fresh, layer)
            assert known is None or keys[:, :, :start].equal(known)
            assert keys[:, :, start:].equal(fresh) and values[:, :, start:].equal(-fresh)
        moved.append(cache.execution.moved)
        cache.hold(step, torch.zeros(count, 1, 3))
        cache.keep(step, torch.tensor(count - 1))
    assert moved == [False, True, True] + [False] * (CANVAS - 3)
    kept = cache.positions[0].stored
    assert kept is not None and kept[0].shape[2] < LENGTHENS * (CANVAS + BRANCHES)
