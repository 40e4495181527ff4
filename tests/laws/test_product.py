"""The full product of the pieces: each combination obeys the laws or is refused with a sentence.

Pieces come from `conf/decoder`, so a new one is in the product as soon as its yaml is there. The
model is a table, which makes the product affordable; `test_masked_laws` and `test_loop_laws` check
on transformers what needs one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dllm_bench.core.contracts import Explore, Schedule, Score, Select
from dllm_bench.core.decoder import Piece
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import MASKED
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.stop.filled import Filled
from tests.pieces import SLOTS, SMALL, Table, decoders, pieces
from tests.tiers import tuples_of_three

REQUEST = Request("product", (5, 9, 2), 16, seed=7)
MODEL = Table()


def per_forward(generation: Generation) -> list[int]:
    """Positions committed at each forward."""
    born = [b for b in generation.born if b != MASKED]
    return [born.count(step) for step in range(len(generation.trace))]


def check_laws(decoder: MaskedDecoder) -> None:
    """What holds for every decoder."""
    generation = decoder.generate(MODEL, REQUEST)
    counts = per_forward(generation)
    assert sum(counts) == sum(b != MASKED for b in generation.born), "committed counts add up"
    idle = getattr(decoder.select, "idle", False)  # Dream's published forwards that commit nothing
    gives_up = decoder.stop.reads_ahead  # what was committed beyond a later cut is gone
    assert idle or gives_up or 0 not in counts[:-1], "every forward makes progress"
    for token, born in zip(generation.ids, generation.born, strict=True):
        assert (token == MODEL.special.mask) == (born == MASKED), "what is decoded is no mask"
    assert len(generation.ids) <= REQUEST.max_new_tokens + SMALL["block"]
    assert generation.cut["length"] <= REQUEST.max_new_tokens
    if MASKED in generation.born and len(generation.trace) < SMALL["forwards"]:
        assert generation.cut["eos"] < generation.born.index(MASKED), "masks are left after the end"


def check_repeats(decoder: MaskedDecoder) -> None:
    """No request leaves anything behind, and chance follows from the request's seed."""
    first, _, again = (
        decoder.generate(MODEL, request)
        for request in (REQUEST, replace(REQUEST, prompt_ids=(8,), seed=9), REQUEST)
    )
    assert (again.ids, again.born) == (first.ids, first.born)


def test_triples_of_pieces_obey_or_are_refused() -> None:
    """Any three pieces of different slots meet; the whole product is in the exhaustive tier."""
    combinations = tuples_of_three(*(list(pieces(slot).values()) for slot in SLOTS))
    fitting = sum(
        obeys(score, select, schedule, cache, explore, stop)
        for score, select, explore, schedule, stop, cache in combinations
    )
    assert fitting > len(combinations) / 4, "most of them are refused"


@pytest.mark.exhaustive
@pytest.mark.parametrize("select", pieces("select").values(), ids=pieces("select"))
@pytest.mark.parametrize("schedule", pieces("schedule").values(), ids=pieces("schedule"))
@pytest.mark.parametrize("explore", pieces("explore").values(), ids=pieces("explore"))
def test_every_combination_obeys_or_is_refused(
    select: Select, schedule: Schedule, explore: Explore
) -> None:
    others = (pieces("score"), pieces("stop"), pieces("cache"))
    outcomes = [
        obeys(score, select, schedule, cache, explore, stop)
        for score, stop, cache in product(*(shelf.values() for shelf in others))
    ]
    assert len(outcomes) == len(others[0]) * len(others[1]) * len(others[2])


def obeys(score: Score, *rest: Piece) -> bool:
    """True where the pieces fit and obey, False where they are refused; nothing else returns."""
    try:
        decoder = MaskedDecoder(score, *rest)  # type: ignore[arg-type]
    except DllmBenchError as error:
        assert "needs a" in str(error)
        assert any(type(piece).__name__ in str(error) for piece in (score, *rest))
        return False
    check_laws(decoder)
    if isinstance(decoder.cache, NoCache) and isinstance(decoder.stop, Filled):
        check_repeats(decoder)
    return True


@pytest.mark.parametrize("name", decoders())
def test_every_decoder_obeys(name: str) -> None:
    check_laws(decoders()[name])
    check_repeats(decoders()[name])


def test_every_piece_fits_into_a_decoder_that_is_configured() -> None:
    """A refusal is the exception: each piece can stand in for another of its slot."""
    fitting: set[Piece] = set()
    for slot, decoder in product(SLOTS, decoders().values()):
        for piece in pieces(slot).values():
            try:
                fitting.add(getattr(replace(decoder, **{slot: piece}), slot))
            except DllmBenchError:
                continue
    assert fitting == {piece for slot in SLOTS for piece in pieces(slot).values()}
