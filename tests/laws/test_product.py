"""The product of the pieces: each combination obeys the laws or is refused with a sentence.

The whole product is too large to decode. Any two pieces that fit meet, half of the combinations in
the default tier; in the exhaustive one, every selector meets any two pieces of the other slots. The
model is a table; `test_masked_laws` checks on transformers what needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.contracts import Stop
from dllm_bench.core.decoder import Condition, Need, Piece, parts_of
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.state import MASKED, PROMPT
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import LARGE, MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.learn2pd import EndOfTextPrediction
from tests.helpers import tiny_denoiser
from tests.pieces import SLOTS, SMALL, Table, decoders, pieces
from tests.tiers import covering, covering_pairs

REQUEST = Request("product", (5, 9, 2), 16, seed=7)
MODEL = Table()
PAIRED = tuple(slot for slot in SLOTS if slot != "revise")


def check_laws(decoder: MaskedDecoder, request: Request = REQUEST) -> None:
    generation = decoder.generate(MODEL, request)
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
    looks_on = Condition.NO_CHANGES not in decoder.revise.gives  # a forward may change nothing
    kinds = [forward.kind for forward in generation.trace.forwards]
    leads = ForwardKind.VERIFY  # a forward whose drafts the next one verifies is a part of that one
    rows = zip(writes, kinds, [*kinds[1:], ""], strict=True)
    counts = [sum(one) for one, kind, then in rows if kind != ForwardKind.SIZE and then != leads]
    assert idle or gives_up or looks_on or 0 not in counts[:-1], "every forward makes progress"
    for token, born in zip(generation.ids, generation.born, strict=True):
        assert (token == MODEL.special.mask) == (born == MASKED), "what is decoded is no mask"
    assert len(generation.ids) <= request.max_new_tokens + SMALL["block"]
    assert generation.cut["length"] <= request.max_new_tokens
    if MASKED in generation.born and len(generation.trace) < SMALL["forwards"]:
        assert generation.cut["eos"] < generation.born.index(MASKED), "masks are left after the end"


def check_repeats(decoder: MaskedDecoder) -> None:
    """No request leaves anything behind, and chance follows from the request's seed."""
    requests = (REQUEST, replace(REQUEST, prompt_ids=(8,), seed=9), REQUEST)
    first, _, again = (decoder.generate(MODEL, request) for request in requests)
    assert (again.ids, again.born) == (first.ids, first.born)


def go_together(chosen: Mapping[int, Piece]) -> bool:
    """Return whether pieces of some slots have what they need of each other."""
    slots = {PAIRED[number]: piece for number, piece in chosen.items()}
    needs = {n for one in slots.values() for part in (one, *parts_of(one)) for n in part.needs}
    return all(condition in slots[slot].gives for slot, condition in needs if slot in slots)


def in_pairs(fits: Callable[[Mapping[int, Piece]], bool] | None = None) -> list[dict[str, Any]]:
    found = covering_pairs(*(pieces(slot).values() for slot in PAIRED), fits=fits)
    return [dict(zip(PAIRED, chosen, strict=True)) for chosen in found]


def test_every_pair_that_goes_together_meets() -> None:
    rows = covering_pairs(*["abcd"] * 3, fits=lambda pair: len({*pair.values()}) == 2)
    assert all(len({*row}) == 3 for row in rows)
    for one, other in combinations(range(3), 2):
        assert {(row[one], row[other]) for row in rows} == {*permutations("abcd", 2)}


def test_pairs_of_pieces_fit_or_are_refused() -> None:
    made = [is_made(chosen) for chosen in in_pairs()]
    assert any(made) and not all(made)


