"""Laws of speculative decoding: the text is the target's own, whatever drafts it.

Greedy text equals plain autoregressive text for every draft there is, also for drafts that are
wrong on purpose; `test_speculative_batch_laws` tests sampled text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.denoiser import AddedRows, ForwardPlan
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler
from dllm_bench.core.trace import Forward, ForwardKind
from dllm_bench.decoding.speculative import FixedLength, GreedyMatch, Rejection, SpeculativeDecoder
from dllm_bench.methods.causal_masks import BidirectionalDraft, StridedDraft
from dllm_bench.methods.drafting import (
    AdversarialDraft,
    ModelDraft,
    NGramDraft,
    NoDraft,
    RandomDraft,
)
from dllm_bench.methods.trained_drafts import (
    DDTree,
    DFlash,
    DFlash2,
    DSpark,
    Eagle3,
    likeliest_tree,
)
from dllm_bench.metrics import drafts
from dllm_bench.metrics.sample_stats import count_sample
from dllm_bench.models.acceleration import FixedShapeDenoiser
from dllm_bench.models.drafters import SmallModelDrafter, TrainedBlockDrafter, TrainedChainDrafter
from dllm_bench.models.transformer import TransformerDenoiser
from tests import helpers
from tests.speculative import DRAFTERS, Chain, FromDistribution, write_drafter
from tests.tiers import covering

PROMPTS = [(5,), (3, 9, 27, 3, 9), tuple(range(2, 40))]
NEW = 20


def trained(folder: Path, name: str) -> Draft:
    source = write_drafter(folder / name, DRAFTERS[name], seed=4)
    if name == "eagle3":
        return Eagle3(TrainedChainDrafter(source))
    kind = DFlash2 if name.startswith("dflash2") else DFlash
    return (DSpark if name.startswith("dspark") else kind)(TrainedBlockDrafter(source))


def tree(folder: Path, name: str, budget: int, width: int | None = None) -> DDTree:
    source = write_drafter(folder / name, DRAFTERS[name], seed=4)
    return DDTree(TrainedBlockDrafter(source), budget=budget, width=width)


def speculative(draft: Draft, **settings: Any) -> SpeculativeDecoder:
    """Return a decoder with a rule of verification that the draft fits."""
    if isinstance(draft, DDTree):
        settings = {"verify": GreedyMatch()} | settings
    return SpeculativeDecoder(draft, **settings)


MAKERS: dict[str, Callable[[Path], Draft]] = {
    **{name: (lambda folder, name=name: trained(folder, name)) for name in DRAFTERS},
    "ddtree": lambda folder: tree(folder, "dflash_zlab", 7),
    "ddtree_released": lambda folder: replace(tree(folder, "dflash_zlab", 2), released=True),
    "ddtree_deepspec": lambda folder: tree(folder, "dflash", 12),
    "none": lambda folder: NoDraft(),
    "ngram": lambda folder: NGramDraft(5, 2),
    "always_wrong": lambda folder: FromDistribution(3),
    "random": lambda folder: RandomDraft(3),
    "adversarial": lambda folder: AdversarialDraft(3),
    "model": lambda folder: ModelDraft(
        SmallModelDrafter(str(helpers.tiny_checkpoint("qwen3", folder / "small", 7))), 3
    ),
    "strided": lambda folder: StridedDraft(3),
    "bidirectional": lambda folder: BidirectionalDraft(5),
    "bidirectional_shifted": lambda folder: BidirectionalDraft(5, shifted=True),
    "target_itself": lambda folder: ModelDraft(SmallModelDrafter(str(folder / "target")), 4),
}


@pytest.fixture(scope="module", params=covering(3, MAKERS))
def draft(request: pytest.FixtureRequest, folder: Path, target: TransformerDenoiser) -> Draft:
    return MAKERS[request.param](folder)


@lru_cache
def plain_text(model: TransformerDenoiser, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    """Greedy next tokens, the whole text fed every time, until the end token."""
    text: list[int] = []
    while len(text) < new and model.special.eos not in text:
        text.append(int(helpers.fed_causally(model, [*prompt, *text])[0][0, -1].argmax()))
    return tuple(text)


def verified(generation: Generation) -> list[Forward]:
    """Return the forwards that verify."""
    return [row for row in generation.trace.forwards if row.kind == ForwardKind.VERIFY]


def greedy(draft: Draft, target: Any, prompt: Any, new: int = NEW, **settings: Any) -> Generation:
    """Return a generation, after checking that its text is the target's own."""
    generation = speculative(draft, **settings).generate(target, Request("greedy", prompt, new))
    assert generation.ids[: generation.cut["length"]] == plain_text(target, prompt, new)
    return generation


