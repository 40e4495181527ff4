"""Laws of lookahead: how branches are counted, what their confidence is, which scores it reads.

Branch confidences are compared with the definition written down position by position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import CREATION, Lookahead
from dllm_bench.methods.caches import BlockCache, NoCache
from dllm_bench.methods.common import Blocks, NegEntropy, Pipeline, Threshold
from dllm_bench.methods.history import Credit
from tests.helpers import ROLES

REQUEST = Request("laws", tuple(range(3, 14)), 32)
SCHEDULES = (Blocks(8), Pipeline(8, 0.1, 0.5))
BASE = MaskedDecoder(NegEntropy(), Threshold(0.6), Blocks(8), NoCache())
SPECIAL = SpecialTokens(**ROLES)


def generate(model, explore: Any, **changes: Any) -> Generation:
    return replace(BASE, explore=explore, **changes).generate(model, REQUEST)


def same(one: Generation, other: Generation) -> bool:
    """Equal tokens, each from the same forward."""
    return (one.ids, one.born) == (other.ids, other.born)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("lookaheads", [1, 3])
def test_counting_the_base_is_one_lookahead_less(model, schedule, lookaheads) -> None:
    beside = generate(model, Lookahead(lookaheads), schedule=schedule)
    with_base = generate(model, Lookahead(lookaheads + 1, counts_base=True), schedule=schedule)
    assert same(with_base, beside)
    assert [f.branches for f in with_base.trace.forwards] == [
        f.branches for f in beside.trace.forwards
    ]
    assert max(f.branches for f in beside.trace.forwards) == lookaheads + 1


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "explore",
    [Lookahead(0), Lookahead(0, counts_base=True), Lookahead(1, counts_base=True)],
    ids=str,
)
def test_a_base_alone_is_no_lookahead(model, explore, schedule) -> None:
    alone = generate(model, explore, schedule=schedule)
    assert same(alone, generate(model, Greedy(), schedule=schedule))
    assert {f.branches for f in alone.trace.forwards} == {1}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("cache", [NoCache("block_causal"), BlockCache(), BlockCache("full")])
def test_a_base_that_always_wins_decodes_like_greedy(model, schedule, cache) -> None:
    forced = generate(model, Lookahead(3, base_wins=True), schedule=schedule, cache=cache)
    assert same(forced, generate(model, Greedy(), schedule=schedule, cache=cache))
    assert all(f.winner == f.branches - 1 for f in forced.trace.forwards)
    assert max(f.branches for f in forced.trace.forwards) == 4
    voted = generate(model, Lookahead(3), schedule=schedule, cache=cache)
    assert not same(voted, forced)


def branches_of(masked_KW: Tensor) -> tuple[Window, DecodeState]:
    """K branches whose masks are `masked`."""
    branches, width = masked_KW.shape
    ids_KW = torch.zeros(branches, width, dtype=torch.long)
    state = DecodeState(ids_KW, torch.where(masked_KW, -1, 0).int(), 0, SPECIAL)
    must_KN = masked_KW.any(1, keepdim=True)
    return Window(0, width, width, 0, width, 0, masked_KW, must_KN), state


def picked(explore: Lookahead, confidence_KW: Tensor, masked_KW: Tensor) -> int:
    window, state = branches_of(masked_KW)
    ids_KW = torch.zeros_like(confidence_KW, dtype=torch.long)
    return winner_of(explore, Scores(ids_KW, confidence_KW, confidence_KW), window, state)


def winner_of(explore: Lookahead, scores: Scores, window: Window, state: DecodeState) -> int:
    return int(explore.pick(explore.rate(scores, window, state)))


def by_hand(explore: Lookahead, confidence_W: Tensor, masked_W: Tensor) -> float:
    """Confidence of one branch."""
    masked = [float(c) for c, m in zip(confidence_W, masked_W, strict=True) if m]
    if not masked:
        return 1.0
    if explore.sliding is not None:
        n = min(explore.sliding, len(masked))
        return min(sum(masked[i : i + n]) / n for i in range(len(masked) - n + 1))
    lowest = sorted(masked)[: max(1, int(len(masked) * explore.fraction))]
    return sum(lowest) / len(lowest)


@pytest.mark.parametrize(
    "explore",
    [
        Lookahead(3),
        Lookahead(3, fraction=0.5),
        Lookahead(3, fraction=0.01),
        Lookahead(3, sliding=1),
        Lookahead(3, sliding=4),
        Lookahead(3, sliding=99),
    ],
    ids=str,
)
def test_the_surest_branch_wins(explore) -> None:
    generator = torch.Generator().manual_seed(0)
    winners = set()
    for share in (0.1, 0.3, 0.6, 1.0) * 25:
        confidence_KW = -torch.rand(4, 12, generator=generator)
        masked_KW = torch.rand(4, 12, generator=generator) < share
        pairs = zip(confidence_KW, masked_KW, strict=True)
        expected = [by_hand(explore, *pair) for pair in pairs]
        winner = picked(explore, confidence_KW, masked_KW)
        assert expected[winner] == pytest.approx(max(expected), abs=1e-6)
        winners.add(winner)
    assert winners == {0, 1, 2, 3}


def test_sliding_windows_pass_over_decoded_positions() -> None:
    """Branch 0 has its two unsure masks in a row, a decoded position between them."""
    unsure_first_KW = torch.tensor([[0.1, 0.9, 0.1, 0.8, 0.8], [0.1, 0.7, 0.7, 0.1, 0.9]])
    masked_KW = torch.tensor([[True, False, True, True, True], [True] * 5])
    assert picked(Lookahead(1, sliding=2), unsure_first_KW, masked_KW) == 1
    assert picked(Lookahead(1, sliding=4), unsure_first_KW, masked_KW) == 0


def test_ties_go_to_the_earlier_lookahead_and_the_base_is_last() -> None:
    level_KW, masked_KW = torch.full((3, 4), 0.5), torch.ones(3, 4, dtype=torch.bool)
    for explore in (Lookahead(2), Lookahead(2, sliding=2), Lookahead(2, fraction=0.5)):
        assert picked(explore, level_KW, masked_KW) == 0
    level_KW[1] += 0.1
    assert picked(Lookahead(2), level_KW, masked_KW) == 1


def test_branch_confidence_is_rounded_once_to_the_precision_of_the_scores() -> None:
    """A difference of the means below bfloat16's resolution is a tie there."""
    close_KW = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.502]])
    masked_KW = torch.ones(2, 4, dtype=torch.bool)
    assert picked(Lookahead(1), close_KW, masked_KW) == 1
    assert picked(Lookahead(1), close_KW.bfloat16(), masked_KW) == 0


