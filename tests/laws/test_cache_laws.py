"""Laws of the caches that renew their K/V: what is fed and read adds up, clocks keep their word,
and the measured error of an exact cache is 0.

The trace is compared with what the model saw; renewals with the clocks written down a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dllm_bench.api.compose import compose
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Round, Scores, Select
from dllm_bench.core.decoder import Condition
from dllm_bench.core.denoiser import ForwardPlan, PositionSets
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.launch.local import run as make_run
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, CausalCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import Best, Blocks, Confidence, Pipeline, Threshold, TopK
from dllm_bench.methods.fast_dllm import VicinityCache
from dllm_bench.methods.position_caches import (
    NEXT,
    D2Cache,
    DKVCache,
    DKVGreedyCache,
    DPadCache,
    Drawn,
    SparseCache,
    density,
)
from dllm_bench.methods.row_caches import DLLMCache, MostChanged
from dllm_bench.metrics.sample_stats import NO_TIME
from dllm_bench.models.acceleration import CompiledDenoiser, FixedShapeDenoiser
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.kv import PositionCache
from dllm_bench.paths import assets_dir
from dllm_bench.runs.progress import summary
from dllm_bench.runs.sessions import MeasuredDenoiser, check_measured, kl
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_samples
from tests.helpers import (
    HEADS,
    LAYERS,
    WIDTH,
    Watched,
    load_denoiser,
    noting,
    tiny_denoiser,
    with_method,
)
from tests.pieces import CutAt, Table, decoders
from tests.tiers import covering

BLOCK, NEW = 8, 24
REQUEST = Request("cache", tuple(range(3, 14)), NEW)
BASE = MaskedDecoder(Confidence(), Threshold(0.3), Blocks(BLOCK), NoCache())
RENEWING = (PrefixCache, DualCache, VicinityCache)
AFTER_PROMPT = Blocks(BLOCK)
ABSOLUTE, CAUSAL = Blocks(BLOCK, absolute=True), Blocks(BLOCK, sees_future=False)
SCHEDULES = (AFTER_PROMPT, ABSOLUTE, CAUSAL, Pipeline(BLOCK, 0.1, 0.5))
INNER = (NoCache(), PrefixCache(), DualCache())
NEAR, BY_REQUEST = VicinityCache(before=3, after=20, warmup=2), DualCache(3, clock="request")
CACHES = (NoCache(), BlockCache("full"), PrefixCache(), PrefixCache(2), BY_REQUEST, NEAR)
ALL_ROWS = (DLLMCache(1, 1), DLLMCache(prompt_every=1, every=99, share=1.0))
RENEWED = (*(kind(every=1) for kind in (*RENEWING, DKVCache)), *ALL_ROWS)
GREEDY = replace(BASE, select=Drawn(), cache=DKVGreedyCache(every=3, window=2))
D2 = replace(BASE, select=Best(1), cache=D2Cache(current=3, rollout=0.2, inflate=2))
ORDERED = replace(BASE, select=Drawn(3))
AHEAD = replace(BASE, explore=Lookahead(3))
EVERYTHING = ({"law": "uniform", "number": NEW}, {"window": NEW, "sigma": 0.1, "scale": 9.0})
EQUAL = [  # a decoder, and another cache that changes nothing
    *((replace(BASE, schedule=one), cache) for one, cache in product(SCHEDULES, RENEWED)),
    *((replace(ORDERED, schedule=one), DKVGreedyCache(every=1)) for one in SCHEDULES[:3]),
    *((replace(BASE, schedule=one), D2Cache(rollout=2.0)) for one in SCHEDULES[:3]),
    *(
        (replace(AHEAD, schedule=one), kind(every=1))
        for one, kind in product(SCHEDULES[::3], (PrefixCache, DualCache))
    ),
    *(
        (replace(decoder, schedule=one, cache=NoCache("block_causal")), BlockCache("block_causal"))
        for one, decoder in product(SCHEDULES, (BASE, AHEAD))
    ),
    (BASE, VicinityCache(warmup=NEW)),
    (BASE, VicinityCache(before=99, after=99)),
    (replace(BASE, cache=DualCache()), VicinityCache(before=0, after=0, warmup=0)),
    (replace(BASE, select=TopK(steps=2)), SparseCache()),
    *(
        (replace(BASE, cache=inner), DPadCache(inner, **settings))
        for inner, settings in product(INNER, EVERYTHING)
    ),
]


class CacheReads(Watched):
    """A model that also keeps how many positions each forward read of the cache."""

    def __init__(self) -> None:
        super().__init__(Table())
        self.cached: list[int] = []

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv) -> Tensor:
        logits_KRV = super().forward(tokens_KL, plan, kv)
        self.cached.append(sum(stop - start for start, stop in kv.spans))
        return logits_KRV


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("explore", [Greedy(), Lookahead(3)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_fed_and_cached_add_up_to_what_is_visible(cache, explore, schedule) -> None:
    model, whole = CacheReads(), getattr(schedule, "sees_future", False)
    decoder = replace(BASE, schedule=schedule, explore=explore, cache=cache)
    forwards = decoder.generate(model, REQUEST).trace.forwards
    seen = zip(forwards, model.plans, model.cached, model.canvases, strict=True)
    for forward, plan, cached, canvas_KL in seen:
        assert (forward.fed, forward.cached) == (plan.fed, cached)
        assert plan.fed + cached == (canvas_KL.shape[1] if whole else plan.rows[1])


@pytest.mark.parametrize(("plain", "cache"), EQUAL, ids=lambda one: type(one).__name__)
def test_a_cache_that_leaves_nothing_out_changes_nothing(model, plain, cache) -> None:
    """It is renewed in every forward, feeds everything, or drops nothing of its inner cache."""
    assert text(model, replace(plain, cache=cache)) == text(model, plain)


def text(model, decoder: MaskedDecoder, request: Request = REQUEST) -> tuple[object, ...]:
    generation = decoder.generate(model, request)
    return generation.ids, generation.born


def test_caches_that_leave_something_out_are_approximate(model) -> None:
    """Otherwise the law above says nothing."""
    vicinity, dkv = VicinityCache(before=2, after=2, warmup=0), DKVCache(every=99, first=1)
    rows = DLLMCache(prompt_every=99, every=99)
    for cache in (PrefixCache(), DualCache(), vicinity, dkv, rows, D2.cache):
        assert text(model, replace(BASE, cache=cache)) != text(model, BASE)
    for select, cache in ((Drawn(), DKVGreedyCache(8, window=0)), (TopK(), SparseCache())):
        plain = replace(BASE, select=select)
        assert text(model, replace(plain, cache=cache)) != text(model, plain)


def test_nothing_is_read_behind_the_end_of_a_canvas_that_was_cut(model) -> None:
    watched = Watched(model)
    decoder = replace(BASE, select=TopK(), cache=SparseCache(), stop=CutAt(11 + BLOCK))
    decoder.generate(watched, REQUEST)
    lengths = [canvas_KL.shape[1] for canvas_KL in watched.canvases]
    read = [[] if p.sets is None else p.sets.read_C.flatten().tolist() for p in watched.plans]
    assert lengths[1] > lengths[2] and any(read[2:])
    assert all(max(ids, default=0) < one for ids, one in zip(read, lengths, strict=True))


def letters(decoder: MaskedDecoder, cache: Cache, request: Request = REQUEST) -> str:
    """Return one letter per forward: R renews, d does not."""
    trace = replace(decoder, cache=cache).generate(Table(), request).trace
    return "".join("d" if f.kind is ForwardKind.DENOISE else "R" for f in trace.forwards)


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_dpad_draws_once_a_block_and_dropped_positions_do_not_exist(model, inner) -> None:
    watched, cache = Watched(model), DPadCache(inner, law="uniform", window=6, number=3)
    replace(BASE, cache=cache).generate(watched, REQUEST)
    exists: dict[int, set[int]] = {}
    for plan in watched.plans:
        start, stop = plan.rows
        seen = {*plan.sets.feed_F.tolist(), *plan.sets.read_C.tolist()}
        assert seen == exists.setdefault(start, seen)
        behind = {p for p in seen if p >= stop}
        assert seen - behind == set(range(stop))
        assert len(behind) == min(3, plan.feed[1] - stop) or plan.feed[1] == stop
        assert all(p < stop + 6 for p in behind)


def test_bytes_are_those_of_what_is_kept_and_read(model) -> None:
    config, total = model.module.config, len(REQUEST.prompt_ids) + NEW
    kv = 2 * config.num_key_value_heads * (WIDTH // HEADS) * 4
    for cache in (NoCache(), PrefixCache(), DualCache(), DKVCache(every=5), SparseCache()):
        trace = replace(BASE, select=TopK(), cache=cache).generate(model, REQUEST).trace
        assert all(f.read_bytes == LAYERS * kv * f.cached for f in trace.forwards)
        most = max(f.kept_bytes for f in trace.forwards)
        kept = {NoCache: 0, PrefixCache: total - BLOCK, DKVCache: total - 1 - model.shifted}
        assert most == LAYERS * kv * kept.get(type(cache), total)
    cache = DLLMCache(prompt_every=99, every=99, share=0.5)
    first, second, *_ = replace(BASE, cache=cache).generate(model, REQUEST).trace.forwards
    assert first.kept_bytes == second.kept_bytes == LAYERS * total * (kv + 2 * WIDTH * 4)
    assert (first.rows, first.read_bytes) == (total, 0)
    assert second.rows == pytest.approx((total + (LAYERS - 1) * NEW // 2) / LAYERS)
    skipped = total - NEW // 2
    later = skipped * (kv // 2 + 2 * WIDTH * 4) + total * kv // 2
    assert second.read_bytes == (LAYERS - 1) * later


@pytest.mark.parametrize("layout", [name for name, one in ADAPTERS.items() if one.plain_layers])
def test_layers_run_by_their_parts_are_the_layers(layout) -> None:
    """Every layout that says so, with the attention and the logits of its own."""
    model, tokens_1L = tiny_denoiser(layout, seed=2), torch.tensor([[*range(3, 30)]])
    model.attention_form, span = "full", (0, 27)
    plain = ForwardPlan(ForwardKind.DENOISE, span, (4, 27), (0, 0))
    rule = MostChanged(10, 27, renews_prompt=True, renews_response=True, share=0.5)
    first = replace(plain, store=span, recompute=rule)
    wanted = model.forward(tokens_1L, plain, model.new_cache(27))
    kv = model.new_cache(27)
    for plan in (first, replace(first, recompute=replace(rule, renews_response=False, share=1.0))):
        found = model.forward(tokens_1L, plan, kv)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        kv.keep(plan, torch.tensor(0))
    assert kv.length == 27


def test_layers_of_another_form_do_not_choose_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    model = tiny_denoiser("llada", seed=1)
    compiled = CompiledDenoiser(model.module, model.special, False)
    model.chooses_rows = compiled.chooses_rows or ADAPTERS["gemma4"].plain_layers
    with pytest.raises(DllmBenchError, match="layers that choose the rows they compute"):
        replace(BASE, cache=DLLMCache()).generate(model, REQUEST)


def rounds_of_dinfer(masks: Sequence[int], every: int) -> str:
    """dInfer's rounds, one token a forward: a renewal where due, then a forward over the window."""
    rounds, expected = 0, ""
    for count in masks:
        block = ""
        while len(block) < count:
            due = rounds % every == 0 or not block
            block += "Rd" if due else "d"
            rounds += 1
        expected += block[:count]
    return expected