@pytest.mark.parametrize("verify", [Rejection(), GreedyMatch()], ids=["rejection", "match"])
def test_greedy_text_is_the_targets_own(draft, verify, target) -> None:
    if not isinstance(verify, GreedyMatch) and isinstance(draft, DDTree):
        pytest.skip("refused")
    for prompt in PROMPTS:
        greedy(draft, target, prompt, verify=verify)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_the_verified_length_does_not_change_the_text(draft, tokens, target) -> None:
    rows = verified(greedy(draft, target, PROMPTS[1], length=FixedLength(tokens)))
    assert max(row.proposed for row in rows) <= tokens
    if tokens == 0:
        assert len(rows) == NEW - 1 and all((row.fed, row.accepted) == (1, 0) for row in rows)


def test_the_end_inside_of_a_block_ends_the_text(draft, folder, target) -> None:
    """Tokens of the plain text in turn are made the end token."""
    model, plain = helpers.load_denoiser(folder / "target"), plain_text(target, PROMPTS[1], NEW)
    for end in {*plain[1::4]}:
        model.special = SpecialTokens(mask=helpers.ROLES["mask"], eos=end)
        generation = speculative(draft).generate(model, Request("end", PROMPTS[1], NEW))
        wanted = plain[: plain.index(end) + 1]
        assert generation.ids == wanted
        assert generation.cut["eos"] == generation.end == len(wanted) - 1


@pytest.mark.parametrize("new", [1, 2, 3])
def test_short_answers(draft: Draft, new: int, target: TransformerDenoiser) -> None:
    generation = greedy(draft, target, PROMPTS[2], new)
    assert generation.end == generation.cut["length"] == new
    assert (len(generation.trace) == 1) == (new == 1), "the prefill alone decides one token"
    if isinstance(draft, DFlash2):
        assert [row.proposed for row in verified(generation)][:1] == [new - 1][: new - 1]


# --- caches, trace, requests in turn --------------------------------------------------------------


def kept(kv: Any) -> list[Tensor]:
    """Keys and values of the positions a cache holds."""
    return [part[:, :, : kv.length] for layer in kv.positions for part in layer.stored]


def test_caches_hold_the_committed_prefix(draft: Draft, target: TransformerDenoiser) -> None:
    """Their length after every draft; their content at the end, and what is drafted from it."""
    observed, forwards = helpers.noting(target, "forward", keep=lambda _, plan, kv: (plan.kind, kv))
    rounds: list[tuple[Context, Proposal]] = []
    drawing = Sampler(0.0, torch.zeros)  # of a drafter that draws even where the target does not

    def held() -> Any:
        """Return the target's cache; a drafter may ask the target too."""
        return next(kv for (kind, kv), _ in reversed(forwards) if kind != ForwardKind.DRAFT)

    def propose(self: Draft, context: Context, sampler: Sampler) -> Proposal:
        assert held().length == context.anchor, "the target holds the prefix"
        assert context.ahead_DV is None or not isinstance(draft, DDTree), "no tree's logits"
        rounds.append((context, draft.propose(context, drawing)))
        assert context.kv is None or context.kv.length == context.anchor, "so does the drafter"
        return rounds[-1][1]

    decoder = speculative(helpers.with_method(draft, "propose", propose))
    generation = decoder.generate(observed, Request("kv", PROMPTS[1], NEW))
    text = [*PROMPTS[1], *generation.ids]
    _, once = helpers.fed_causally(target, text[:-1], draft.feature_layers)
    assert held().length == once.length == len(text) - 1
    torch.testing.assert_close(kept(held()), kept(once), atol=1e-4, rtol=1e-4)
    last, proposal = rounds[-1]
    features = None if once.features is None else once.features[:, : last.anchor]
    draft_kv = draft.new_cache(target, len(text) + draft.longest)
    again = replace(last, features_1FC=features, target=target, kv=draft_kv)
    assert draft.propose(again, drawing).tokens_D.tolist() == proposal.tokens_D.tolist()
    if draft_kv is not None:
        torch.testing.assert_close(kept(last.kv), kept(draft_kv), atol=1e-4, rtol=1e-4)


