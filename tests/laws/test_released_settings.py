"""Settings that released code has and no decoder of `conf/` uses, against their definition."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import MASKED
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.numerics import keep_top_p
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import (
    Blocks,
    Confidence,
    Eos,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
    Union,
)
from dllm_bench.methods.dream import Epsilon, Sampled
from dllm_bench.methods.fast_dllm import Factor, Hierarchy
from dllm_bench.methods.learn2pd import EndOfTextPrediction, Filter
from tests.helpers import ROLES, Watched, canvases_of_trace
from tests.pieces import RandomHead, Table, opened

PROMPT = tuple(range(3, 19))  # 16 positions
MASK = ROLES["mask"]
BASE = MaskedDecoder(Confidence(), Threshold(0.6), Blocks(None), NoCache())


def decode(decoder: MaskedDecoder, new: int, model: Table | Watched | None = None) -> Generation:
    return decoder.generate(model or Table(), Request("released", PROMPT, new))


def watched(decoder: MaskedDecoder, new: int, seed: int = 0) -> tuple[Generation, list[list[int]]]:
    """Return what is decoded, and the canvas after every forward."""
    model = Watched(Table(seed))
    found = decode(decoder, new, model)
    return found, [*(c[0].tolist() for c in model.canvases[1:]), [*PROMPT, *found.ids]]


# --- selectors -----------------------------------------------------------------------------------


def chosen(select: Select, probability: list[float], forwards: int = 0) -> list[int]:
    """Return what a selector commits of one block; 0 is a committed position."""
    probability_KW = torch.tensor([probability], dtype=torch.float64)
    scores = Scores(torch.zeros_like(probability_KW).long(), probability_KW, probability_KW)
    state, window = opened(probability_KW > 0)
    state.forwards = forwards
    replace(BASE, select=select)._commit(state, scores, window)
    return [at for at, born in enumerate(state.born_KL[0].tolist()) if born == forwards]


def test_the_released_factor_is_its_published_loop() -> None:
    """Fast-dLLM's thresholds 1 - f / (n + 1), the first of which always holds; the last mask is
    committed with the others. A third of the positions is committed before.
    """
    numbers = torch.Generator().manual_seed(0)
    for case in range(200):
        size = 1 + case % 8
        probability = torch.rand(size, generator=numbers, dtype=torch.float64).sqrt().tolist()
        probability = [p * (at == 0 or (at + case) % 3 > 0) for at, p in enumerate(probability)]
        factor, ranked = 0.5 + case % 4 / 2, sorted(filter(None, probability), reverse=True)
        fails = [n for n in range(1, len(ranked)) if ranked[n] < 1 - factor / (n + 2)]
        count = fails[0] if fails and fails[0] < len(ranked) - 1 else len(ranked)
        found = [probability[i] for i in chosen(Factor(factor, released=True), probability)]
        assert sorted(found, reverse=True) == ranked[:count], (probability, factor)


@pytest.mark.parametrize("select", [Threshold(0.5), Hierarchy(0.5, 0.999)])
def test_a_falling_threshold_begins_at_one_and_stops_at_tau(select: Any) -> None:
    probability, falls = [0.97, 0.0, 0.55, 0.75, 0.0, 0.3], replace(select, fall=0.1)
    assert chosen(select, probability) == [0, 2, 3]
    falling = [chosen(falls, probability, forwards) for forwards in (0, 1, 3, 5, 50)]
    assert falling == [[0], [0], [0, 3], [0, 2, 3], [0, 2, 3]]


def learn2pd(new: int, steps: int, tau: float, cuts: bool) -> list[list[int]]:
    """Return the loop of Learn2PD's authors over blocks of 8: the canvas after every forward."""
    model, head, canvas, canvases = Table(), RandomHead(), [*PROMPT, *[MASK] * new], []
    for start in range(len(PROMPT), len(PROMPT) + new, head.block):
        block = range(start, start + head.block)
        masks, step = canvas[start : block.stop].count(MASK), 0
        while MASK in canvas[start : block.stop]:
            best, ids = distribution(model, canvas)
            read = best[start : block.stop] + [1.0] * (block.stop - len(canvas))  # of a cut block
            judged_P = head(torch.tensor(read)[None, None])[0, 0].sigmoid()
            masked = [at for at, token in enumerate(canvas) if token == MASK]
            accepted = [at for at in block if at in masked and judged_P[at - start] > tau]
            confidence = torch.full((len(canvas),), -torch.inf)
            for at in set(masked) & set(block):
                confidence[at] = best[at]
            count = masks // steps + (step < masks % steps)
            chosen = {*accepted, *confidence.topk(count).indices.tolist()} & {*masked}
            canvas, step = [ids[i] if i in chosen else t for i, t in enumerate(canvas)], step + 1
            ends = [at for at in masked if ids[at] == ROLES["eos"]]
            if cuts and ends:
                sure = [at for at in accepted if at in ends] or [max(ends, key=best.__getitem__)]
                canvas = canvas[: sure[0] + 1]
            canvases.append(canvas)
    return canvases


