"""What pieces and decoders refuse: settings without sense, and parts that do not fit each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from dllm_bench.core.declared import in_words
from dllm_bench.core.decoder import parts_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Option, Request
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, CausalCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import (
    AnyOf,
    Best,
    Blocks,
    Confidence,
    Eos,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
    Union,
)
from dllm_bench.methods.confidence_rules import AnswerGap, EntropyBound, SlowFast, WithEntropy
from dllm_bench.methods.d3llm import EndFill
from dllm_bench.methods.drafting import NGramDraft, NoDraft, StepProfile, SurvivalThreshold
from dllm_bench.methods.dream import Epsilon, Gumbel, Origin, Sampled
from dllm_bench.methods.fast_dllm import HierarchicalCache, Ration, SubBlocks
from dllm_bench.methods.history import Credit, Stable
from dllm_bench.methods.learn2pd import EndOfTextPrediction, Filter, Oracle
from dllm_bench.methods.lengths import Daedal
from dllm_bench.methods.likelihood import LikelihoodDecoder
from dllm_bench.methods.position_caches import (
    D2Cache,
    Density,
    DKVCache,
    DKVGreedyCache,
    DPadCache,
    Drawn,
    SparseCache,
)
from dllm_bench.methods.position_rules import TokenCounts
from dllm_bench.methods.row_caches import DLLMCache, ElasticCache
from dllm_bench.methods.trained_drafts import HardwareAwareLength
from dllm_bench.paths import read_yaml
from tests.helpers import tiny_denoiser
from tests.pieces import SLOTS, RandomHead, Table, decoders, pieces

BASE = MaskedDecoder(Confidence(), TopK(), Blocks(8), NoCache())
GREEDY = replace(BASE, select=Drawn(), cache=DKVGreedyCache(every=3, window=2))
GROWS = replace(BASE, select=Threshold(0.4, strict=True), schedule=Daedal(8, 4))
REQUEST = Request("refused", tuple(range(3, 14)), 24)
FLAT = StepProfile((1, 64), (1.0, 1.0))
PIPELINE = Pipeline(8, 0.1, 0.95)
OPTION = Option(tuple(range(20, 27)), tuple(range(5, 11)))
Make = Callable[[], Any]
fit = partial(replace, BASE)


def decode(decoder: Any, layout: str = "llada", **changes: Any) -> None:
    decoder.generate(tiny_denoiser(layout, 1), replace(REQUEST, **changes))


def declared(kind: type) -> dict[str, Any]:
    """Field -> its type, of those that declare a range or choices."""
    hints = get_type_hints(kind, include_extras=True)
    types = {field.name: hints[field.name] for field in fields(kind) if field.init}
    return {name: kind for name, kind in types.items() if re.search("Range|Literal", str(kind))}


@pytest.mark.parametrize("slot", SLOTS)
def test_a_setting_outside_of_what_a_piece_declares_is_refused(slot: str) -> None:
    """Of every configured piece: -3 is in no range and no choice that is declared."""
    for piece in pieces(slot).values():
        kind = type(piece)
        for name, words in declared(kind).items():
            sentence = f"{kind.__name__} has {name} -3; give {in_words(words)}"
            with pytest.raises(DllmBenchError, match=re.escape(sentence)):
                replace(piece, **{name: -3})  # type: ignore[type-var]


EDGES = read_yaml(Path(__file__).with_name("edges.yaml"))


@pytest.mark.parametrize("kind", EDGES)
def test_a_setting_just_outside_of_what_is_allowed_is_refused(kind: str) -> None:
    wholes = [piece for slot in SLOTS for piece in pieces(slot).values()]
    parts: list[Any] = [part for whole in wholes for part in (whole, *parts_of(whole))]
    piece = next(part for part in parts if type(part).__name__ == kind)
    for name, value in EDGES[kind].items():
        with pytest.raises(DllmBenchError, match=re.escape(f"{name} {value!r}")):
            replace(piece, **{name: value})


SETTINGS: list[tuple[Make, str]] = [
    (partial(SubBlocks, 8, 3), "block of 8 and small 3.*divides"),
    (partial(BlockCache, "full", reuse="exact"), "choose reuse approximate or none"),
    (partial(fit, forbid="mask"), "forbid 'mask'; give 'eos' or 'eot' or 'ends'"),
    (partial(fit, smoothing=-0.1), "smoothing -0.1; give a number of 0"),
    (partial(Credit, Credit(Confidence())), "Credit has another Credit"),
    (partial(Origin, alg_temp=1.0), "the same at every mask"),
    (partial(Origin, 4, eps=2.0), "Origin has eps 2.0"),
    (partial(Origin, 4, ties="canvas"), "Origin has alg_temp None and ties canvas"),
    (partial(Lookahead, 2, sliding=4, fraction=0.5), "sliding 4 and fraction 0.5"),
    (partial(Lookahead, 3, base_wins=True, base_competes=False), "change one of the two"),
    (partial(SlowFast, 0.9, 0.3, explores=1), "SlowFast has explores 1"),
    (partial(TokenCounts, "nowhere.json"), "There are no token counts 'nowhere.json'"),
    (partial(WithEntropy, Confidence(last="ends")), "inner score has last 'ends'"),
    (partial(LikelihoodDecoder, draws=40), r"make decoder\.draws a multiple"),
    (partial(LikelihoodDecoder, block=0), "1 or more"),
]


PARTS: list[tuple[Make, str]] = [
    *(
        (partial(fit, cache=DPadCache(inner)), f"DPadCache needs a inner with spans .*{inner}")
        for inner in (DKVCache(), DKVGreedyCache(), DLLMCache(), SparseCache(), DPadCache())
    ),
    (
        partial(replace, GREEDY, score=Credit(Confidence())),
        "DKVGreedyCache needs a score with scores of each row alone.*Credit",
    ),
    (
        partial(replace, GREEDY, select=TopK()),
        "DKVGreedyCache needs a select with an order that is",
    ),
    (
        partial(fit, score=Density(NegEntropy())),
        "Density needs a inner with probabilities.*NegEntropy",
    ),
    (
        partial(fit, score=Credit(Confidence()), select=Best(1), cache=D2Cache()),
        "D2Cache needs a score with raw confidence",
    ),
    (
        partial(fit, schedule=Blocks(None), cache=ElasticCache(4, 0.9), explore=Lookahead(3)),
        "ElasticCache needs a explore with",
    ),
    *(
        (partial(replace, GROWS, **parts), f"{name}.*choose another")
        for name, parts in {
            "DualCache": {"cache": DualCache()},
            "Lookahead": {"explore": Lookahead(2)},
            "Credit": {"score": Credit(Confidence())},
            "EndFill": {"revise": EndFill(), "stop": Eos("token", turn_end=False)},
            "EndOfTextPrediction": {"stop": AnyOf((Filled(), EndOfTextPrediction()))},
            "Oracle": {"select": Union(Threshold(0.9), Oracle())},
            "TopK": {"select": TopK(4)},
            "smoothing": {"smoothing": 0.3},
        }.items()
    ),
    (
        partial(fit, select=Filter(RandomHead(block=16))),
        "Filter needs a schedule with blocks of 16",
    ),
    (
        partial(fit, select=Oracle(BASE), schedule=Blocks(16)),
        "Oracle needs a schedule with blocks of 8",
    ),
    (
        partial(fit, score=Credit(Confidence()), explore=Lookahead(3, reads="raw")),
        "Lookahead needs a score with raw confidence.*Credit",
    ),
    *(
        (partial(fit, cache=cache, guidance=1.0), f"guidance 1.0 needs .* {type(cache).__name__}")
        for cache in (PrefixCache(), DualCache(), BlockCache())
    ),
    (partial(fit, schedule=PIPELINE), "TopK needs a schedule with .*Pipeline does not"),
    *(
        (partial(fit, select=select, schedule=PIPELINE), "with one open block at a time")
        for select in (Epsilon(), Origin(), Ration(Threshold(0.9), 2))
    ),
    (
        partial(fit, score=Gumbel(Credit(Confidence()))),
        "Gumbel needs a inner with scores of the logits alone.*Credit",
    ),
    (
        partial(fit, score=Sampled(Gumbel())),
        "Sampled needs a inner with scores of the logits alone.*Gumbel",
    ),
    (
        partial(fit, smoothing=0.3, guidance=1.0),
        "smoothing 0.3 needs a guidance with one prompt, which guidance 1.0",
    ),
    (
        partial(fit, smoothing=0.3, cache=CausalCache(), schedule=Blocks(1)),
        "smoothing 0.3 needs a cache with",
    ),
    (partial(fit, select=EntropyBound(0.1)), "EntropyBound needs a score with"),
    (partial(fit, select=Stable(TopK(), 0.9, 0.1)), "divergences from earlier"),
    (partial(fit, score=AnswerGap()), "the whole generation as one block"),
    (
        partial(replace, decoders()["dmax"], explore=Lookahead(2)),
        "SoftRevision needs a explore with one branch",
    ),
    *(
        (
            partial(SpeculativeDecoder, NGramDraft(3, 2), length=length),
            f"{type(length).__name__} needs a draft with survival estimates",
        )
        for length in (HardwareAwareLength(FLAT), SurvivalThreshold(0.5))
    ),
]


REQUESTS: list[tuple[Make, str]] = [
    (
        partial(
            decode,
            MaskedDecoder(
                Confidence(), Threshold(0.3), SubBlocks(8, 4), HierarchicalCache(inside=True)
            ),
            "sdar",
        ),
        "a model with shifted logits",
    ),
    (
        lambda: GROWS.generate(Table(), replace(REQUEST, pinned=((2, 5),))),
        "pinned tokens needs a schedule with positions that keep .* Daedal",
    ),
    (partial(decode, fit(select=Oracle())), "no reference"),
    (
        partial(decode, fit(schedule=Blocks(5))),
        r"does not divide the generation length 24.*block to a divisor of 24.*schedule\.short",
    ),
    (
        partial(decode, fit(select=Threshold(0.5), schedule=Pipeline(5, 0.1, 0.9))),
        r"schedule\.floor=true",
    ),
    (partial(decode, SpeculativeDecoder(NoDraft()), "dream"), "autoregressive target"),
    (partial(decode, LikelihoodDecoder()), "asks for a text; choose another decoder"),
    (
        partial(
            decode,
            LikelihoodDecoder(exact=True),
            options=(OPTION._replace(ids=OPTION.ids * 3),),
        ),
        "at most 12 are enumerated",
    ),
]


@pytest.mark.parametrize(("make", "words"), [*SETTINGS, *PARTS, *REQUESTS])
def test_what_makes_no_sense_or_does_not_fit_is_refused(make: Make, words: str) -> None:
    with pytest.raises(DllmBenchError, match=words):
        make()