def test_facts_add_up(draft: Draft, target: TransformerDenoiser) -> None:
    request = Request("trace", PROMPTS[2], NEW, seed=3)
    generation = speculative(draft, temperature=1.0).generate(target, request)
    rows = generation.trace.forwards
    position = len(PROMPTS[2])
    assert (rows[0].kind, rows[0].fed, rows[0].cached) == (ForwardKind.PREFILL, position, 0)
    for index, row in enumerate(rows[1:], start=1):
        if row.kind in (ForwardKind.DRAFT, ForwardKind.SELF_DRAFT):
            assert generation.born.count(index) == 0 and row.calls >= 1
            continue
        if row.kind == ForwardKind.HEAD:
            assert rows[index - 1].kind == ForwardKind.DRAFT
            assert (row.fed, row.calls) == (0, len(rows[index + 1].drafted))
            continue
        new = generation.born.count(index)
        ended = generation.ids[-1] == target.special.eos and index == len(rows) - 1
        assert new == row.accepted + 1 or (ended and new == row.accepted)
        assert (row.fed, row.cached) == (row.proposed + 1, position)
        follows = generation.ids[position - len(PROMPTS[2]) + 1 :]
        if isinstance(draft, DDTree):
            assert drafts.right_tokens(row, follows) >= row.accepted
        else:
            assert row.drafted[: row.accepted] == follows[: row.accepted]
        estimated = "survival estimates" in draft.gives
        assert len(row.survival) == (len(row.drafted) if estimated else 0)
        position += new
    assert generation.born == tuple(sorted(generation.born))
    assert len(generation.born) == len(generation.ids) == position - len(PROMPTS[2]) + 1
    found = drafts.rounds_of(generation.trace, generation.born)
    assert sum(r.committed for r in found) == len(generation.ids) - 1, "all but the prefill's"
    headed = any(row.kind == ForwardKind.HEAD for row in rows)
    assert headed == isinstance(draft, DSpark | DFlash2), "the drafts whose head is timed apart"


def rights(generation: Generation) -> dict[int, int]:
    """Number of committed tokens before a round -> first tokens of its whole draft that follow."""
    found = drafts.speculative_columns(generation.trace, generation.born, generation.ids)
    committed = accumulate((made for _, _, made, *_ in found["rounds"]), initial=1)
    return dict(zip(committed, found["right"], strict=False))


def test_what_a_whole_draft_is_worth_does_not_depend_on_how_much_is_verified(draft, target) -> None:
    """Greedily: a text verified in full accepts what is right; one that verifies none knows it."""
    if isinstance(draft, StridedDraft):
        pytest.skip("the forward that verifies a draft makes the next one")
    request = Request("right", PROMPTS[1], NEW)
    whole = speculative(draft).generate(target, request)
    none = speculative(draft, length=FixedLength(0)).generate(target, request)
    accepted = [made.accepted for made in drafts.rounds_of(whole.trace, whole.born)]
    assert list(rights(whole).values()) == accepted
    for at, right in rights(whole).items():
        left = NEW - at  # what follows the limit is not decoded one by one
        assert min(rights(none)[at], left) == min(right, left)


def test_equal_inputs_equal_tokens_and_no_request_leaks(draft, target) -> None:
    decoder = speculative(draft, temperature=0.8)
    first, second = Request("a", PROMPTS[1], NEW, seed=1), Request("b", PROMPTS[2], NEW, seed=2)
    alone = decoder.generate(target, second)
    decoder.generate(target, first)
    after = decoder.generate(target, second)
    assert (after.ids, after.born) == (alone.ids, alone.born)
    assert decoder.generate(target, replace(second, seed=5)).ids != alone.ids
    assert decoder == speculative(draft, temperature=0.8)
    assert hash(decoder) == hash(speculative(draft, temperature=0.8))


