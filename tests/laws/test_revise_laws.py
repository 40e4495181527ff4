"""Laws of decoders that revise: traces, budgets, endings, thresholds out of reach, soft rows.

In uniform-state diffusion all tokens change; `tests/golden` has transformers' own loop.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_bench.core.contracts import Cache, Explore
from dllm_bench.core.decoder import Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import MASKED
from dllm_bench.core.trace import AGAIN_MASKED, ForwardKind, Trace
from dllm_bench.decoding.defaults import Filled, Greedy, NoRevision
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, NoCache, PrefixCache
from dllm_bench.methods.common import Best, Blocks, Confidence, TopK
from dllm_bench.methods.d3llm import DelayedCache, EntropyThreshold, MultiBlock
from dllm_bench.methods.remasking import Remask, ReMDM, Wino
from dllm_bench.methods.revising import Budgeted, Edit, EditBlocks, Leftmost, SoftRevision
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import count_sample
from dllm_bench.runs.sessions import MeasuredDenoiser
from tests.canvas import FULL, SLIDING, canvas_decoder, tiny_canvas_model
from tests.helpers import facts, tiny_denoiser
from tests.pieces import Table, decoders
from tests.sample_stats import sample
from tests.tiers import covering

REVISING = {
    name: one for name, one in decoders().items() if Condition.NO_CHANGES not in one.revise.gives
}
EARLY = REVISING["d3llm_early_stop"]
MODELS = [Table(seed) for seed in range(3)]
REQUEST = Request("laws", (5, 9, 2), 16, seed=7)
BUDGETED = {name: one for name, one in REVISING.items() if isinstance(one.revise, Budgeted)}
each = pytest.mark.parametrize("decoder", REVISING.values(), ids=REVISING)


def decoded(decoder: MaskedDecoder) -> list[Generation]:
    return [decoder.generate(model, REQUEST) for model in MODELS]


def canvas(generation: Generation) -> tuple[list[tuple[int, int]], int, int]:
    drawn = list(zip(generation.ids, generation.born, strict=True))
    return drawn, len(generation.trace), changes(generation)


def block_of(decoder: MaskedDecoder, place: int) -> int:
    """Return the block of the new position `place`; a reviser of the whole canvas has one."""
    grid = decoder.schedule.grid(3, REQUEST.max_new_tokens)
    whole = Condition.FROM_FIRST_BLOCK in decoder.revise.gives
    return 0 if whole else (3 + place - grid.origin) // grid.block


def changes(generation: Generation) -> int:
    return sum(len(forward.changes) for forward in generation.trace.forwards)


@each
def test_the_changes_of_the_trace_lead_to_the_final_canvas(decoder: MaskedDecoder) -> None:
    """Every change gives up what the canvas held: nothing was written that the trace leaves out."""
    for generation in decoded(decoder):
        chains: dict[int, list[tuple[int, int]]] = {}  # position -> (after, forward) of its changes
        for index, forward in enumerate(generation.trace.forwards):
            for change in forward.changes:
                chain = chains.setdefault(change.position, [])
                if chain and chain[-1][0] != AGAIN_MASKED:
                    assert chain[-1] == (change.before, change.born)
                assert (chain[-1][1] if chain else -1) <= change.born < index
                chain.append((change.after, index))
        for position, chain in chains.items():
            after, index = chain[-1]
            token, born = generation.ids[position], generation.born[position]
            if after == AGAIN_MASKED:
                assert born == MASKED or born > index
            else:
                assert (after, index) == (token, born)


def test_the_laws_are_about_decoders_that_do_revise() -> None:
    made = [changes(one.generate(MODELS[0], REQUEST)) > 0 for one in REVISING.values()]
    assert sum(made) > len(made) / 2


@pytest.mark.parametrize("decoder", BUDGETED.values(), ids=BUDGETED)
@pytest.mark.parametrize("most", covering(2, [3, 0]))
def test_budgets_bound_the_changes_and_decoding_ends(decoder: MaskedDecoder, most: int) -> None:
    for budget in ("per_position", "per_block", "per_request"):
        revise = replace(decoder.revise, **{budget: most})  # type: ignore[type-var]
        for generation in decoded(replace(decoder, revise=revise)):
            changed = [c.position for f in generation.trace.forwards for c in f.changes]
            blocks, request = [block_of(decoder, place) for place in changed], [0] * len(changed)
            spent = {"per_position": changed, "per_block": blocks, "per_request": request}[budget]
            assert max(Counter(spent).values(), default=0) <= most
            pairs = itertools.pairwise(generation.trace.forwards)
            vain = [x for x, after in pairs if not (x.changes or x.masks or after.masks)]
            assert not (vain and isinstance(revise, Remask | Edit | EditBlocks)), "fed in vain"


OUT_OF_REACH = {
    "edit": ("llada21", Edit(tau=1)),
    "probability": ("t2m", Remask(judge="probability", tau=0)),
    "candidate": ("t2m", Remask(judge="candidate", tau=1)),
    "drop": ("t2m", Remask(judge="drop", tau=1)),
    "wino": ("wino", Wino(tau=0)),
}


@pytest.mark.parametrize(("name", "revise"), OUT_OF_REACH.values(), ids=OUT_OF_REACH)
def test_a_threshold_out_of_reach_is_no_revision(name: str, revise) -> None:
    """Tokens, forwards and what each committed; WINO's forwards hold added rows all the same."""
    decoder = replace(REVISING[name], stop=Filled())
    never, none = (decoded(replace(decoder, revise=piece)) for piece in (revise, NoRevision()))
    assert [*map(canvas, never)] == [*map(canvas, none)]