@pytest.mark.parametrize("half", covering(2, range(2)))
def test_pairs_of_pieces_that_fit_obey(half: int) -> None:
    """Each pair that fits is decoded; a check of three pieces at once may still refuse one."""
    chosen = in_pairs(go_together)[half::2]
    assert sum(map(obeys, chosen)) > 0.9 * len(chosen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", covering(3, pieces("select"), often=3))
def test_a_selector_with_any_two_others_obeys_or_is_refused(name: str) -> None:
    """The few pairs may leave out what it needs of two pieces at once; a decoder has it."""
    slots = [slot for slot in SLOTS if slot != "select"]

    def tried(parts: Sequence[Piece]) -> bool:
        return obeys({"select": pieces("select")[name], **dict(zip(slots, parts, strict=True))})

    found = [tried(parts) for parts in covering_pairs(*(pieces(slot).values() for slot in slots))]
    configured = ([getattr(one, slot) for slot in slots] for one in decoders().values())
    assert any(found) or any(map(tried, configured))


def obeys(chosen: Mapping[str, Any]) -> bool:
    """Return whether the pieces fit, and then obey; they are refused where they do not."""
    if not is_made(chosen):
        return False
    decoder = MaskedDecoder(**chosen)
    check_laws(decoder)
    if isinstance(decoder.cache, NoCache) and isinstance(decoder.stop, Filled):
        check_repeats(decoder)
    return True


def is_made(chosen: Mapping[str, Any]) -> bool:
    """Return whether the pieces make a decoder, or are refused with a sentence that names one."""
    try:
        MaskedDecoder(**chosen)
    except DllmBenchError as error:
        assert "needs a" in str(error)
        assert any(type(piece).__name__ in str(error) for piece in chosen.values())
        return False
    return True


@pytest.mark.parametrize("name", decoders())
def test_every_decoder_obeys(name: str) -> None:
    check_laws(decoders()[name])
    check_repeats(decoders()[name])


REMEMBER = "d3llm lopa multi_bd_edit s2d2_llada21 freedave dkv_cache_greedy elastic_cache"


@pytest.mark.parametrize("name", REMEMBER.split())
def test_a_stop_may_cut_the_canvas_within_an_open_block(name: str) -> None:
    """What a piece remembers of the block is longer than the block then."""
    decoder = replace(decoders()[name], stop=EndOfTextPrediction())
    for prompt in (range(16, 19), range(17, 21), range(18, 23)):
        request = replace(REQUEST, prompt_ids=tuple(prompt), max_new_tokens=24)
        check_laws(decoder, request)
        decoder.generate(tiny_denoiser("llada", 3), request)


@pytest.mark.parametrize("slot", SLOTS)
def test_every_piece_fits_into_a_decoder_that_is_configured(slot: str) -> None:
    """A refusal is the exception: each piece can stand in for another of its slot."""
    for name, piece in pieces(slot).items():
        assert any(takes(decoder, slot, piece) for decoder in decoders().values()), name


def takes(decoder: MaskedDecoder, slot: str, piece: Piece) -> bool:
    try:
        replace(decoder, **{slot: piece})
    except DllmBenchError:
        return False
    return True


# --- rows without a use are left out of the head, and nothing changes by it -----------------------


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


ALONE = Need("explore", Condition.ONE_BRANCH)
DECODERS = decoders() | {
    f"{name}-lookahead": replace(one, explore=Lookahead(3))
    for name, one in decoders().items()
    if all(ALONE not in piece.needs for piece in one.pieces())
}


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_every_decoder_decodes_the_same_from_the_rows_it_reads(decoder) -> None:
    """Logits of a large vocabulary are computed for these alone."""
    found, expected = decoder.generate(Picking(), REQUEST), decoder.generate(MODEL, REQUEST)
    assert (found.ids, found.born, found.cut) == (expected.ids, expected.born, expected.cut)
    assert [f.winner for f in found.trace.forwards] == [f.winner for f in expected.trace.forwards]


def test_decoded_positions_cost_no_row_unless_they_are_read() -> None:
    fewer = {"vanilla", "fast_dllm", "d2f", "lopa", "dream", "diffucoder"}
    for name in (*fewer, "credit", "learn2pd", "learn2pd_eotp", "credit_lopa"):
        model = Picking()
        decoders()[name].generate(model, REQUEST)
        assert any(some < rows for some, rows in model.asked) == (name in fewer), name


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
