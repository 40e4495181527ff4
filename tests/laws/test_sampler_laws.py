"""Laws of the adaptive samplers: out of reach is one token per forward, and what each reduces to.

On tiny random models where the whole decoder matters, on random scores where the rule alone does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import PROMPT
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import (
    Blocks,
    Confidence,
    Margin,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
)
from dllm_bench.methods.confidence_rules import (
    GAP,
    AnswerGap,
    EarlyExit,
    EntropyBound,
    LocalLeap,
    WithEntropy,
)
from dllm_bench.methods.d3llm import DelayedCache, EntropyThreshold, MultiBlock
from dllm_bench.methods.dream import Sampled
from dllm_bench.methods.history import KLHistory, Stable
from dllm_bench.methods.position_rules import Calibrated, Dilated, TokenCounts, pattern
from tests.helpers import Watched
from tests.laws.test_select_laws import on_scores

REQUEST = Request("samplers", tuple(range(3, 20)), 32)
BY_8 = MaskedDecoder(NegEntropy(), TopK(), Blocks(8), NoCache())
OUT = 1e9  # a gap that no logits reach
NEVER, ALWAYS = -1.0, 1e9  # nats: no entropy is below the first, none above the second


def generate(model, decoder: MaskedDecoder = BY_8, **pieces) -> Generation:
    return replace(decoder, **pieces).generate(model, REQUEST)


def same(one: Generation, other: Generation) -> bool:
    return (one.ids, one.born) == (other.ids, other.born)


@pytest.mark.parametrize(
    "select",
    [
        EntropyThreshold(NEVER),
        EntropyThreshold(NEVER, best=True),
        EntropyBound(NEVER),
        EntropyBound(0.0),
        EntropyBound(0.0, left_out="last"),
        LocalLeap(1.0, 0.0, 4),
    ],
    ids=str,
)
def test_out_of_reach_is_one_token_per_forward(model, select) -> None:
    assert same(generate(model, select=select), generate(model))


@pytest.mark.parametrize("select", [EntropyThreshold(ALWAYS), EntropyBound(ALWAYS)], ids=str)
def test_a_bound_that_nothing_exceeds_is_one_forward_per_block(model, select) -> None:
    assert len(generate(model, select=select).trace) == 4


@pytest.mark.parametrize("gamma", [0.5, 2.0, 8.0])
def test_in_order_of_entropy_the_largest_is_the_last(model, gamma) -> None:
    largest, last = (
        generate(model, select=EntropyBound(gamma, left_out=form)) for form in ("largest", "last")
    )
    assert same(largest, last)


def test_in_order_of_confidence_an_earlier_one_may_have_more_entropy() -> None:
    scores, window, state = on_scores(torch.tensor([0.9, 0.8, 0.7]), torch.ones(3) > 0, block=3)
    scores = replace(scores, neg_entropy_KW=-torch.tensor([[1.0, 0.2, 0.2]]))
    counts = [
        int(EntropyBound(gamma, left_out=form)(scores, window, state).sum())
        for form in ("largest", "last")
        for gamma in (0.1, 0.3, 0.5, 1.1, 1.3)
    ]
    assert counts == [1, 2, 3, 3, 3, 1, 1, 1, 2, 3]


def test_at_least_so_many_are_committed(model) -> None:
    assert len(generate(model, select=EntropyBound(NEVER, least=4)).trace) == 8


@pytest.mark.parametrize("inner", [Confidence(), Margin(), NegEntropy(), Confidence("bfloat16")])
def test_the_entropy_comes_beside_an_unchanged_score(inner) -> None:
    logits_KWV = 3 * torch.randn(1, 9, 50, generator=torch.Generator().manual_seed(0))
    found = WithEntropy(inner)(logits_KWV, None, None)  # type: ignore[arg-type]
    plain = inner(logits_KWV, None, None)
    for name, values in plain.tensors().items():
        torch.testing.assert_close(found.tensors()[name], values)
    expected_KW = NegEntropy(inner.precision)(logits_KWV, None, None).confidence_KW  # type: ignore[arg-type]
    torch.testing.assert_close(found.neg_entropy_KW, expected_KW)


def test_the_best_of_all_open_blocks_is_committed() -> None:
    sure_W, masked_W = torch.linspace(0.1, 0.8, 16), torch.ones(16, dtype=torch.bool)
    scores, window, state = on_scores(sure_W, masked_W, block=8)
    scores = replace(scores, neg_entropy_KW=scores.confidence_KW - 9)
    assert EntropyThreshold(0.5, best=True)(scores, window, state)[0].nonzero().tolist() == [[15]]
    assert not EntropyThreshold(0.5)(scores, window, state).any()


def test_an_entropy_is_handed_on_by_samplers_and_pipelines(model) -> None:
    drawn = generate(
        model,
        score=Sampled(NegEntropy(), temperature=0.5),
        select=EntropyThreshold(1.0),
        schedule=Pipeline(8, 0.1, 0.95),
    )
    assert len(drawn.trace) < 32


def moving(tau: float, eps: float, length: int = 2, **changes) -> dict:
    """KLASS's score and selector."""
    score, select = KLHistory(Confidence(), length), Stable(TopK(4), tau, eps, **changes)
    return {"score": score, "select": select}


