"""Laws of soft rows (DMax): when a block is left, and what goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import MASKED
from dllm_bench.decoding.defaults import NoRevision
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import BlockCache, NoCache
from dllm_bench.methods.common import Blocks, Confidence
from dllm_bench.methods.revising import Edit, Leftmost, SoftRevision
from dllm_bench.runs.sessions import MeasuredDenoiser
from tests.helpers import ROLES, tiny_denoiser
from tests.pieces import Table

MASK, PROMPT, NEW = ROLES["mask"], tuple(range(3, 13)), 24
REQUEST = Request("soft", PROMPT, NEW)
BY_8 = Blocks(8, sees_future=False)
SOFT = MaskedDecoder(
    Confidence(), Leftmost(0.02), BY_8, BlockCache(), revise=SoftRevision(sure=0.9)
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_denoiser("llada", 4)


def decode(decoder: MaskedDecoder, models: Sequence[Any]) -> list[Generation]:
    return [decoder.generate(model, REQUEST) for model in models]


TABLES = [Table(seed) for seed in range(6)]


def test_hard_rows_make_it_an_edit_from_zero() -> None:
    """A table reads ids alone; blocks of 24 leave both enough forwards to settle."""
    soft = replace(SOFT, schedule=Blocks(NEW), revise=SoftRevision(sure=1.0), cache=NoCache())
    edit = replace(soft, revise=Edit(tau=0.0, rounds=NEW))
    for one, other in zip(decode(soft, TABLES), decode(edit, TABLES), strict=True):
        if len(one.trace) < NEW:
            assert (one.ids, one.born) == (other.ids, other.born)
    assert any(len(one.trace) < NEW for one in decode(soft, TABLES))


def test_masks_are_committed_from_left_to_right() -> None:
    """All that are probable enough, or the first: no more forwards than masks."""
    for tau, most in ((1.0, NEW), (0.0, NEW // 8)):
        for one in decode(replace(SOFT, select=Leftmost(tau), revise=NoRevision()), TABLES):
            assert list(one.born) == sorted(one.born)
            assert len(one.trace) == most


@pytest.mark.parametrize("sure", [0.0, 0.9, 1.0])
def test_a_block_ends_after_as_many_forwards_as_it_has_positions(sure: float) -> None:
    for one in decode(replace(SOFT, revise=SoftRevision(sure=sure)), TABLES):
        assert len(one.trace) <= NEW and MASKED not in one.born


def test_only_the_released_form_leaves_masks() -> None:
    """A block that is sure at once: its first mask alone is committed."""
    revise = SoftRevision(sure=0.0, released=True)
    for one in decode(replace(SOFT, select=Leftmost(1.0), revise=revise), TABLES):
        assert one.born.count(MASKED) == NEW - NEW // 8 and len(one.trace) == NEW // 8


def test_guidance_and_the_error_of_a_cache_feed_the_same_rows(model: Any) -> None:
    """What the cache left out of a forward is committed, and is fed as it stands."""
    measured = MeasuredDenoiser(model)
    assert SOFT.generate(measured, REQUEST).ids == SOFT.generate(model, REQUEST).ids
    assert measured.rows and measured.nats / measured.rows < 1e-5
    guided = replace(SOFT, cache=NoCache("block_causal"), guidance=1e-7)
    plain = replace(guided, guidance=0.0)
    assert guided.generate(model, REQUEST).ids == plain.generate(model, REQUEST).ids
