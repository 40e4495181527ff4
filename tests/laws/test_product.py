"""The product of the pieces: each combination obeys the laws or is refused with a sentence.

The whole product is too large to decode. Any two pieces that fit meet, half of the combinations in
the default tier; in the exhaustive one, every selector meets any two pieces of the other slots.

Pieces come from `conf/decoder`, so a new one is in the product as soon as its yaml is there. The
model is a table, which makes the product affordable; `test_masked_laws` and `test_loop_laws` check
on transformers what needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dllm_bench.core.contracts import Score, Select, Stop
from dllm_bench.core.decoder import Condition, Piece, parts_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.state import MASKED, PROMPT
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from tests.pieces import SLOTS, SMALL, Table, decoders, pieces
from tests.tiers import covering, covering_pairs

REQUEST = Request("product", (5, 9, 2), 16, seed=7)
MODEL = Table()
PAIRED = tuple(slot for slot in SLOTS if slot != "revise")


def check_laws(decoder: MaskedDecoder) -> None:
    """What holds for every decoder."""
    generation = decoder.generate(MODEL, REQUEST)
    writes = generation.trace.writes(generation.born)
    standing = sum(one.committed - one.remasked for one in writes)
    moves = Condition.FIXED_CANVAS not in decoder.schedule.gives
    given = moves * generation.born.count(PROMPT)  # end tokens it has inserted
    decoded = sum(b != MASKED for b in generation.born) - given
    assert standing == decoded, "committed counts add up"
    idle = getattr(decoder.select, "idle", False)  # Dream's published forwards that commit nothing
    rules = [rule for rule in (decoder.stop, *parts_of(decoder.stop)) if isinstance(rule, Stop)]
    # what was committed beyond a later cut, or is pushed out of a full canvas, is gone
    gives_up = moves or any(rule.reads_rows == "fed" for rule in rules)
    looks_on = (
        Condition.NO_CHANGES not in decoder.revise.gives
    )  # a forward may find nothing to change
    kinds = [forward.kind for forward in generation.trace.forwards]
    leads = ForwardKind.VERIFY  # a forward whose drafts the next one verifies is a part of that one
    rows = zip(writes, kinds, [*kinds[1:], ""], strict=True)
    counts = [sum(one) for one, kind, then in rows if kind != ForwardKind.SIZE and then != leads]
    assert idle or gives_up or looks_on or 0 not in counts[:-1], "every forward makes progress"
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


def fit_so_far(chosen: Sequence[Piece]) -> bool:
    """Return whether the pieces of the first slots have what they need of each other."""
    slots = dict(zip(PAIRED, chosen, strict=False))
    needs = {n for piece in chosen for part in (piece, *parts_of(piece)) for n in part.needs}
    return all(condition in slots[slot].gives for slot, condition in needs if slot in slots)


def in_pairs(fits: Callable[[Sequence[Piece]], bool] | None = None) -> list[dict[str, Any]]:
    """Combinations in which any two pieces of different slots meet, where nothing is revised."""
    found = covering_pairs(*(pieces(slot).values() for slot in PAIRED), fits=fits)
    return [dict(zip(PAIRED, chosen, strict=True)) for chosen in found]


def test_pairs_of_pieces_fit_or_are_refused() -> None:
    made = [is_made(chosen) for chosen in in_pairs()]
    assert any(made) and not all(made)


@pytest.mark.parametrize("half", covering(2, range(2)))
def test_pairs_of_pieces_that_fit_obey(half: int) -> None:
    """Each pair that fits is decoded; a check of three pieces at once may still refuse one."""
    combinations = in_pairs(fit_so_far)[half::2]
    made = [chosen for chosen in combinations if is_made(chosen)]
    for chosen in made:
        check(MaskedDecoder(**chosen))
    assert len(made) > 0.9 * len(combinations)


@pytest.mark.exhaustive
@pytest.mark.parametrize("select", pieces("select").values(), ids=pieces("select"))
def test_a_selector_with_any_two_others_obeys_or_is_refused(select: Select) -> None:
    others = [pieces(slot).values() for slot in SLOTS if slot != "select"]
    fitting = [
        obeys(score, select, schedule, cache, explore, stop, revise)
        for score, explore, schedule, stop, cache, revise in covering_pairs(*others)
    ]
    # the few pairs may leave out what a selector needs of two pieces at once; a decoder has it
    assert any(fitting) or any(map(fits(select), decoders().values()))


def fits(select: Select) -> Callable[[MaskedDecoder], bool]:
    """Return whether a decoder obeys with this selector; it is refused where it does not fit."""

    def tried(decoder: MaskedDecoder) -> bool:
        rest = (decoder.schedule, decoder.cache, decoder.explore, decoder.stop, decoder.revise)
        return obeys(decoder.score, select, *rest)

    return tried


def obeys(score: Score, *rest: Piece) -> bool:
    """True where the pieces fit and obey, False where they are refused; nothing else returns."""
    names = ("score", "select", "schedule", "cache", "explore", "stop", "revise")
    chosen: dict[str, Any] = dict(zip(names, (score, *rest), strict=True))
    if is_made(chosen):
        check(MaskedDecoder(**chosen))
        return True
    return False


def is_made(chosen: Mapping[str, Any]) -> bool:
    """Return whether the pieces make a decoder, or are refused with a sentence that names one."""
    try:
        MaskedDecoder(**chosen)
    except DllmBenchError as error:
        assert "needs a" in str(error)
        assert any(type(piece).__name__ in str(error) for piece in chosen.values())
        return False
    return True


def check(decoder: MaskedDecoder) -> None:
    """All laws."""
    check_laws(decoder)
    if isinstance(decoder.cache, NoCache) and isinstance(decoder.stop, Filled):
        check_repeats(decoder)


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
