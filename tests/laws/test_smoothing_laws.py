"""Iteration smoothing (dInfer): what is fed at masks, by definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_bench.core.contracts import Cache
from dllm_bench.core.request import Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import Blocks, Confidence, Threshold
from dllm_bench.methods.fast_dllm import VicinityCache
from dllm_bench.methods.position_caches import DPadCache, SparseCache
from dllm_bench.models.acceleration import CompiledDenoiser
from tests.helpers import ROLES, Probed, tiny_denoiser

MASK, PROMPT, NEW, TAU, MOST = ROLES["mask"], tuple(range(3, 13)), 16, 0.5, 0.3
REQUEST = Request("smoothed", PROMPT, NEW)
PLAIN = MaskedDecoder(Confidence(), Threshold(TAU, band=1e-5, fall=0.02), Blocks(8), NoCache())
SMOOTHED = replace(PLAIN, smoothing=MOST)


@pytest.fixture(scope="module", params=("llada", "dream"))
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_denoiser(request.param, 4)


def weight(forward: int) -> float:
    return min(0.15 + 0.02 * forward, MOST)


DPAD = DPadCache(window=6, number=3, law="uniform")
NEAR = VicinityCache(before=4, after=4)
CACHES = [NoCache(), PrefixCache(), DualCache(2), NEAR, DPAD, SparseCache()]


@torch.inference_mode()
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: type(cache).__name__)
def test_a_mask_is_fed_with_what_was_last_expected_there(model: Any, cache: Cache) -> None:
    """Row by row: of the last forward that computed the row, and nothing where a token stands."""
    probed = Probed(model)
    smoothed = replace(SMOOTHED, cache=cache).generate(probed, REQUEST)
    plain = replace(PLAIN, cache=cache).generate(model, REQUEST)
    assert (smoothed.ids, smoothed.born) != (plain.ids, plain.born)
    expected_LH, added = torch.zeros(len(PROMPT) + NEW, model.hidden_size), 0
    for i, (canvas, plan) in enumerate(zip(probed.canvases, probed.plans, strict=True)):
        at_F = plan.positions(torch.device("cpu"))
        wanted_FH = expected_LH[at_F] * (canvas[0, at_F] == MASK)[:, None]
        if i:
            torch.testing.assert_close(plan.added_KFH[0], wanted_FH, atol=0, rtol=0)
            added += int(wanted_FH.any())
        law_RV = probed.logits[i][0].index_fill(-1, torch.tensor([MASK]), -torch.inf).softmax(-1)
        mean_RH = law_RV @ model.module.model.embed_tokens.weight
        expected_LH[slice(*plan.rows)] = weight(i) * mean_RH
    assert added > 2


def test_the_mean_embedding_of_a_certain_token_is_its_embedding(model: Any) -> None:
    ids_1R = torch.tensor([[5, 9, MASK]])
    certain_1RV = 1e4 * torch.nn.functional.one_hot(ids_1R, model.vocab_size).float()
    assert torch.equal(model.mean_embeddings(certain_1RV), model.embed(ids_1R))


def test_batches_and_branches_keep_what_is_theirs(model: Any) -> None:
    """With plain requests in the batch, and with branches none of which ever wins."""
    requests = [REQUEST, Request("other", (9, 8, 7), NEW)]
    alone = [SMOOTHED.generate(model, request) for request in requests]
    together = list(SMOOTHED.generate_stream(model, requests, 2))
    assert [one.ids for one in alone] == [one.ids for one in together]
    branched = replace(SMOOTHED, explore=Lookahead(2, base_wins=True)).generate(model, REQUEST)
    assert (branched.ids, branched.born) == (alone[0].ids, alone[0].born)


def test_compiled_layers_are_fed_alike(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers as they are: what is compiled is torch's."""
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    compiled = CompiledDenoiser(model.module, model.special, model.shifted)
    found, wanted = (SMOOTHED.generate(one, REQUEST) for one in (compiled, model))
    assert (found.ids, found.born) == (wanted.ids, wanted.born)