def test_creation_weighs_against_what_is_left() -> None:
    """Branch 0 is done, which counts as 1, but was created with less confidence than branch 1."""
    masked_KW = torch.tensor([[False, False], [True, False], [True, True]])
    confidence_KW, ids_KW = torch.full((3, 2), 0.6), torch.zeros(3, 2, dtype=torch.long)
    creation_K = torch.tensor([0.1, 0.9, 1.0])
    window, state = branches_of(masked_KW)
    state.memo[CREATION] = creation_K
    scores = Scores(ids_KW, confidence_KW, confidence_KW)
    found = (scores, window, state)
    winners = {alpha: winner_of(Lookahead(2, alpha), *found) for alpha in (0, 0.5, 1)}
    assert winners == {0: 0, 0.5: 2, 1: 2}
    state.memo[CREATION] = torch.tensor([0.1, 0.9, 0.2])
    assert winner_of(Lookahead(2, alpha=0.5), *found) == 1


CREDIT = Credit(NegEntropy(), alpha=1.0, beta=0.9)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_raw_confidence_of_a_plain_score_is_its_confidence(model, schedule) -> None:
    raw, fused = (
        generate(model, Lookahead(3, reads=reads), schedule=schedule) for reads in ("raw", "fused")
    )
    assert same(raw, fused)


def test_raw_and_fused_confidence_lead_different_ways(model) -> None:
    kept = replace(CREDIT, keep_raw=True)
    careful = {"select": Threshold(0.99), "schedule": Blocks(None)}
    fused = generate(model, Lookahead(3), score=kept, **careful)
    assert not same(fused, generate(model, Lookahead(3, reads="raw"), score=kept, **careful))
    assert same(fused, generate(model, Lookahead(3), score=CREDIT, **careful))


def test_raw_confidence_is_that_of_credit_without_weight(model) -> None:
    weightless = replace(CREDIT, alpha=0.0, keep_raw=True)
    raw = generate(model, Lookahead(3, reads="raw"), score=weightless)
    assert same(raw, generate(model, Lookahead(3)))


def test_ranking_and_vote_read_the_raw_confidence() -> None:
    fused_KW, raw_KW = (
        torch.tensor([[0.9, 0.1], [0.2, 0.1]]),
        torch.tensor([[0.1, 0.2], [0.3, 0.4]]),
    )
    scores = Scores(torch.ones(2, 2, dtype=torch.long), fused_KW, fused_KW, raw_KW)
    window, state = branches_of(torch.ones(2, 2, dtype=torch.bool))
    for reads, winner, first in (("fused", 0, 0), ("raw", 1, 1)):
        explore = Lookahead(1, reads=reads)
        assert winner_of(explore, scores, window, state) == winner
        base, created = torch.tensor(0), replace(explore, alpha=1.0)
        branches = created.spawn(state.pick(base), (scores.pick(base), window.pick(base)))
        assert branches.born_KL[0].tolist().index(0) == first
        assert branches.memo[CREATION][0] == max((fused_KW, raw_KW)[reads == "raw"][0])
