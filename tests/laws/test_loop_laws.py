"""Laws of the loop beyond the pieces: guidance, autoregressive decoding, cut canvases, tensor ops.

Each is compared with the rule written down a second time on whole forwards of the same tiny model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_bench.core.contracts import Stop
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Request
from dllm_bench.core.state import MASKED
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, CausalCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import (
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
from dllm_bench.methods.fast_dllm import Factor, Hierarchy, Ration
from dllm_bench.methods.history import Credit
from tests.helpers import ROLES, tiny_denoiser
from tests.pieces import decoders
from tests.tiers import covering

REQUEST = Request("loop", tuple(range(3, 14)), 32)
BASE = MaskedDecoder(Confidence(), Threshold(0.3), Blocks(8), NoCache())


def whole_forward(model, tokens_1L: torch.Tensor) -> torch.Tensor:
    """Return logits of every position, nothing cached, full attention."""
    length = tokens_1L.shape[1]
    plan = ForwardPlan(ForwardKind.DENOISE, (0, length), (0, length), (0, 0))
    return model.forward(tokens_1L, plan, model.new_cache(length))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_guidance_is_the_published_formula(model, scale) -> None:
    """LLaDA's semi-autoregressive loop with guidance, one token per forward, written down."""
    prompt = len(REQUEST.prompt_ids)
    x = torch.full((1, prompt + 16), ROLES["mask"])
    x[0, :prompt] = torch.tensor(REQUEST.prompt_ids)
    for step in range(16):
        blind = x.clone()
        blind[:, :prompt] = ROLES["mask"]
        with_prompt, without = whole_forward(model, x)[0], whole_forward(model, blind)[0]
        logits = without + (scale + 1) * (with_prompt - without)
        logits[:, ROLES["mask"]] = -torch.inf
        sure, ids = logits.softmax(-1).max(-1)
        begin = prompt + step // 8 * 8
        sure[:begin], sure[begin + 8 :] = -1, -1
        sure[x[0] != ROLES["mask"]] = -1
        x[0, sure.argmax()] = ids[sure.argmax()]
    decoder = replace(BASE, select=TopK(), guidance=scale)
    generation = decoder.generate(model, replace(REQUEST, max_new_tokens=16))
    assert list(generation.ids) == x[0, prompt:].tolist()
    assert {forward.branches for forward in generation.trace.forwards} == {2}
    plain = replace(decoder, guidance=0.0).generate(model, replace(REQUEST, max_new_tokens=16))
    assert plain.ids != generation.ids


def test_guidance_goes_with_lookahead_and_pipeline(model) -> None:
    decoder = replace(BASE, schedule=Pipeline(8, 0.1, 0.5), explore=Lookahead(2), guidance=1.0)
    generation = decoder.generate(model, REQUEST)
    assert MASKED not in generation.born
    assert {forward.branches for forward in generation.trace.forwards} <= {2, 4, 6}


def test_autoregressive_decoding_is_greedy_next_token_prediction() -> None:
    """Against whole causal forwards of transformers' own module."""
    model = tiny_denoiser("dream", seed=2)
    tokens = list(REQUEST.prompt_ids)
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


def test_absolute_blocks_overlap_the_prompt(model) -> None:
    """Prompt of 11, blocks of 8: 5 positions until 16, then 8 and 8, then what is left."""
    decoder = replace(BASE, schedule=Blocks(8, absolute=True), select=TopK())
    generation = decoder.generate(model, replace(REQUEST, max_new_tokens=23))
    blocks = [generation.born[i:j] for i, j in ((0, 5), (5, 13), (13, 21), (21, 23))]
    assert [sorted(block) for block in blocks] == [
        list(range(5)),
        list(range(5, 13)),
        list(range(13, 21)),
        list(range(21, 23)),
    ]


def test_whole_blocks_are_decoded_and_cut_to_the_length_asked_for(model) -> None:
    schedule = Blocks(8, sees_future=False, absolute=True, whole=True)
    decoder = replace(BASE, schedule=schedule, cache=BlockCache())
    generation = decoder.generate(model, replace(REQUEST, max_new_tokens=10))
    assert len(generation.ids) == 13 and generation.cut["length"] == 10