@pytest.mark.parametrize("cache", [NoCache(), DelayedCache(), PrefixCache()], ids=str)
@pytest.mark.parametrize("explore", [Greedy(), Lookahead(2)], ids=str)
def test_end_tokens_are_written_behind_the_first_one(cache: Cache, explore: Explore) -> None:
    """Alone and in batches; what the last forward commits there stays, as released."""
    requests, filled = [replace(REQUEST, seed=s, prompt_ids=(5, s + 3)) for s in range(4)], 0
    model = MODELS[1]
    for tau in (0.5, 2.0):
        select, schedule = EntropyThreshold(tau, best=True), MultiBlock(4, 0.25, opens_rest=True)
        decoder = replace(EARLY, select=select, schedule=schedule, cache=cache, explore=explore)
        alone = sorted(canvas(decoder.generate(model, request)) for request in requests)
        assert alone == sorted(map(canvas, decoder.generate_stream(model, requests, 3)))
        for drawn, forwards, changed in alone:
            ends = [token == model.special.eos for token, _ in drawn]
            behind = drawn[ends.index(True) :] if any(ends) else []
            late = {born for token, born in behind if token != model.special.eos}
            assert len(drawn) == 16 and late <= {forwards - 1}
            assert all(born != MASKED for _, born in drawn)
            filled += changed
    assert filled, "no committed token stood behind an end token"


def test_a_given_end_token_ends_nothing() -> None:
    gaps = replace(REQUEST, pinned=((5, eos := MODELS[0].special.eos),))
    assert replace(EARLY, forbid="ends").generate(MODELS[0], gaps).ids.count(eos) == 1
    for name, ending in (("t2m", {"edits_end": False}), ("multi_bd_edit", {"released": True})):
        plain = replace(REVISING[name], forbid="ends")
        ends = replace(plain, revise=replace(plain.revise, **ending))  # type: ignore[type-var]
        assert canvas(ends.generate(MODELS[0], gaps)) == canvas(plain.generate(MODELS[0], gaps))


FEW_STEPS = {"remdm": ReMDM(steps=8), "t2m": REVISING["t2m"].revise}


@pytest.mark.parametrize("name", FEW_STEPS)
def test_no_mask_is_left_whatever_the_number_of_steps(name: str) -> None:
    """ReMDM's last forward masks nothing again, and a selector has more steps than masks."""
    select = {"remdm": Best(2, refills=True), "t2m": TopK(32)}[name]
    decoder = replace(REVISING[name], select=select, revise=FEW_STEPS[name], schedule=Blocks(16))
    assert all(MASKED not in generation.born for generation in decoded(decoder))


def test_a_reviser_that_cycles_ends_with_a_sentence() -> None:
    """Each token below probability 1 is masked again in the next forward, for ever."""
    endless = Remask(judge="probability", tau=1, ratio=1, rounds=10**9)
    cycling = replace(REVISING["t2m"], revise=endless)
    with pytest.raises(DllmBenchError, match="Remask keeps changing its tokens.*per_position"):
        cycling.generate(MODELS[0], REQUEST)
    replace(cycling, revise=replace(endless, per_position=2)).generate(MODELS[0], REQUEST)


# --- soft rows (DMax): when a block is left, and what goes with it --------------------------------

NEW = REQUEST.max_new_tokens
CAUSAL, SETTLED = Blocks(8, sees_future=False), SoftRevision(sure=0.9)
SOFT = MaskedDecoder(Confidence(), Leftmost(0.02), CAUSAL, BlockCache(), revise=SETTLED)


def test_hard_rows_make_it_an_edit_from_zero() -> None:
    """A table reads ids alone; blocks of 24 leave some texts enough forwards to settle."""
    soft = replace(SOFT, schedule=Blocks(24), revise=SoftRevision(sure=1.0), cache=NoCache())
    edit = replace(soft, revise=Edit(tau=0.0, rounds=24))
    request, settled = Request("soft", tuple(range(3, 13)), 24), 0
    for seed in range(6):
        one, other = (decoder.generate(Table(seed), request) for decoder in (soft, edit))
        if len(one.trace) < 24:
            assert (one.ids, one.born) == (other.ids, other.born)
            settled += 1
    assert settled