@pytest.mark.parametrize(("steps", "cuts"), [(2, False), (3, False), (2, True), (3, True)])
def test_learn2pds_top_k_reaches_masks_behind_the_block_as_released(steps: int, cuts: bool) -> None:
    stop = EndOfTextPrediction() if cuts else Filled()
    topk, learned = TopK(steps, released=True), Filter(RandomHead(), 0.6)
    decoder = replace(BASE, select=Union(learned, topk), schedule=Blocks(8), stop=stop)
    found, canvases = watched(decoder, 48)
    assert canvases == learn2pd(48, steps, 0.6, cuts)
    early = [(min(found.born[at:]), max(found.born[:at])) for at in range(8, len(found.born), 8)]
    assert any(first < last for first, last in early), "a later block is begun"
    assert decode(replace(decoder, select=Union(learned, TopK(steps))), 48).born != found.born


def dream(new: int, steps: int, top_p: float, seed: int) -> list[list[int]]:
    """Dream's published sampler by entropy, without temperature: the canvas after every forward."""
    model, canvas, canvases = Table(seed), [*PROMPT, *[MASK] * new], []
    time = torch.linspace(1, 1e-3, steps + 1)
    for step in range(steps):
        logits_LV = logits_of(model, canvas)
        sorted_LV, order_LV = torch.sort(logits_LV, descending=True)
        removed_LV = (sorted_LV.softmax(-1).cumsum(-1) > top_p).roll(1, -1)
        removed_LV[:, 0] = False
        logits_LV[removed_LV.scatter(-1, order_LV, removed_LV)] = torch.finfo(torch.float32).min
        p_LV = logits_LV.softmax(-1)
        entropy_L, ids = (p_LV * (p_LV + 1e-10).log()).sum(-1), p_LV.argmax(-1).tolist()
        masked = torch.tensor([canvas]) == MASK
        share = 1 - time[step + 1] / time[step] if step < steps - 1 else 1
        confidence_1L = torch.where(masked, entropy_L, -torch.inf)
        chosen = confidence_1L.topk(int(masked.sum() * share)).indices[0].tolist()
        canvas = [ids[i] if i in chosen else token for i, token in enumerate(canvas)]
        canvases.append(canvas)
    return canvases


def test_equal_entropies_after_a_top_p_cut_rank_as_torch_topk_does_over_the_canvas() -> None:
    """Where one token is left, the entropy is 0; in the order of positions other texts come out."""
    score, stable = Sampled(NegEntropy(eps=1e-10), 0.0, 0.2, released_ties=True), 0
    for seed in range(12):
        new, steps = (24, 12) if seed % 2 else (40, 20)
        wanted = dream(new, steps, 0.2, seed)
        for ties in ("canvas", "lower"):
            select = Epsilon(steps, idle=True, ties=ties)
            _, canvases = watched(replace(BASE, score=score, select=select), new, seed)
            equal = canvases == wanted
            assert equal or ties == "lower"
            stable += equal and ties == "lower"
    assert stable < 12


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_released_ties_at_a_top_p_cut_are_those_of_a_published_loop(dtype: torch.dtype) -> None:
    """Dream's top_p_logits: in the order of torch.sort, up to the sum and one more."""
    numbers = torch.Generator().manual_seed(0)
    logits_1WV = torch.randint(0, 6, (1, 6, 300), generator=numbers).to(dtype)
    kept = [keep_top_p(logits_1WV, 0.9, ties)[0] > -torch.inf for ties in (True, False)]
    for logits_V, kept_V in zip(logits_1WV[0], kept[0], strict=True):
        ordered = torch.sort(logits_V, descending=True)
        before = (ordered.values.softmax(-1).cumsum(-1) > 0.9).tolist().index(True)
        assert sorted(ordered.indices[: before + 1].tolist()) == kept_V.nonzero()[:, 0].tolist()
    if dtype == torch.bfloat16:  # sums differ too; in float32, a stable torch.sort has our order
        assert not torch.equal(*kept)
    cuts = [Sampled(top_p=0.9, released_ties=ties)._cut(logits_1WV)[0] for ties in (True, False)]
    assert all(torch.equal(cut > -torch.inf, own) for cut, own in zip(cuts, kept, strict=True))


# --- schedules -----------------------------------------------------------------------------------