@pytest.mark.parametrize("new", [1, 4])
def test_a_filled_up_block_may_take_more_forwards_than_were_asked_for(model, new) -> None:
    """Prompt of 11 in blocks of 32: 21 positions are decoded, one by one, for a token or four."""
    schedule = Blocks(32, sees_future=False, absolute=True, whole=True)
    decoder = replace(BASE, schedule=schedule, select=TopK(), cache=BlockCache())
    generation = decoder.generate(model, replace(REQUEST, max_new_tokens=new))
    assert len(generation.trace) == 21 and generation.cut["length"] == new


@pytest.mark.parametrize("explore", [Greedy(), Lookahead(3)], ids=["greedy", "lookahead"])
def test_a_budget_is_kept(model, explore) -> None:
    decoder = replace(BASE, select=Threshold(1.0, strict=True), explore=explore, stop=Budget(5))
    generation = decoder.generate(model, REQUEST)
    assert len(generation.trace) == 5
    assert sum(born != MASKED for born in generation.born) >= 5


@dataclass(frozen=True)
class CutAt(Stop):
    """Give up what lies beyond `length` after the second forward."""

    length: int

    def on_commit(self, round) -> None:
        state = round.state
        round.cut(torch.tensor(self.length if state.forwards >= 1 else state.length))


@pytest.mark.parametrize(
    "schedule", covering(3, [Blocks(8), Blocks(None), Pipeline(8, 0.5, 0.5)]), ids=str
)
@pytest.mark.parametrize("explore", [Greedy(), Lookahead(2)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize(
    "cache", [NoCache(), BlockCache("full"), PrefixCache(), DualCache()], ids=str
)
def test_a_cut_canvas_stays_cut(model, schedule, explore, cache) -> None:
    slow = replace(BASE, select=Threshold(1.0, strict=True), explore=explore)
    decoder = replace(slow, schedule=schedule, cache=cache)
    whole = decoder.generate(model, REQUEST)
    cut = replace(decoder, stop=CutAt(11 + 19)).generate(model, REQUEST)
    assert len(cut.ids) == 19 and MASKED not in cut.born
    early = [i for i, born in enumerate(whole.born[:19]) if born < 2]
    assert [cut.ids[i] for i in early] == [whole.ids[i] for i in early]
    seen = [forward.fed + forward.cached for forward in cut.trace.forwards[2:]]
    assert max(seen) <= 30
    gone = replace(decoder, stop=CutAt(11)).generate(model, REQUEST)
    assert len(gone.trace) == 2 and gone.ids == ()


class Ops(TorchDispatchMode):
    """Counts the tensor operations made inside of it."""

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
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(64, model.vocab_size, generator=generator)

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
ONE_BLOCK = replace(BASE, schedule=Blocks(None), select=TopK(STEPS))


@pytest.mark.parametrize(
    "decoder",
    [
        *(replace(ONE_BLOCK, score=score) for score in (Margin(), NegEntropy())),
        *(replace(ONE_BLOCK, score=Credit(Confidence(), full_distribution=f)) for f in (0, 1)),
        *(
            replace(ONE_BLOCK, select=Union(TopK(STEPS), select))
            for select in (
                Threshold(1.0, strict=True),
                Factor(1e-9),
                Hierarchy(1.0, 1.0),
                Epsilon(STEPS),
            )
        ),
        replace(ONE_BLOCK, select=Ration(Threshold(0.0), STEPS), stop=Eos("token")),
        replace(ONE_BLOCK, explore=Lookahead(2, alpha=0.5, fraction=0.5)),
    ],
    ids=lambda decoder: f"{decoder.score}-{decoder.select}-{decoder.explore}",
)
def test_tensor_operations_do_not_grow_with_the_window(decoder, model) -> None:
    """No operation per position: windows of 16 and of 64 cost the same number in as many steps."""
    assert operations(decoder, 16, model) == operations(decoder, 64, model)


OPERATIONS = {"vanilla": 691, "dream": 916, "fast_dllm": 953, "eb_sampler": 1203}
"""Operations of 16 positions; one fewer than before committed tokens could be revised."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_decoder_makes_no_operation_for_what_it_does_not_use(name: str) -> None:
    """Above all for a reviser: raise a number only for what the decoder itself has to do."""
    model = tiny_denoiser("llada", seed=1)
    assert operations(decoders()[name], 16, model).total() == OPERATIONS[name]
