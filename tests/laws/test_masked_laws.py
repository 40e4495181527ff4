"""Laws of masked decoding, alone and in batches, on tiny random models of every layout.

Random weights make confidences spread over (0, 1), so every branch of the pieces is taken. Batched
and unbatched decoding are the same: tokens, the forwards that committed them and the facts of every
forward. What holds for any pieces is in `test_product`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_bench.core.request import Request
from dllm_bench.core.state import MASKED
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import LARGE, MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, CausalCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import (
    Best,
    Blocks,
    Budget,
    Confidence,
    Eos,
    Margin,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
    Union,
)
from dllm_bench.methods.dream import Epsilon
from dllm_bench.methods.fast_dllm import (
    Factor,
    HierarchicalCache,
    Hierarchy,
    Ration,
    SubBlocks,
    VicinityCache,
)
from dllm_bench.methods.history import Credit
from dllm_bench.methods.position_caches import DPadCache, SparseCache
from dllm_bench.models.acceleration import CompiledDenoiser
from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import ROLES, Watched, facts, tiny_denoiser
from tests.pieces import CutAt, decoders, needs_unshifted
from tests.tiers import covering

REQUESTS = [Request("short", (5, 9, 2), 24), Request("long", tuple(range(3, 26)), 32)]
BASE = MaskedDecoder(Confidence(), Threshold(0.3), Blocks(8), NoCache())


def test_a_summary_says_one_token_per_forward_of_one_block_and_branch() -> None:
    one = replace(BASE, select=Best(1), schedule=Blocks(8))
    several = [replace(one, schedule=Pipeline(8, 0.1, 0.5)), replace(one, explore=Lookahead(1))]
    assert [x.summary().one_token_per_forward for x in (one, *several)] == [True, False, False]


@pytest.mark.parametrize("explore", [Greedy(), Lookahead(3)], ids=["greedy", "lookahead"])
def test_a_budget_is_kept(model, explore) -> None:
    decoder = replace(BASE, select=Threshold(1.0, strict=True), explore=explore, stop=Budget(5))
    generation = decoder.generate(model, REQUESTS[1])
    assert len(generation.trace) == 5 and sum(born != MASKED for born in generation.born) >= 5


class OnlyMasks(Watched):
    def forward(self, tokens_KL, plan, kv):
        logits_KWV = super().forward(tokens_KL, plan, kv)
        return logits_KWV.index_fill(-1, torch.tensor(self.special.mask), 100.0)


def test_forbidding_the_mask_token_keeps_decoding_alive(model) -> None:
    found, wanted = (BASE.generate(m, REQUESTS[1]) for m in (OnlyMasks(model), model))
    assert found.ids == wanted.ids


# --- in a batch, of which the next request starts when one ends -----------------------------------

BATCH = [
    Request("short", (5, 9, 2), 16, seed=1),
    Request("long", tuple(range(3, 24)), 8, seed=2),
    Request("one", (7,), 24, seed=3),
    Request("again", (3, 9, 27, 3, 9), 8, seed=4),
    Request("like it", (4, 8, 26, 2, 8), 8, seed=5),
]
of_layout = lru_cache(partial(tiny_denoiser, seed=1))


def check(decoder: MaskedDecoder, denoiser: TransformerDenoiser, batch: int) -> None:
    batched = list(decoder.generate_stream(denoiser, BATCH, batch))
    alone = {request.id: decoder.generate(denoiser, request) for request in BATCH}
    assert sorted(found.request_id for found in batched) == sorted(alone)
    for found in batched:
        assert facts(found) == facts(alone[found.request_id]), found.request_id


@pytest.mark.parametrize("name", covering(6, decoders(), often=4))
def test_every_decoder_batched(name: str) -> None:
    decoder = decoders()[name]
    check(decoder, of_layout("llada" if needs_unshifted(decoder) else "dream"), batch=3)


LAYOUTS = ("llada", "dream", "sdar", "llada_moe", "llada2")
BLOCKS = replace(BASE, schedule=Blocks(8, sees_future=False))
PLANS = {  # what a forward may feed, see and keep
    "whole canvas": replace(BLOCKS, schedule=Blocks(8)),
    "block causal": replace(BLOCKS, cache=BlockCache(), explore=Lookahead(3)),
    "dual": replace(BLOCKS, schedule=Blocks(8), cache=DualCache(2), explore=Lookahead(2)),
    "prefix": replace(BLOCKS, schedule=Blocks(8), cache=PrefixCache()),
    "pipeline": replace(BLOCKS, schedule=Pipeline(8, 0.1, 0.5), explore=Lookahead(2)),
    "guided": replace(BLOCKS, schedule=Blocks(8), guidance=0.7),
    "smoothed": replace(BLOCKS, schedule=Blocks(8), smoothing=0.3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_on_every_layout(name: str, layout: str) -> None:
    check(PLANS[name], of_layout(layout), batch=2)


def test_sub_blocks_on_a_model_of_theirs() -> None:
    """Rows of a batch keep their own block stores."""
    for inside in (False, True):
        decoder = replace(BLOCKS, schedule=SubBlocks(8, 4), cache=HierarchicalCache(inside))
        check(decoder, of_layout("fast_dllm_v2"), batch=3)


@pytest.mark.parametrize("batch", [1, 4, 9])
def test_the_next_request_starts_when_one_ends(batch: int) -> None:
    """While requests wait, the batch is full, and no request starts early."""
    watched, begun, sizes = copy(of_layout("llada")), list[str](), list[int]()
    alone, together = watched.forward, watched.forward_batch
    watched.forward = lambda *asked: sizes.append(1) or alone(*asked)
    watched.forward_batch = lambda *asked: sizes.append(len(asked[0])) or together(*asked)

    def waiting() -> Iterator[Request]:
        for request in BATCH:
            begun.append(request.id)
            yield request

    finished = []
    for found in BLOCKS.generate_stream(watched, waiting(), batch):
        assert len(begun) - len(finished) <= batch
        finished.append(found)
    assert len(begun) == len(finished) == len(BATCH)
    assert sizes == sorted(sizes, reverse=True), "the batch is full while requests wait"
    assert max(sizes) == min(batch, len(BATCH))
    assert sum(sizes) == sum(len(found.trace) for found in finished)


@pytest.mark.parametrize("name", ["whole canvas", "block causal", "dual"])
def test_batched_rows_may_be_left_out(name: str) -> None:
    large = copy(of_layout("dream"))
    large.vocab_size = LARGE
    check(PLANS[name], large, batch=3)


# --- guidance, autoregressive decoding, cut canvases, tensor operations ---------------------------

REQUEST = Request("loop", tuple(range(3, 14)), 32)
SCHEDULES = covering(3, [Blocks(8), Blocks(None), Pipeline(8, 0.5, 0.5)])
CACHES = [NoCache(), BlockCache("full"), PrefixCache(), DualCache()]


def test_guidance_goes_with_lookahead_and_pipeline(model) -> None:
    decoder = replace(BASE, schedule=Pipeline(8, 0.1, 0.5), explore=Lookahead(2), guidance=1.0)
    generation = decoder.generate(model, REQUEST)
    assert MASKED not in generation.born
    assert {forward.branches for forward in generation.trace.forwards} <= {2, 4, 6}


def test_autoregressive_decoding_is_greedy_next_token_prediction() -> None:
    """Against whole causal forwards of transformers' own module."""
    model, tokens = tiny_denoiser("dream", seed=2), list(REQUEST.prompt_ids)
    for _ in range(12):
        ids = torch.tensor([tokens])
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        logits = model.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, -1]
        logits[ROLES["mask"]] = -torch.inf
        tokens.append(int(logits.argmax()))
    decoder = MaskedDecoder(Confidence(), TopK(), Blocks(1), CausalCache())
    generation = decoder.generate(model, replace(REQUEST, max_new_tokens=12))
    assert list(generation.ids) == tokens[-12:]
    assert [forward.fed for forward in generation.trace.forwards] == [11, *[1] * 11]
    assert [forward.cached for forward in generation.trace.forwards] == [0, *range(11, 22)]