def test_a_drafter_that_is_the_target_has_every_token_accepted(folder: Path, target: Any) -> None:
    for temperature in (0.0, 0.7):
        decoder = SpeculativeDecoder(MAKERS["target_itself"](folder), temperature=temperature)
        generation = decoder.generate(target, Request("own", PROMPTS[1], NEW, seed=1))
        assert all(row.accepted == row.proposed == 4 for row in verified(generation)[:-1])


def test_ngram_proposes_what_followed() -> None:
    def propose(*tokens: int) -> list[int]:
        context = Context(torch.tensor(tokens), None, None, None)  # type: ignore[arg-type]
        return NGramDraft(3, 2).propose(context, Sampler(0.0, torch.zeros)).tokens_D.tolist()

    assert propose(1, 2, 3, 4, 5, 1, 2) == [3, 4, 5]
    assert propose(7, 2, 3, 1, 2, 9, 8, 1, 2) == [9, 8, 1], "the longer match, the later one"
    assert propose(7, 2, 3, 6, 2) == [3, 6, 2], "a shorter one where there is no longer"
    assert [propose(1, 2, 3), propose(4), propose(4, 4)] == [[], [], [4]]
    assert max(propose(*[helpers.VOCAB - 1] * 5)) == helpers.VOCAB - 1


# --- trees ---------------------------------------------------------------------------------------


def rounds_with(draft: Draft, target: TransformerDenoiser, temperature: float) -> list[Any]:
    """Tokens, and what each round drafted and accepted."""
    decoder = SpeculativeDecoder(draft, GreedyMatch(), temperature=temperature)
    generation = decoder.generate(target, Request("r", PROMPTS[1], NEW, seed=2))
    return [generation.ids, *((r.drafted, r.accepted, r.fed) for r in verified(generation))]


@pytest.mark.parametrize("name", ["dflash", "dflash_zlab"])
def test_a_tree_of_width_one_is_the_drafters_chain(name: str, folder: Path, target: Any) -> None:
    """With the same random numbers, one of each row."""
    chain, thin = trained(folder, name), tree(folder, name, budget=64, width=1)
    for temperature in (0.0, 0.7):
        assert rounds_with(thin, target, temperature) == rounds_with(chain, target, temperature)


def test_a_tree_holds_the_most_probable_prefixes() -> None:
    """Of all 3 + 9 + 27 there are."""
    logits_NV = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    log_NV = logits_NV.log_softmax(-1).double()
    prefixes = [p for length in (1, 2, 3) for p in product(range(3), repeat=length)]
    scores = {p: float(sum(log_NV[at, token] for at, token in enumerate(p))) for p in prefixes}
    for budget in (1, 5, 20, 39, 50):
        tokens_D, parents_D = likeliest_tree(logits_NV, budget)
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens_D.tolist(), parents_D.tolist(), strict=True):
            found.append((*found[parent], token))
        assert found[1:] == sorted(prefixes, key=scores.__getitem__, reverse=True)[:budget]


def test_a_tree_has_draftable_tokens_alone(folder: Path, target: TransformerDenoiser) -> None:
    """Whether or not its budget is larger than the draft vocabulary."""
    ids = [3, 9, 27]
    few = write_drafter(folder / "few", DRAFTERS["dflash"] | {"draft_token_ids": ids}, seed=4)
    for budget, nodes in ((7, 7), (9, 9), (40, 39)):
        draft = DDTree(TrainedBlockDrafter(few), slots=3, budget=budget)
        for tokens, _, _ in rounds_with(draft, target, 0.7)[1:]:
            assert set(tokens) <= set(ids) and len(tokens) == nodes


def test_forwards_of_fixed_shapes_keep_the_accepted_path(folder, target) -> None:
    """Their keys and values are in one store for all layers."""
    fixed = FixedShapeDenoiser(target.module, target.special, True, attention_form="causal")
    draft = tree(folder, "dflash_zlab", 12)
    for prompt in PROMPTS:
        request = Request("fixed", prompt, NEW)
        found, wanted = (speculative(draft).generate(m, request) for m in (fixed, target))
        assert (found.ids, found.born) == (wanted.ids, wanted.born)
    assert fixed.shapes_met


# --- targets that draft for themselves: at masks, or in a block of masks --------------------------

MASK, LENGTH = 3, 21
SPECIAL = SpecialTokens(mask=MASK, eos=helpers.VOCAB)