@pytest.mark.parametrize("warm_up", [False, True])
def test_everything_ready_waits_for_its_history(model, warm_up) -> None:
    """The first divergence of a request is never small; later blocks bring theirs along."""
    generation = generate(model, **moving(0.0, 9.0, length=3, warm_up=warm_up))
    counts = [generation.born.count(step) for step in range(len(generation.trace))]
    assert counts == [2, 2, 2, 2] + ([2, 2, 4] * 3 if warm_up else [8] * 3)


@pytest.mark.parametrize("kind", ["dilated", "binary"])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 12, 31, 32])
def test_a_pattern_has_every_position_in_spread_levels(kind, size) -> None:
    level_P, levels = pattern(size, kind, 2, 1, torch.device("cpu"))
    sizes = [int((level_P == level).sum()) for level in range(levels)]
    assert sum(sizes) == size and 0 not in sizes
    assert levels == 1 or sizes[-1] >= sizes[-2]
    for level in range(levels - 1):
        apart = (level_P == level).nonzero()[:, 0].diff()
        assert apart.numel() == 0 or apart.min() > 1, "only the last level joins neighbours"


def test_a_dilated_schedule_reads_no_scores(model) -> None:
    assert len(generate(model, select=Dilated()).trace) == 4 * 3
    assert len(generate(model, select=Dilated(base=1)).trace) == 4
    waiting = generate(model, score=Confidence(), select=Dilated(least=1.1))
    assert [waiting.born.count(step) for step in range(4)] == [0, 0, 4, 4]


def test_one_block_at_a_time_is_block_by_block(model) -> None:
    select = EntropyThreshold(1.0, best=True)
    single = generate(model, select=select, schedule=MultiBlock(8, 1.0))
    assert same(single, generate(model, select=select))
    several = generate(model, select=select, schedule=MultiBlock(8, 0.1))
    assert len(several.trace) < len(single.trace)


PROPHET = replace(BY_8, score=AnswerGap(), schedule=Blocks(None))


def exits(early: float, mid: float, late: float, **changes) -> EarlyExit:
    return EarlyExit(TopK(), 8, early, mid, late, **changes)


def test_an_answer_that_is_never_clear_is_decoded_to_its_end(model) -> None:
    never = generate(model, PROPHET, select=exits(OUT, OUT, OUT))
    assert same(never, generate(model, score=Confidence()))
    assert len(generate(model, PROPHET, select=exits(0.0, OUT, OUT)).trace) == 1
    assert len(generate(model, PROPHET, select=exits(OUT, 0.0, OUT)).trace) == 11, "0.33 of 32"
    assert len(generate(model, PROPHET, select=exits(OUT, OUT, 0.0)).trace) == 22, "0.67 of 32"


def test_pinned_tokens_stand_from_the_start(model) -> None:
    pinned = ((3, 7), (20, 9))
    watched = Watched(model)
    select = exits(OUT, OUT, OUT, pinned=pinned)
    generation = generate(watched, PROPHET, select=select)
    for place, token in pinned:
        assert generation.ids[place] == token and generation.born[place] == PROMPT
        assert all(canvas[0, 17 + place] == token for canvas in watched.canvases)
    assert len(generation.trace) == 30
    idle = generate(model, PROPHET, select=replace(select, idle=True))
    assert [idle.born.count(step) for step in range(9)] == [1] * 7 + [0, 1], "published"
    with pytest.raises(DllmBenchError, match="pins a token at new position 32"):
        generate(model, PROPHET, select=exits(1.0, 1.0, 1.0, pinned=((32, 5),)))


def test_the_gap_is_that_of_the_answer(model) -> None:
    logits_KWV = torch.randn(2, 32, 50, generator=torch.Generator().manual_seed(0))
    eligible_KW = torch.arange(32) % torch.tensor([[2], [3]]) == 0
    two = logits_KWV.topk(2).values
    gap_KW = two[..., 0] - two[..., 1]
    window, state = SimpleNamespace(eligible_KW=eligible_KW), SimpleNamespace(memo={})
    for answer, expected in (
        (None, [gap_KW[k][eligible_KW[k]].mean() for k in range(2)]),
        (4, gap_KW[:, 4:9].mean(1)),
        (30, gap_KW[:, 30:].mean(1)),
    ):
        AnswerGap(answer=answer)(logits_KWV, state, window)  # type: ignore[arg-type]
        torch.testing.assert_close(state.memo[GAP], torch.stack(list(expected)))


@pytest.mark.parametrize("position", ["exponential", "linear"])
def test_calibration_without_surprise_goes_from_left_to_right(model, position, tmp_path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"num_token": 100, "p_baseline_dict": {"5": 50}}))
    left = Calibrated(TokenCounts(str(counts)), 1.0, 1e-3, position)
    assert generate(model, score=left).born == tuple(range(32))
    with pytest.raises(DllmBenchError, match="should have sha256 0000"):
        TokenCounts(str(counts), "0000")


@pytest.mark.parametrize(
    "schedule", [Blocks(8), MultiBlock(8, 0.1), Pipeline(8, 0.1, 0.5)], ids=str
)
def test_a_delay_without_end_is_no_cache(model, schedule) -> None:
    decoder = {"score": Confidence(), "select": Threshold(0.4), "schedule": schedule}
    plain = generate(model, **decoder)
    assert same(generate(model, cache=DelayedCache(delay=99), **decoder), plain)
    assert not same(generate(model, cache=DelayedCache(delay=0), **decoder), plain)