@pytest.mark.parametrize(("block", "new", "length"), [(8, 10, 13), (32, 1, 21), (32, 4, 21)])
def test_whole_blocks_are_cut_to_the_length_asked_for(model, block, new, length) -> None:
    """They may take more forwards than tokens were asked for: 21 positions for a token or four."""
    schedule = Blocks(block, sees_future=False, absolute=True, whole=True)
    decoder = replace(BASE, schedule=schedule, select=TopK(), cache=BlockCache())
    generation = decoder.generate(model, replace(REQUEST, max_new_tokens=new))
    assert len(generation.trace) == len(generation.ids) == length
    assert generation.cut["length"] == new


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("explore", [Greedy(), Lookahead(2)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_a_cut_canvas_stays_cut(model, schedule, explore, cache) -> None:
    slow = replace(BASE, select=Threshold(1.0, strict=True), explore=explore)
    decoder = replace(slow, schedule=schedule, cache=cache)
    whole = decoder.generate(model, REQUEST)
    cut = replace(decoder, stop=CutAt(11 + 19)).generate(model, REQUEST)
    assert len(cut.ids) == 19 and MASKED not in cut.born
    early = [i for i, born in enumerate(whole.born[:19]) if born < 2]
    assert [cut.ids[i] for i in early] == [whole.ids[i] for i in early]
    assert max(forward.fed + forward.cached for forward in cut.trace.forwards[2:]) <= 30
    gone = replace(decoder, stop=CutAt(11)).generate(model, REQUEST)
    assert len(gone.trace) == 2 and gone.ids == ()


def test_a_cut_changes_no_step_of_the_open_block(model) -> None:
    decoder = replace(BASE, schedule=Blocks(None), select=Epsilon(), stop=CutAt(11 + 12))
    assert set(Counter(decoder.generate(model, REQUEST).born).values()) == {1}


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Answer:
    """A model of three operations, so that what is counted is the decoder's."""

    picks_rows = False

    def __init__(self, model) -> None:
        self.special, self.device, self.new_cache = model.special, model.device, model.new_cache
        self.table = torch.randn(64, model.vocab_size, generator=torch.Generator().manual_seed(0))

    def forward(self, tokens_KL, plan, kv):
        rows = plan.rows[1] - plan.rows[0]
        return self.table[:rows].expand(len(tokens_KL), -1, -1).clone()


def operations(decoder: MaskedDecoder, width: int, model) -> Counter[str]:
    """Tensor operations of a whole generation of one block of `width` positions, not the first."""
    request = replace(REQUEST, max_new_tokens=width)
    decoder.generate(Answer(model), request)
    with Ops() as ops:
        decoder.generate(Answer(model), request)
    return ops.made


STEPS = 4
SELECTS = (Threshold(1.0, strict=True), Factor(1e-9), Hierarchy(1.0, 1.0), Epsilon(STEPS))
ONE_BLOCK = replace(BASE, schedule=Blocks(None), select=TopK(STEPS))


@pytest.mark.parametrize(
    "decoder",
    [
        *(replace(ONE_BLOCK, score=score) for score in (Margin(), NegEntropy())),
        *(replace(ONE_BLOCK, score=Credit(Confidence(), full_distribution=f)) for f in (0, 1)),
        *(replace(ONE_BLOCK, select=Union(TopK(STEPS), select)) for select in SELECTS),
        replace(ONE_BLOCK, select=Ration(Threshold(0.0), STEPS), stop=Eos("token")),
        replace(ONE_BLOCK, explore=Lookahead(2, alpha=0.5, fraction=0.5)),
    ],
    ids=lambda decoder: f"{decoder.score}-{decoder.select}-{decoder.explore}",
)
def test_tensor_operations_do_not_grow_with_the_window(decoder, model) -> None:
    """No operation per position: windows of 16 and of 64 cost the same number in as many steps."""
    assert operations(decoder, 16, model) == operations(decoder, 64, model)


OPERATIONS = {"vanilla": 685, "dream": 910, "fast_dllm": 931, "eb_sampler": 1181}
"""Operations of 16 positions."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_decoder_makes_no_operation_for_what_it_does_not_use(name: str) -> None:
    """Above all for a reviser: raise a number only for what the decoder itself has to do."""
    model = tiny_denoiser("llada", seed=1)
    assert operations(decoders()[name], 16, model).total() == OPERATIONS[name]


# --- iteration smoothing (dInfer): what is fed at masks, by definition ----------------------------

SHORT = replace(REQUEST, max_new_tokens=16)
SMOOTHED = replace(BASE, select=Threshold(0.5, band=1e-5, fall=0.02), smoothing=0.3)
DPAD = DPadCache(window=6, number=3, law="uniform")
NEAR = VicinityCache(before=4, after=4)
SMOOTHED_CACHES = [NoCache(), PrefixCache(), DualCache(2), NEAR, DPAD, SparseCache()]


@torch.inference_mode()
@pytest.mark.parametrize("cache", SMOOTHED_CACHES, ids=lambda cache: type(cache).__name__)
def test_a_mask_is_fed_with_what_was_last_expected_there(model, cache) -> None:
    """Row by row: of the last forward that computed the row, and nothing where a token stands."""
    probed = Watched(model)
    smoothed = replace(SMOOTHED, cache=cache).generate(probed, SHORT)
    plain = replace(SMOOTHED, smoothing=0.0, cache=cache).generate(model, SHORT)
    assert (smoothed.ids, smoothed.born) != (plain.ids, plain.born)
    expected_LH, added = torch.zeros(11 + 16, model.hidden_size), 0
    for i, (canvas, plan) in enumerate(zip(probed.canvases, probed.plans, strict=True)):
        at_F = plan.positions(torch.device("cpu"))
        wanted_FH = expected_LH[at_F] * (canvas[0, at_F] == ROLES["mask"])[:, None]
        if i:
            torch.testing.assert_close(plan.added_KFH[0], wanted_FH, atol=0, rtol=0)
            added += int(wanted_FH.any())
        logits_RV = probed.logits[i][0]
        logits_RV[:, ROLES["mask"]] = -torch.inf
        mean_RH = logits_RV.softmax(-1) @ model.module.model.embed_tokens.weight
        expected_LH[slice(*plan.rows)] = min(0.15 + 0.02 * i, 0.3) * mean_RH
    assert added > 2


def test_the_mean_embedding_of_a_certain_token_is_its_embedding(model) -> None:
    ids_1R = torch.tensor([[5, 9, ROLES["mask"]]])
    certain_1RV = 1e4 * torch.nn.functional.one_hot(ids_1R, model.vocab_size).float()
    assert torch.equal(model.mean_embeddings(certain_1RV), model.embed(ids_1R))


def test_branches_that_never_win_change_nothing(model) -> None:
    branched = replace(SMOOTHED, explore=Lookahead(2, base_wins=True))
    found, wanted = (one.generate(model, SHORT) for one in (branched, SMOOTHED))
    assert (found.ids, found.born) == (wanted.ids, wanted.born)


def test_compiled_layers_are_fed_alike(model, monkeypatch) -> None:
    """The layers as they are: what is compiled is torch's."""
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    compiled = CompiledDenoiser(model.module, model.special, model.shifted)
    found, wanted = (SMOOTHED.generate(one, SHORT) for one in (compiled, model))
    assert (found.ids, found.born) == (wanted.ids, wanted.born)
