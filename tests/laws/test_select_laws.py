"""Laws of the selectors that follow a schedule, share a budget or split runs of masks.

On tiny random models where the whole decoder matters, on random scores where the rule alone does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.state import MASKED, PROMPT, DecodeState
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Threshold, TopK, Union
from dllm_bench.methods.dream import Epsilon, Origin
from dllm_bench.methods.fast_dllm import Factor, FirstOfBlock, Hierarchy, Ration
from dllm_bench.methods.fast_dllm_pp import FrechetBound
from tests.helpers import ROLES
from tests.pieces import Table

REQUEST = Request("laws", tuple(range(3, 20)), 32)
OFF = 1.0  # no probability is above it
WHOLE = MaskedDecoder(Confidence(), TopK(), Blocks(None), NoCache())
BY_8 = replace(WHOLE, schedule=Blocks(8))


def generate(decoder: MaskedDecoder, select: Select, model) -> Generation:
    return replace(decoder, select=select).generate(model, REQUEST)


def per_forward(generation: Generation) -> list[int]:
    """Positions committed at each forward."""
    return [generation.born.count(step) for step in range(len(generation.trace))]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(None, [0] + [1] * 30 + [2]), (32, [0] + [1] * 30 + [2]), (16, [1] + [2] * 14 + [3])],
)
def test_time_schedule_commits_the_published_counts(model, steps, expected) -> None:
    assert per_forward(generate(WHOLE, Epsilon(steps, idle=True), model)) == expected


def test_time_schedule_without_idle_forwards_is_one_token_each(model) -> None:
    busy, one = generate(WHOLE, Epsilon(), model), generate(WHOLE, TopK(), model)
    assert busy.ids == one.ids and busy.born == one.born


@pytest.mark.parametrize("kind", [Epsilon, Origin])
def test_time_schedule_ends_after_its_steps(model, kind) -> None:
    assert len(generate(BY_8, kind(3), model).trace) == 12
    assert per_forward(generate(WHOLE, kind(1), model)) == [32]


@pytest.mark.parametrize("explore", [Greedy(), Lookahead(2)], ids=["greedy", "lookahead"])
def test_origin_depends_on_its_seed_alone(model, explore) -> None:
    decoder = replace(WHOLE, explore=explore)
    first = generate(decoder, Origin(8, seed=1), model)
    torch.manual_seed(5)
    assert generate(decoder, Origin(8, seed=1), model).born == first.born
    assert generate(decoder, Origin(8, seed=2), model).born != first.born


def test_ration_shares_the_block_evenly(model) -> None:
    everything = Threshold(0.0)
    assert per_forward(generate(WHOLE, Ration(everything, 8), model)) == [4] * 8
    assert per_forward(generate(WHOLE, Ration(everything, 5), model)) == [6, 6, 7, 6, 7]
    assert per_forward(generate(BY_8, Ration(everything, 3), model)) == [2, 3, 3] * 4


def test_ration_of_one_step_is_its_inner_selector(model) -> None:
    inner = Threshold(0.3)
    assert generate(BY_8, Ration(inner, 1), model).born == generate(BY_8, inner, model).born


def test_ration_carries_over_what_was_not_used() -> None:
    """Nothing passes in the first forward, so the second one may take two shares of six."""
    ration = Ration(Threshold(0.5), steps=4)
    masked_W = torch.ones(24, dtype=torch.bool)
    low, window, state = on_scores(torch.full((24,), 0.2), masked_W, block=24)
    high, _, _ = on_scores(torch.full((24,), 0.8), masked_W, block=24)
    assert int(ration(low, window, state).sum()) == 0
    state.forwards += 1
    assert int(ration(high, window, state).sum()) == 12


def test_steps_begin_anew_where_lookahead_finished_a_block() -> None:
    """The window still begins with that block; in the next one it does not."""
    sure_W, masked_W = torch.full((16,), 0.8), torch.arange(16) >= 8
    scores, ahead, state = on_scores(sure_W, masked_W, block=8)
    scores_8, first, _ = on_scores(sure_W[:8], ~masked_W[:8], block=8)
    ration = Ration(Threshold(0.5), steps=4)
    assert int(ration(scores_8, first, state).sum()) == 2
    state.forwards += 3
    assert int(ration(scores, ahead, state).sum()) == 2, "the first share of its eight"
    state.forwards += 1
    after = replace(first, start=8, stop=16, eligible_KW=masked_W[None, 8:])
    assert int(ration(scores_8, after, state).sum()) == 4, "two shares, nothing was written"
    with pytest.raises(DllmBenchError, match="20 steps for 8 positions"):
        Epsilon(20)(scores, ahead, state)


@pytest.mark.parametrize("inner", [Threshold(0.0), Epsilon(2)], ids=str)
def test_first_of_block_enters_with_one_position(model, inner) -> None:
    generation = generate(BY_8, FirstOfBlock(inner), model)
    for start in range(0, 32, 8):
        first, *rest = generation.born[start : start + 8]
        assert min(rest) == first + 1
    assert len(generation.trace) == 8


@pytest.mark.parametrize("tau", [0.3, 0.6, OFF])
def test_hierarchy_without_runs_is_a_strict_threshold(model, tau) -> None:
    runs_off = generate(BY_8, Hierarchy(tau, low=OFF), model)
    assert runs_off.born == generate(BY_8, Threshold(tau, strict=True), model).born


def on_scores(
    sure_W: torch.Tensor, masked_W: torch.Tensor, block: int
) -> tuple[Scores, Window, DecodeState]:
    """Return what a selector is called with, from one row of probabilities."""
    masked_KW, width = masked_W[None], len(sure_W)
    ids_KW = torch.zeros(1, width, dtype=torch.long)
    special = SpecialTokens(**ROLES)
    state = DecodeState(ids_KW, torch.where(masked_KW, MASKED, PROMPT).int(), 0, special)
    must_KN = masked_KW.unflatten(1, (-1, block)).any(-1)
    window = Window(0, width, width, 0, block, 0, masked_KW, must_KN)
    return Scores(ids_KW, sure_W[None], sure_W[None]), window, state


def test_a_bound_of_one_is_one_token_per_forward(model) -> None:
    one, other = generate(BY_8, FrechetBound(1), model), generate(BY_8, TopK(), model)
    assert (one.ids, one.born) == (other.ids, other.born)


@pytest.mark.parametrize("delta", [0.0, 0.25, 0.6])
def test_the_frechet_bound_commits_what_the_factor_does_and_more(delta) -> None:
    """The same where all probabilities are equal, whatever the order of positions is."""
    generator, more = torch.Generator().manual_seed(0), 0

    def committed(select: Select, sure_W: Tensor) -> Tensor:
        return select(*on_scores(sure_W, masked_W, block=8))[0] & masked_W

    for _ in range(300):
        sure_W = 1 - torch.rand(24, generator=generator, dtype=torch.float64) ** 4
        masked_W, order_W = torch.rand(24, generator=generator) < 0.8, torch.randperm(8)
        factor_W, bound_W = (committed(s, sure_W) for s in (Factor(1 - delta), FrechetBound(delta)))
        assert not (factor_W & ~bound_W).any()
        assert not (committed(FrechetBound(delta + 0.2), sure_W) & ~bound_W).any()
        more += int((bound_W & ~factor_W).sum())
        even_W = torch.full_like(sure_W, float(sure_W[0]))
        assert committed(FrechetBound(delta), even_W).equal(committed(Factor(1 - delta), even_W))
        moved_W, masked_W = (v.view(3, 8)[:, order_W].flatten() for v in (sure_W, masked_W))
        expected_W = bound_W.view(3, 8)[:, order_W].flatten()
        assert committed(FrechetBound(delta), moved_W).equal(expected_W)
    assert more


def test_more_steps_than_can_be_useful_are_refused(model) -> None:
    with pytest.raises(DllmBenchError, match="65 steps for 32 positions.*set steps to 32"):
        generate(WHOLE, Epsilon(65, idle=True), model)
    assert len(generate(WHOLE, Epsilon(64, idle=True), model).trace) == 64


@dataclass(frozen=True)
class AskedAnyway(Select):
    """Does what `inner` does, and is asked for its stall rule in every forward."""

    inner: Select

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return self.inner(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.inner.on_stall(scores, window, state)


STEADY = [
    *(TopK(steps) for steps in (None, 1, 3, 8, 20)),
    Union(Threshold(OFF, strict=True), TopK()),
    Union(TopK(5), Threshold(0.3)),
]


@pytest.mark.parametrize("select", STEADY, ids=str)
@pytest.mark.parametrize("explore", [Greedy(), Lookahead(2)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize(
    "schedule",
    [Blocks(8), Blocks(1, False), Blocks(8, False, absolute=True), Blocks(None)],
    ids=str,
)
def test_who_never_stalls_has_no_need_of_the_rule(select, explore, schedule) -> None:
    assert Condition.NEVER_STALLS in select.gives
    decoder = replace(WHOLE, select=select, explore=explore, schedule=schedule)
    spared = decoder.generate(Table(), REQUEST)
    asked = replace(decoder, select=AskedAnyway(select)).generate(Table(), REQUEST)
    assert (spared.ids, spared.born) == (asked.ids, asked.born)
    assert all(forward.forced == 0 for forward in asked.trace.forwards)
    assert all(per_forward(spared))


def test_others_are_asked() -> None:
    others = (Threshold(OFF), Epsilon(4), Ration(TopK(), 4), Union(Threshold(OFF), Epsilon(4)))
    assert not any(Condition.NEVER_STALLS in select.gives for select in others)