def counting(at_mask: int) -> Chain:
    """Return a target that repeats its last token, which is 1, and says `at_mask` after a mask."""
    table_VV = torch.eye(4)
    table_VV[MASK] = torch.nn.functional.one_hot(torch.tensor(at_mask), 4)
    return Chain(SPECIAL, table_VV)


def decode(model: Any, draft: Draft, verified: int | None = None) -> Generation:
    decoder = SpeculativeDecoder(draft, length=FixedLength(verified))
    return decoder.generate(model, Request("self", (2, 1), LENGTH))


def committed(generation: Generation) -> list[int]:
    """Return tokens of each forward."""
    return [generation.born.count(index) for index in range(len(generation.trace))]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_masks_that_are_right_commit_a_whole_stride_a_round(tokens: int) -> None:
    """The prompt's forward and the first round, which has no draft, commit one token each."""
    found = decode(counting(at_mask=1), StridedDraft(tokens))
    assert (set(found.ids), committed(found)[:2]) == ({1}, [1, 1])
    assert set(committed(found)[2:]) == {tokens + 1}
    assert {row.fed for row in found.trace.forwards[2:]} == {2 * tokens + 1}


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_after_a_rejection_a_round_has_masks_alone(tokens: int, cut: int) -> None:
    """However many of them are verified, if that are enough for the next draft."""
    found = decode(counting(at_mask=2), StridedDraft(tokens), max(tokens, 2 * tokens - cut))
    assert set(found.ids) == {1}
    assert committed(found) == [1] * LENGTH, "no round costs more than plain decoding"
    assert [len(row.drafted) for row in found.trace.forwards[1:5]] == [tokens, 2 * tokens] * 2


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_block_that_is_right_is_committed_with_the_targets_own_token(tokens: int) -> None:
    model = counting(at_mask=1)
    found = decode(model, BidirectionalDraft(tokens))
    assert set(found.ids) == {1}
    kinds = [row.kind for row in found.trace.forwards]
    assert kinds[:3] == [ForwardKind.PREFILL, ForwardKind.SELF_DRAFT, ForwardKind.VERIFY]
    assert set(committed(found)[2::2]) == {tokens + 1}
    counts = count_sample(found, model.special)
    assert counts["forwards"] == len(kinds), "a draft of the model's own counts as a forward"


@pytest.mark.parametrize("shifted", [False, True])
def test_a_block_sees_itself_and_the_causal_text_before_it(shifted: bool) -> None:
    """Drafts are those of one forward over the whole text, under a mask of that form."""
    model, tokens = helpers.tiny_denoiser("nemotron_diffusion", 3), 4
    model.attention_form, model.shifted = "causal", True  # as configured for this mode
    watched: Any = helpers.Watched(model)
    draft = BidirectionalDraft(tokens, shifted)
    found = SpeculativeDecoder(draft).generate(watched, Request("self", (5, 9, 2, 7), LENGTH))
    rows = verified(found)
    feeds = [plan.feed for plan in watched.plans if plan.kind == ForwardKind.SELF_DRAFT]
    assert len(rows) == len(feeds) > 3
    text = [5, 9, 2, 7, *found.ids]
    for row, (anchor, _) in zip(rows, feeds, strict=True):
        wanted_DV = whole_forward(model, text[: anchor + 1], tokens, shifted)
        assert row.drafted == tuple(wanted_DV.argmax(-1).tolist())


def whole_forward(model: Any, text: list[int], tokens: int, shifted: bool) -> Tensor:
    """Return logits of the slots (D, V), nothing cached."""
    length = len(text) + tokens
    place_F = torch.arange(length)
    block_F = place_F >= len(text) - 1
    sees_FF = (place_F <= place_F[:, None]) | block_F & block_F[:, None]
    nothing_E, first = torch.empty(0, dtype=torch.long), len(text) + (not shifted)
    spans, added = ((0, length), (first, first + tokens), (0, 0)), (nothing_E, nothing_E, sees_FF)
    plan = ForwardPlan(ForwardKind.SELF_DRAFT, *spans, added=AddedRows(*added))
    canvas_1L = torch.tensor([text + [model.special.mask] * tokens])
    return model.forward(canvas_1L, plan, model.new_cache(length))[0]
