"""Laws of drafts that a masked model makes for itself (FreeDave, SSD): when they are lossless,
what the trace counts.

Decoders are compared with themselves without drafts. Which draft continues is recorded for
FreeDave's own code (`tests/golden`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from dllm_bench.api.generation import decoder as configured_decoder
from dllm_bench.api.generation import load_model
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import SelfDraft
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import Blocks, Confidence, Eos, Margin, NegEntropy, Threshold, TopK
from dllm_bench.methods.confidence_rules import GAP
from dllm_bench.methods.fast_dllm import FirstOfBlock, VicinityCache
from dllm_bench.methods.history import HISTORY
from dllm_bench.metrics.drafts import rounds_of
from dllm_bench.models.load import LoadedModel
from dllm_bench.paths import options
from tests.helpers import ROLES, Watched, tiny_denoiser
from tests.pieces import pieces
from tests.tiers import covering

REQUESTS = [Request(f"{n}", tuple(range(3, 3 + n)), 32) for n in (1, 8, 11)]
BASE = MaskedDecoder(Confidence(), TopK(), Blocks(8), DualCache(), SelfDraft(4))
SPECIAL = SpecialTokens(**ROLES)
LOSSLESS = {
    "dual": BASE,
    "prefix": replace(BASE, cache=PrefixCache()),
    "prefix, renewed": replace(BASE, cache=PrefixCache(every=1)),
    "vicinity": replace(BASE, cache=VicinityCache(before=2, after=4, warmup=0)),
    "none": replace(BASE, cache=NoCache()),
    "one block": replace(BASE, cache=NoCache(), schedule=Blocks(None)),
    "absolute blocks": replace(BASE, schedule=Blocks(8, absolute=True, whole=True)),
    "exact": replace(BASE, cache=BlockCache(), schedule=Blocks(8, sees_future=False)),
    "approximate": replace(BASE, cache=BlockCache("full"), schedule=Blocks(8, sees_future=False)),
    "more than a block": replace(BASE, explore=SelfDraft(11)),
    "two": replace(BASE, explore=SelfDraft(2)),
    "entropy": replace(BASE, score=NegEntropy()),
    "margin": replace(BASE, score=Margin()),
    "Dream": replace(BASE, select=FirstOfBlock(TopK()), explore=SelfDraft(5)),
    "high threshold": replace(BASE, select=Threshold(1.0, strict=True)),
    "guided": replace(BASE, cache=NoCache(), guidance=0.5),
}
CONFIGURED = ("ssd", "freedave", "freedave_dream")
UNFIT = ("tiny-qwen3", "tiny-idlm", "tiny-diffusion-gemma", "tiny-wedlm")  # no masks, blocks of 1
EMBEDDED = [n for n in options("model") if n.startswith("tiny-") and n not in UNFIT]
ASKED = [replace(r, prompt_ids=tuple(20 + x for x in r.prompt_ids)) for r in REQUESTS]


@lru_cache
def model(layout: str, seed: int = 1):
    return tiny_denoiser(layout, seed=seed)


def generate(decoder: MaskedDecoder, request: Request, layout: str, seed: int = 1) -> Generation:
    return decoder.generate(model(layout, seed), request)


def without(decoder: MaskedDecoder) -> MaskedDecoder:
    """Return the decoder that makes no drafts."""
    return replace(decoder, explore=Greedy())


@pytest.mark.parametrize(("name", "layout"), covering(3, product(LOSSLESS, ("llada", "dream"))))
def test_one_token_per_step_is_lossless(name: str, layout: str) -> None:
    decoder, saved = LOSSLESS[name], 0
    for seed in (1, 2):
        for request in REQUESTS:
            fast = generate(decoder, request, layout, seed)
            slow = generate(without(decoder), request, layout, seed)
            assert fast.ids == slow.ids
            assert len(fast.trace) <= len(slow.trace)
            saved += len(slow.trace) - len(fast.trace)
    assert saved > 0, "no draft was accepted"


@lru_cache
def embedded(name: str) -> LoadedModel:
    return load_model(name, dtype="float32", device="cpu")


@lru_cache
def configured(name: str) -> MaskedDecoder:
    made = configured_decoder(name)
    assert isinstance(made, MaskedDecoder)
    return made


def fitted(decoder: MaskedDecoder, own: LoadedModel) -> MaskedDecoder:
    """Return a decoder with the blocks that the model was trained with, and their exact cache."""
    if own.attention_form == "full":
        return decoder
    blocks = Blocks(own.block or 8, absolute=True, whole=True, sees_future=False)
    return replace(decoder, schedule=blocks, cache=BlockCache())


@pytest.mark.parametrize(("name", "decoder"), covering(5, product(EMBEDDED, CONFIGURED), often=6))
def test_configured_drafts_are_lossless_for_every_embedded_model(name: str, decoder: str) -> None:
    own = embedded(name)
    drafted = fitted(configured(decoder), own)
    batched = {g.request_id: g for g in drafted.generate_stream(own.denoiser, ASKED, 2)}
    saved = 0
    for request in ASKED:
        fast = drafted.generate(own.denoiser, request)
        slow = without(drafted).generate(own.denoiser, request)
        found = batched[request.id]
        assert fast.ids == slow.ids
        assert (found.ids, found.born) == (fast.ids, fast.born)
        assert len(found.trace) == len(fast.trace) <= len(slow.trace)
        saved += len(slow.trace) - len(fast.trace)
    assert saved > 0, "no draft was accepted"


def test_ssd_verifies_a_root_and_four_drafts_in_blocks_of_eight() -> None:
    trace = configured("ssd").generate(model("llada"), REQUESTS[1]).trace
    assert max(forward.branches for forward in trace.forwards) == 5
    assert max(forward.masks for forward in trace.forwards) == 8


@pytest.mark.parametrize("stop", [Eos(), Eos("token")], ids=str)
def test_a_text_that_ends_is_the_same_up_to_its_end(stop: Eos) -> None:
    """Drafts may commit what lies behind the end token in the forward that commits it."""
    decoder = replace(BASE, stop=stop)
    for request in REQUESTS:
        ending = len(request.prompt_ids) + 13
        fast, slow = (
            one.generate(Watched(model("llada"), ending), request)
            for one in (decoder, without(decoder))
        )
        end = slow.cut["eos"]
        assert fast.cut["eos"] == end < 32
        assert fast.ids[:end] == slow.ids[:end]


@pytest.mark.parametrize("select", [TopK(), Threshold(0.3), TopK(3)], ids=str)
def test_no_drafts_are_no_lookahead(select: Select) -> None:
    decoder = replace(BASE, explore=SelfDraft(1), select=select)
    for request in REQUESTS:
        one, other = (generate(d, request, "llada") for d in (decoder, without(decoder)))
        assert (one.ids, one.born) == (other.ids, other.born)
        assert {forward.branches for forward in one.trace.forwards} == {1}


@pytest.mark.parametrize("select", [TopK(), Threshold(0.3)], ids=str)
def test_a_forward_commits_what_it_verified_and_its_own(select: Select) -> None:
    decoder, depths = replace(BASE, select=select), set()
    for request in REQUESTS:
        found = generate(decoder, request, "llada")
        forwards = found.trace.forwards
        for index, forward in enumerate(forwards):
            new = found.born.count(index)
            assert forward.proposed == forward.branches - 1
            assert forward.accepted <= forward.proposed
            filled = forward.accepted == forward.masks
            assert new == forward.accepted if filled else new > forward.accepted
            depths.add(forward.accepted)
        several = [forward for forward in forwards if forward.branches > 1]
        rounds = rounds_of(found.trace, found.born)
        assert len(rounds) == len(several) < len(forwards)
        assert sum(made.accepted for made in rounds) == sum(f.accepted for f in several)
    assert len(depths) > 2


def test_a_draft_that_fills_the_block_opens_no_other() -> None:
    watched = Watched(model("llada"))
    BASE.generate(watched, REQUESTS[2])
    widths = {plan.rows[1] - plan.rows[0] for plan in watched.plans}
    full = [(canvas != SPECIAL.mask).all(1).tolist() for canvas in blocks_fed(watched)]
    assert widths == {8}
    assert any(full_K.count(True) == 1 and full_K[-1] is False for full_K in full)


def blocks_fed(watched: Watched) -> list[Tensor]:
    """Return the open block of every forward, (K, P)."""
    pairs = zip(watched.canvases, watched.plans, strict=True)
    return [canvas_KL[:, slice(*plan.rows)] for canvas_KL, plan in pairs]


def chosen(select: Select, scores: Scores, window: Window, state: DecodeState) -> list[Tensor]:
    """Return what a selector commits, and what it would if it chose nothing."""
    where_KW = select(scores, window, state) & window.eligible_KW
    return [where_KW, *select.on_stall(scores, window, state)]


@pytest.mark.parametrize("name", pieces("select"))
def test_selectors_choose_in_each_branch_by_its_scores(name: str) -> None:
    """Drafts are verified by what the selector does in every branch at once."""
    select, generator = pieces("select")[name], torch.Generator().manual_seed(0)
    masked_KW = torch.rand(3, 8, generator=generator) < 0.7
    values = torch.rand(4, 3, 8, generator=generator)
    ids_KW = torch.randint(0, 80, (3, 8), generator=generator)
    scores = Scores(ids_KW, *values[:2], neg_entropy_KW=-values[2])
    tokens_KW = torch.where(masked_KW, SPECIAL.mask, scores.ids_KW)
    state = DecodeState(tokens_KW, torch.where(masked_KW, -1, 0).int(), 0, SPECIAL, forwards=1)
    state.reference_KL = torch.randint(0, 80, (3, 8), generator=generator)
    state.memo[GAP], state.memo[HISTORY] = values[3, :, 0], values.permute(1, 2, 0)
    window = Window(0, 8, 8, 0, 8, 0, masked_KW)
    together = chosen(select, scores, window, state.take(torch.arange(3)))
    for k in map(torch.tensor, range(3)):
        alone = chosen(select, scores.pick(k), window.pick(k), state.pick(k))
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[k])