def test_forty_tokens_in_blocks_of_sixteen_end_with_a_block_of_eight() -> None:
    """For a prompt of whole blocks this is the grid of absolute blocks, whose last may be short."""
    short = decode(replace(BASE, schedule=Blocks(16, short=True)), 40)
    absolute = decode(replace(BASE, schedule=Blocks(16, absolute=True)), 40)
    assert (short.ids, short.born) == (absolute.ids, absolute.born)
    blocks = [short.born[at : at + 16] for at in (0, 16, 32)]
    assert [len(block) for block in blocks] == [16, 16, 8]
    assert max(blocks[0]) < min(blocks[1]) and max(blocks[1]) < min(blocks[2])


def test_the_pipeline_makes_as_many_whole_blocks_as_fit() -> None:
    pipeline = Pipeline(12, 0.5, 0.9, floor=True)
    assert Pipeline(48, 0.1, 0.95, floor=True).grid(100, 256).length == 340
    found, whole = (decode(replace(BASE, schedule=pipeline), new) for new in (32, 24))
    assert (found.ids, found.born, len(found.ids)) == (whole.ids, whole.born, 24)
    with pytest.raises(DllmBenchError, match="A block of 12 does not divide"):
        decode(replace(BASE, schedule=pipeline), 11)


# --- stop rules ----------------------------------------------------------------------------------


def test_an_end_token_of_the_prompt_counts_where_released_loops_look_for_it() -> None:
    ended = Request("released", (ROLES["eos"], *PROMPT[1:]), 24)
    plain, early = Table(), Table()
    plain.place[:, ROLES["eos"]], early.place[:, ROLES["eos"]] = -99.0, 99.0
    decoder = replace(BASE, schedule=Blocks(8))

    def born(stop: Eos, model: Table, request: Request) -> tuple[int, ...]:
        return replace(decoder, stop=stop).generate(model, request).born

    clean = Request("released", PROMPT, 24)
    for prompt, length in ((True, 8), (False, 24)):  # ReMDM's decodes the first block alone
        closes = Eos(turn_end=False, prompt=prompt)
        assert (len(born(closes, plain, ended)), len(born(closes, plain, clean))) == (length, 24)
    writes = Eos("write", turn_end=False)
    everything = replace(decoder, stop=Filled()).generate(early, ended).born
    assert born(replace(writes, prompt=True), early, ended) == everything
    for stop, request in ((writes, ended), (replace(writes, prompt=True), clean)):
        assert MASKED in born(stop, early, request) or len(born(stop, early, request)) < 24


# --- lookahead -----------------------------------------------------------------------------------


def restated(new: int, k: int, tau: float) -> list[list[int]]:
    """LoPA's released loop, the base in no competition: the canvas after each round of a block."""
    model, canvas, canvases = Table(), [*PROMPT, *[MASK] * new], []
    branches = [canvas]
    while MASK in canvas:
        probability = [distribution(model, branch) for branch in branches]
        rating = [
            fmean([p for p, token in zip(best, branch, strict=True) if token == MASK] or [1.0])
            for (best, _), branch in zip(probability, branches, strict=True)
        ]
        winner = rating.index(max(rating))
        canvas, (best, ids) = branches[winner], probability[winner]
        masked = [at for at, token in enumerate(canvas) if token == MASK]
        surest = sorted(masked, key=lambda at: -best[at])
        fill = [at for at in masked if best[at] > tau] or surest[:1]
        canvas = [ids[at] if at in fill else token for at, token in enumerate(canvas)]
        canvases.append(canvas)
        ahead = [at for at in surest if at not in fill][:k]
        branches = [[ids[i] if i == at else t for i, t in enumerate(canvas)] for at in ahead]
        branches = branches or [canvas]
    return canvases


def logits_of(model: Table, canvas: list[int]) -> Tensor:
    """Return logits of every position, the mask token left out, (L, V)."""
    logits_LV = model.place[: len(canvas)] + model.token[torch.tensor(canvas)].mean(0)
    logits_LV[:, MASK] = -torch.inf
    return logits_LV


def distribution(model: Table, canvas: list[int]) -> tuple[list[float], list[int]]:
    """Largest probability and token of every position, the mask token left out."""
    best: Tensor = logits_of(model, canvas).softmax(-1).max(-1)
    return best.values.tolist(), best.indices.tolist()


@pytest.mark.parametrize("k", [1, 3])
def test_lookahead_without_a_competing_base_is_the_released_loop(k: int) -> None:
    """A lookahead token is of the round that took its branch."""
    usual = replace(BASE, select=Threshold(0.6, strict=True), explore=Lookahead(k))
    released = replace(usual, explore=Lookahead(k, base_competes=False))
    found, other = (
        canvases_of_trace(decode(one, 24), PROMPT, MASK)[1:] for one in (released, usual)
    )
    assert found == restated(24, k, 0.6) != other