@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("kind", [PrefixCache, DualCache])
def test_a_clock_counts_rounds_of_the_request_or_forwards_of_a_block(kind, every) -> None:
    """The first absolute block begins at position 0, with the prompt's 5 tokens."""
    request = Request("short", (3, 4, 5, 6, 7), NEW)
    for absolute, masks in ((False, [BLOCK] * 3), (True, [BLOCK - 5, BLOCK, BLOCK, 5])):
        decoder = replace(BASE, select=TopK(), schedule=Blocks(BLOCK, absolute=absolute))
        by_request, by_block = kind(every=every, clock="request"), kind(every=every)
        assert letters(decoder, by_request, request) == rounds_of_dinfer(masks, every)
        expected = "".join("d" if i % every else "R" for count in masks for i in range(count))
        assert letters(decoder, by_block, request) == expected


def test_a_round_whose_renewal_fills_the_block_counts() -> None:
    """Round 0 is the first block, so that the second begins with round 1 and renews at 2 and 4."""

    def first_at_once(self: Select, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return window.eligible_KW & (state.forwards == 0)

    at_once = replace(BASE, select=with_method(BASE.select, "__call__", first_at_once))
    assert letters(at_once, PrefixCache(every=2, clock="request")) == "R" + "RdRddRdd" + "RddRddRd"


DKV = replace(BASE, cache=DKVCache(every=5, first=1))


READING = [*product(SCHEDULES[:3], (DKV, GREEDY, D2)), (SCHEDULES[3], DKV)]


@pytest.mark.parametrize(("schedule", "decoder"), READING)
def test_what_is_read_was_stored_for_the_token_that_stands_there(model, schedule, decoder) -> None:
    """dKV-Cache reads no masks. The others read them as masks, and feed a decoded token as itself
    before it is read.
    """
    watched, reads_masks = Watched(model), decoder is not DKV
    replace(decoder, schedule=schedule).generate(watched, REQUEST)
    stored: dict[int, int] = {}
    for canvas_KL, plan in zip(watched.canvases, watched.plans, strict=True):
        tokens = dict(enumerate(canvas_KL[0].tolist()))
        fed = plan.positions(model.device).tolist()
        read = [] if plan.sets is None else plan.sets.read_C.tolist()
        assert sorted(fed + read) == list(range(plan.feed[1]))
        assert all(stored[p] == tokens[p] for p in read)
        assert reads_masks or all(tokens[p] != model.special.mask for p in read)
        stored |= {p: tokens[p] for p in (fed if plan.sets is None else plan.sets.store_S.tolist())}


def test_a_d2_cache_commits_no_mask_that_it_has_not_fed(model) -> None:
    """Not even where any probability will do; as released it does."""
    for released in (False, True):
        watched, cache = Watched(model), replace(D2.cache, released=released)
        generation = replace(D2, select=Threshold(1e-3), cache=cache).generate(watched, REQUEST)
        fed = [set(plan.positions(model.device).tolist()) for plan in watched.plans]
        rows = [11 + place - int(model.shifted) for place in range(NEW)]
        own = [row in fed[born] for row, born in zip(rows, generation.born, strict=True)]
        assert all(own) != released


def released_rows(mass: list[float], taken: list[int], last: int, share: float) -> set[int]:
    """Restate the released choice for shifted logits: rows that predict what was taken but for the
    prompt's last row, a nucleus of all others, and then that row by what it predicts."""
    own = {position - 1 for position in taken if position > last + 1}
    pool = sorted((row for row in range(len(mass)) if row not in own), key=lambda r: -mass[r])
    total, kept, reached = sum(mass[row] for row in pool), set[int](), 0.0
    for row in pool:
        reached += mass[row] / total
        if kept and reached > share:
            break
        kept.add(row)
    return (own | kept) - {last} | ({last} if last + 1 in taken else set())


def test_the_prompts_last_row_competes_in_a_released_d2_cache_and_is_overwritten() -> None:
    numbers, length, last = torch.Generator().manual_seed(0), 12, 3
    other = 0
    for _ in range(40):
        state = DecodeState.start(Request("r", (5,) * (last + 1), 8), Table().special)
        kv, every_L = PositionCache(1, length), torch.arange(length)
        sets = PositionSets(every_L, every_L[:0], every_L)
        feed = (0, length)
        kv.kept = ForwardPlan(ForwardKind.PREFILL, feed, feed, feed, "full", sets=sets)
        kv.probes = [torch.rand(length, length, generator=numbers).pow(4)]
        mass = (kv.probes[0].sum(0) / 2 + 0.5).tolist()
        confidence_1W = torch.rand(1, 8, generator=numbers)
        scores = Scores(confidence_1W.long(), confidence_1W, confidence_1W, raw_KW=confidence_1W)
        window = Window(last + 1, length, length, 8, last + 1, state.masked_KL[:, 4:])
        cache = D2Cache(current=2, rollout=0.35, released=True)
        round = Round(REQUEST, state, kv, Table(), None)
        round.window, round.scores = window, scores
        round.logits_KXV = torch.zeros(1, length, 1)[:, : length - last - 1]
        round.plan = replace(kv.kept, rows=(last + 1, length))
        cache.on_commit(round)
        rated = confidence_1W * density(state, cache.sigma)[:, 4:]
        taken = (rated[0].topk(2).indices + last + 1).tolist()
        fed = {row for row, bits in enumerate(state.memo[NEXT][0].tolist()) if bits % 2}
        assert fed == released_rows(mass, taken, last, cache.rollout)
        replace(cache, released=False).on_commit(round)
        other += fed != {row for row, bits in enumerate(state.memo[NEXT][0].tolist()) if bits % 2}
    assert other


def test_a_generation_says_after_how_many_rounds_its_cache_is_renewed(model) -> None:
    by_rounds, by_forwards = DualCache(every=2, clock="request"), DualCache(every=2)
    decoders = (replace(BASE, cache=cache) for cache in (by_rounds, by_forwards, NoCache()))
    assert [one.generate(model, REQUEST).renewal_rounds for one in decoders] == [2, None, None]


# --- prompts whose beginning an earlier request has fed -------------------------------------------

SHOTS = tuple(range(3, 21))
PROMPTS = {  # request -> positions it shares with the one before
    "first": ((*SHOTS, 7, 9, 11), 0),
    "second": ((*SHOTS, 8, 9), 18),
    "same": ((*SHOTS, 8, 9), 19),  # one position is fed for the first prediction
    "other": ((4, *SHOTS), 0),
}
REQUESTS = [Request(name, ids, 8, seed=1) for name, (ids, _) in PROMPTS.items()]


def decoder(cache: CausalCache | BlockCache, block: int) -> MaskedDecoder:
    if isinstance(cache, CausalCache):
        return MaskedDecoder(Confidence(), TopK(1), Blocks(1, sees_future=False), cache)
    schedule = Blocks(block, sees_future=False, absolute=True, whole=True)
    return replace(BASE, schedule=schedule, cache=cache)


def run(layout: str, decoder: MaskedDecoder, batch: int = 1) -> dict[str, Generation]:
    model = tiny_denoiser(layout, seed=1)
    return {g.request_id: g for g in decoder.generate_stream(model, REQUESTS, batch)}


BLOCKWISE = (("sdar", 4), ("llada2", 8), ("fast_dllm_v2", 8))
EXACT_REUSE = [("qwen3", CausalCache, 1), *((name, BlockCache, size) for name, size in BLOCKWISE)]


@pytest.mark.parametrize(("layout", "kind", "block"), EXACT_REUSE)
@pytest.mark.parametrize("batch", [1, 2])
def test_exact_reuse_changes_nothing_but_what_is_fed(layout, kind, block, batch) -> None:
    plain = run(layout, decoder(kind(), block))
    reused = run(layout, decoder(kind(reuse="exact"), block), batch)
    for name, (ids, shared) in PROMPTS.items():
        assert reused[name].ids == plain[name].ids
        assert reused[name].born == plain[name].born
        first, whole = (found[name].trace.forwards[0] for found in (reused, plain))
        assert first.kind == whole.kind
        assert first.cached + first.fed == whole.fed
        if batch == 1:
            if layout == "fast_dllm_v2":  # shifted: a position before the window is fed
                shared = min(shared, len(ids) // block * block - 1)
            assert first.cached == shared // block * block, (name, len(ids))


def test_approximate_reuse_feeds_less_of_a_prompt_that_is_one_block() -> None:
    plain = replace(BASE, schedule=Pipeline(4, tau_add=1.0, tau_act=1.0), cache=BlockCache())
    decoder = replace(plain, cache=BlockCache(reuse="approximate"))
    whole, reused = run("dream", plain), run("dream", decoder)
    assert reused["first"].ids == whole["first"].ids
    assert [reused[name].trace.forwards[0].cached for name in PROMPTS] == [0, 18, 19, 0]
    with pytest.raises(DllmBenchError, match="one request at a time, which batch 2 does not give"):
        decoder.generate_stream(tiny_denoiser("dream", seed=1), [], 2)


def test_nothing_is_taken_from_another_decoder() -> None:
    """Keys and values of one model under blocks of another length are others."""
    model, cache = tiny_denoiser("sdar", seed=1), BlockCache(reuse="exact")
    for block in (4, 8, 4):
        (found,) = decoder(cache, block).generate_stream(model, REQUESTS[1:2], 1)
        assert found.trace.forwards[0].cached == 0


# --- the measured error: exact caches have none, and measuring changes no token -------------------


EXACT = 1e-6  # nats
FULL = {n: one for n, one in decoders().items() if one.summary().attention == "full"}
CACHED = {
    name: one
    for name, one in FULL.items()
    if Condition.NO_CACHE not in one.cache.gives and not one.smoothing
}


def measured(decoder: MaskedDecoder, model: Any, request: Request = REQUEST) -> MeasuredDenoiser:
    found = MeasuredDenoiser(model)
    own, plain = decoder.generate(cast("Any", found), request), decoder.generate(model, request)
    assert (own.ids, own.born, len(own.trace)) == (plain.ids, plain.born, len(plain.trace))
    assert found.rows > 0
    return found


EXACT_CACHES = [NoCache(), *RENEWED]
APPROXIMATE = [PrefixCache(), DualCache(), BlockCache("full")]  # with full attention


@pytest.mark.parametrize("cache", [*EXACT_CACHES, *APPROXIMATE], ids=str)
def test_a_cache_that_is_not_renewed_at_every_forward_has_an_error(model, cache) -> None:
    found = measured(replace(BASE, cache=cache), model)
    nats = found.nats / found.rows
    assert nats < EXACT if cache in EXACT_CACHES else nats > 1e-4


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada2"])
def test_the_block_cache_of_a_block_causal_model_has_no_error(name: str) -> None:
    blocks = Blocks(4, absolute=True, sees_future=False)
    decoder = replace(BASE, cache=BlockCache(), schedule=blocks)
    request = replace(REQUEST, prompt_ids=tuple(range(30, 41)))
    found = measured(decoder, load_denoiser(assets_dir() / name), request)
    assert found.nats / found.rows < EXACT


def test_the_branches_of_a_lookahead_are_measured_each(model) -> None:
    model = FixedShapeDenoiser(model.module, model.special, model.shifted)  # one place for all K/V
    found = measured(replace(BASE, cache=BlockCache(), explore=Lookahead(3)), model)
    assert found.rows > measured(replace(BASE, cache=BlockCache()), model).rows
    assert found.nats / found.rows < EXACT


@pytest.mark.parametrize("name", covering(2, sorted(CACHED)))
def test_what_is_compared_is_the_forward_of_no_cache(name: str) -> None:
    """Of every decoder with a cache and full attention: what is fed, seen and read."""
    decoder, made = CACHED[name], list[ForwardPlan]()
    cache, planned = noting(decoder.cache, "plan", NoCache().plan)
    model = tiny_denoiser("llada", seed=1)
    forward = model.forward
    model.forward = lambda *asked: made.append(asked[1]) or forward(*asked)
    replace(decoder, cache=cache).generate(cast("Any", MeasuredDenoiser(model)), REQUEST)
    made = made[::2]  # every second forward is the uncached one
    assert [*map(view, made)] == [view(uncached) for uncached, _ in planned]
    assert not any(plan.stores or plan.sets or plan.probe or plan.recompute for plan in made)


def view(plan: ForwardPlan) -> tuple[object, ...]:
    return plan.feed, plan.rows[0], plan.attention


def test_the_divergence_is_the_written_out_sum() -> None:
    exact_MV, cached_MV = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    p_MV, q_MV = exact_MV.double().softmax(-1), cached_MV.double().softmax(-1)
    wanted_M = (p_MV * (p_MV / q_MV).log()).sum(-1)
    torch.testing.assert_close(kl(exact_MV, cached_MV).double(), wanted_M, atol=1e-6, rtol=0)
    impossible = torch.full((5, 1), -torch.inf)
    both = kl(torch.cat([exact_MV, impossible], 1), torch.cat([cached_MV, impossible], 1))
    torch.testing.assert_close(both, kl(exact_MV, cached_MV))


def spec(*overrides: str) -> RunSpec:
    settings = ["model=tiny-llada", "benchmark=minigsm", "decoder=fast_dllm", "limit=2"]
    return RunSpec.from_config(compose([*settings, "decoder/cache=dual", *overrides]))


def test_a_measured_run_has_the_samples_of_the_run_and_no_times(tmp_path: Path) -> None:
    store, specs = Store(tmp_path), [spec(), spec("measure_kl=true")]
    plain, record = (make_run(one, store=store) for one in specs)
    stored = (read_samples(store.path(one)).values() for one in specs)
    texts, measured_texts = ([(one.ids, one.born, one.text) for one in each] for each in stored)
    assert measured_texts == texts
    assert record.columns["forwards"] == plain.columns["forwards"]
    assert record.columns["seconds"] == [None, None]
    assert "kl_rows" not in plain.columns
    assert plain.summary["quality/kl_to_uncached"] is None
    mean = sum(record.columns["kl_nats"]) / sum(record.columns["kl_rows"])
    assert record.summary["quality/kl_to_uncached"] == pytest.approx(mean)
    assert 0 < mean < 1
    assert f"left empty: {NO_TIME}" in summary(record)


REFUSED = {
    "batch=2": "batch=2",
    "hardware=cpu-bp2": "in one process",
    "decoder@baseline=vanilla": "leave out decoder@baseline",
    "decoder=dinfer decoder.smoothing=0.3": "decoder.smoothing=0",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_be_measured_is_refused(overrides: str) -> None:
    with pytest.raises(DllmBenchError, match=REFUSED[overrides]):
        check_measured(spec("measure_kl=true", *overrides.split()))
