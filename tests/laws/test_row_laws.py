"""Rows without a use are left out of the head, and nothing changes by it.

Where scores of masked positions are all that is read, a large vocabulary's logits are computed for
those positions alone, where draws are costly any vocabulary's. Every decoder there is decodes the
same either way; what reads more (filters, credit, an end predicted ahead) gets all rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.masked import LARGE, MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from tests.helpers import tiny_denoiser
from tests.pieces import Table, decoders

REQUEST = Request("rows", (5, 9, 2), 16, seed=7)
MODEL = Table()


class Picking(Table):
    """The table, asked for some rows alone; counts what it was asked for."""

    picks_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = LARGE
        self.asked: list[tuple[int, int]] = []

    def forward(self, tokens_KL: Tensor, plan: Any, kv: Any) -> Tensor:
        logits_KRV = super().forward(tokens_KL, plan, kv)
        rows = logits_KRV.shape[0] * logits_KRV.shape[1]
        if plan.only_M is None:
            self.asked.append((rows, rows))
            return logits_KRV
        self.asked.append((len(plan.only_M), rows))
        masked_X = tokens_KL[:, slice(*plan.rows)].flatten() == self.special.mask
        assert masked_X[plan.only_M].all() and plan.only_M.diff().gt(0).all()
        return logits_KRV.flatten(0, 1)[plan.only_M][None]


def with_lookahead() -> dict[str, MaskedDecoder]:
    """Return every decoder that may have several branches, with lookahead."""
    alone = Need("explore", Condition.ONE_BRANCH)
    return {
        f"{name}-lookahead": replace(one, explore=Lookahead(3))
        for name, one in decoders().items()
        if all(alone not in piece.needs for piece in one.pieces())
    }


DECODERS = {**decoders(), **with_lookahead()}


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_every_decoder_decodes_the_same_from_the_rows_it_reads(decoder) -> None:
    model = Picking()
    found, expected = decoder.generate(model, REQUEST), decoder.generate(MODEL, REQUEST)
    assert (found.ids, found.born, found.cut) == (expected.ids, expected.born, expected.cut)
    assert [f.winner for f in found.trace.forwards] == [f.winner for f in expected.trace.forwards]


def test_decoded_positions_cost_no_row_unless_they_are_read() -> None:
    fewer = set()
    for name, decoder in decoders().items():
        model = Picking()
        decoder.generate(model, REQUEST)
        if any(some < rows for some, rows in model.asked):
            fewer.add(name)
    assert {"vanilla", "fast_dllm", "d2f", "lopa", "dream", "diffucoder"} <= fewer
    assert not fewer & {"credit", "learn2pd", "learn2pd_eotp", "credit_lopa"}


@pytest.mark.parametrize("layout", ["llada", "dream"])
def test_a_model_gives_the_rows_asked_for(layout: str) -> None:
    model = tiny_denoiser(layout, seed=1)
    tokens_KL = torch.randint(5, 80, (3, 12), generator=torch.Generator().manual_seed(0))
    plan = ForwardPlan(ForwardKind.DENOISE, (0, 12), (4, 10), (0, 0))
    only_M = torch.tensor([0, 5, 6, 13, 17])
    whole_KRV = model.forward(tokens_KL, plan, model.new_cache(12))
    some_1MV = model.forward(tokens_KL, replace(plan, only_M=only_M), model.new_cache(12))
    expected_MV = whole_KRV.flatten(0, 1)[only_M]
    assert some_1MV.shape == (1, 5, model.vocab_size)
    assert torch.allclose(some_1MV[0], expected_MV, rtol=0, atol=1e-5)