@pytest.mark.parametrize("sure", [0.0, 0.9, 1.0])
def test_a_block_ends_after_as_many_forwards_as_it_has_positions(sure: float) -> None:
    for one in decoded(replace(SOFT, revise=SoftRevision(sure=sure))):
        assert len(one.trace) <= NEW and MASKED not in one.born


def test_guidance_and_the_error_of_a_cache_feed_the_same_rows() -> None:
    """What the cache left out of a forward is committed, and is fed as it stands."""
    model = tiny_denoiser("llada", 4)
    measured: Any = MeasuredDenoiser(model)
    assert SOFT.generate(measured, REQUEST).ids == SOFT.generate(model, REQUEST).ids
    assert measured.rows and measured.nats / measured.rows < 1e-5
    guided = replace(SOFT, cache=NoCache("block_causal"), guidance=1e-7)
    plain = replace(guided, guidance=0.0)
    assert guided.generate(model, REQUEST).ids == plain.generate(model, REQUEST).ids


# --- uniform-state diffusion (DiffusionGemma) -----------------------------------------------------

CANVAS, STEPS = 8, 6
SHAPE: dict[str, Any] = {"canvas": CANVAS, "layers": (SLIDING, FULL), "window": 8}
NEVER = {"settle__entropy": 1e-9}


def request(canvases: float = 2, seed: int = 3, prompt: int = 5) -> Request:
    ids = torch.randint(3, 500, (prompt,), generator=torch.Generator().manual_seed(prompt))
    return Request(f"r{seed}", (*ids.tolist(),), int(canvases * CANVAS), seed=seed)


def model() -> Any:
    return tiny_canvas_model(2, **SHAPE)


def denoised(asked: Request | None = None, **settings: Any) -> Generation:
    decoder = canvas_decoder(**{"anneal__steps": STEPS, **settings})
    return decoder.generate(model(), asked or request())


def test_forwards_are_counted_and_tell_what_they_read() -> None:
    generation = denoised(request(3), **NEVER)
    kinds = [one.kind.value for one in generation.trace.forwards]
    assert kinds == ["prefill", *["denoise"] * STEPS] * 3
    first, again = generation.trace.forwards[0], generation.trace.forwards[STEPS + 1]
    assert (first.fed, first.cached, again.fed, again.cached) == (5, 0, CANVAS, 5)
    denoising = [one for one in generation.trace.forwards if one.kind is ForwardKind.DENOISE]
    read = {5 + CANVAS * number for number in range(3)}
    assert {(one.fed, one.cached) for one in denoising} == {(CANVAS, cached) for cached in read}
    each = first.kept_bytes // 5
    assert each > 0
    for one in generation.trace.forwards:
        assert one.read_bytes == each * one.cached
        assert one.kept_bytes == each * (one.cached + one.fed * (one.kind is ForwardKind.PREFILL))


def test_the_trace_tells_every_change_of_every_position() -> None:
    """Played backwards it ends with the first prediction, and counts of writes add up."""
    generation = denoised(request(2), **NEVER)
    ids, born = list(generation.ids), list(generation.born)
    index_of = {id(one): index for index, one in enumerate(generation.trace.forwards)}
    changed = set()
    for one in reversed(generation.trace.forwards):
        for change in one.changes:
            place = change.position
            assert (ids[place], born[place]) == (change.after, index_of[id(one)])
            ids[place], born[place] = change.before, change.born
            changed.add(place)
    assert set(born) == {1, STEPS + 2}
    assert changed == set(range(2 * CANVAS)), "a random model changes its mind everywhere"
    writes = generation.trace.writes(generation.born)
    assert sum(one.committed for one in writes) == len(generation.ids)
    assert [one.committed for one in writes if one.committed] == [CANVAS, CANVAS]
    assert Trace.from_columns(generation.trace.columns()).forwards == generation.trace.forwards


@pytest.mark.parametrize("batch", [2, 3])
def test_batched_requests_are_decoded_as_alone(batch: int) -> None:
    decoder = canvas_decoder(anneal__steps=STEPS)
    asked = [request(1 + seed % 3, seed, 3 + seed) for seed in range(5)]
    alone = {one.id: facts(decoder.generate(model(), one)) for one in asked}
    assert {g.request_id: facts(g) for g in decoder.generate_stream(model(), asked, batch)} == alone


def test_its_own_count_of_tokens_per_forward_leaves_encoding_out() -> None:
    counts = count_sample(denoised(request(1.5), **NEVER), model().special)
    assert (counts["encoding"], counts["through_end"]) == (2, 2 * CANVAS)
    stats = sample(**counts)
    assert measure("tpf/diffusion_gemma", [stats]) == pytest.approx(2 * CANVAS / (2 * STEPS))
    assert measure("tpf/committed", [stats]) == pytest.approx(2 * CANVAS / (2 * STEPS + 2))
    assert measure("tpf/emitted", [stats]) == pytest.approx(1.5 * CANVAS / (2 * STEPS + 2))
