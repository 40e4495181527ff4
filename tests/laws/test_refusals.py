"""What pieces and decoders refuse: settings without sense, and parts that do not fit each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Option, Request
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.branches import Lookahead, SelfDraft
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
from dllm_bench.methods.confidence_rules import (
    AnswerGap,
    EarlyExit,
    EntropyBound,
    LocalLeap,
    SlowFast,
    WithEntropy,
)
from dllm_bench.methods.d3llm import DelayedCache, EndFill
from dllm_bench.methods.drafting import NGramDraft, NoDraft, StepProfile, SurvivalThreshold
from dllm_bench.methods.dream import Epsilon, Gumbel, Origin, Sampled
from dllm_bench.methods.fast_dllm import (
    HierarchicalCache,
    Hierarchy,
    Ration,
    SubBlocks,
    VicinityCache,
)
from dllm_bench.methods.fast_dllm_pp import FrechetBound
from dllm_bench.methods.history import Credit, KLHistory, Stable
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
from dllm_bench.methods.position_rules import Dilated, TokenCounts
from dllm_bench.methods.revising import Leftmost, SoftRevision
from dllm_bench.methods.row_caches import DLLMCache, ElasticCache
from dllm_bench.methods.trained_drafts import HardwareAwareLength
from tests.helpers import tiny_denoiser
from tests.pieces import RandomHead, Table

BASE = MaskedDecoder(Confidence(), TopK(), Blocks(8), NoCache())
GREEDY = replace(BASE, select=Drawn(), cache=DKVGreedyCache(every=3, window=2))
GROWS = replace(BASE, select=Threshold(0.4, strict=True), schedule=Daedal(8, 4))
REQUEST = Request("refused", tuple(range(3, 14)), 24)
FLAT = StepProfile((1, 64), (1.0, 1.0))
PIPELINE = Pipeline(8, 0.1, 0.95)
OPTION = Option(tuple(range(20, 27)), tuple(range(5, 11)))
SOFT = MaskedDecoder(
    Confidence(),
    Leftmost(0.02),
    Blocks(8, sees_future=False),
    BlockCache(),
    revise=SoftRevision(sure=0.9),
)
Make = Callable[[], Any]
fit = partial(replace, BASE)


def decode(decoder: Any, layout: str = "llada", **changes: Any) -> None:
    decoder.generate(tiny_denoiser(layout, 1), replace(REQUEST, **changes))


SETTINGS: list[tuple[Make, str]] = [
    *(
        (partial(kind, **{name: value}), f"{kind.__name__} has {name} {value!r}{more}")
        for kind in (PrefixCache, DualCache, VicinityCache)
        for name, value, more in (("every", 0, ""), ("clock", "day", ".*'block' or 'request'"))
    ),
    (partial(VicinityCache, before=-1), "before -1"),
    (partial(SubBlocks, 8, 3), "block of 8 and small 3.*divides"),
    (partial(DKVGreedyCache, every=0), "has every 0"),
    (partial(Drawn, 0), "Drawn has steps 0"),
    (partial(D2Cache, sigma=0.0), "D2Cache has sigma 0"),
    (partial(D2Cache, current=0), "D2Cache has current 0"),
    (partial(ElasticCache, window=0), "ElasticCache has "),
    (partial(ElasticCache, gamma=-0.1), "ElasticCache has "),
    (partial(BlockCache, "full", reuse="exact"), "choose reuse approximate or none"),
    (partial(BlockCache, reuse="all"), "reuse 'all'; give 'none' or"),
    (partial(fit, forbid="mask"), "forbid 'mask'; give 'eos' or 'eot' or 'ends'"),
    (partial(fit, smoothing=-0.1), "smoothing -0.1; give a number of 0"),
    (partial(Confidence, last="all"), "last 'all'; give 'eos' or 'eot' or 'ends'"),
    (partial(Confidence, "float16"), "Confidence has precision 'float16'; give 'float32' or"),
    (partial(NegEntropy, eps=-1.0), "NegEntropy has eps -1.0"),
    (partial(Credit, Confidence(), beta=1.2), "Credit has beta 1.2"),
    (partial(Credit, Confidence(), scope="row"), "Credit has scope 'row'; give 'block' or"),
    (partial(Credit, Credit(Confidence())), "Credit has another Credit"),
    (partial(Gumbel, temperature=-1.0), "Gumbel has temperature -1.0"),
    (partial(Gumbel, precision="bfloat16"), "give 'float32' or 'float64'"),
    (partial(Sampled, temperature=-0.1), "Sampled has temperature -0.1"),
    (partial(Sampled, top_p=0.0), "Sampled has top_p 0.0"),
    (partial(Sampled, top_k=0), "Sampled has top_k 0"),
    (partial(Epsilon, 0), "Epsilon has steps 0"),
    (partial(Epsilon, alg_temp=0.0), "Epsilon has alg_temp 0.0"),
    (partial(Origin, alg_temp=1.0), "the same at every mask"),
    (partial(Origin, 4, eps=2.0), "Origin has eps 2.0"),
    (partial(Origin, 4, ties="canvas"), "Origin has alg_temp None and ties canvas"),
    (partial(Hierarchy, 0.9, low=7), "Hierarchy has low 7"),
    (partial(Lookahead, -1), "k -1; give a whole number of 0 or more"),
    (partial(Lookahead, 2, alpha=1.5), "alpha 1.5"),
    (partial(Lookahead, 2, sliding=0), "sliding 0"),
    (partial(Lookahead, 2, sliding=4, fraction=0.5), "sliding 4 and fraction 0.5"),
    (partial(Lookahead, 2, reads="both"), "reads 'both'; give 'fused' or 'raw'"),
    (partial(Lookahead, 3, base_wins=True, base_competes=False), "change one of the two"),
    *(
        (partial(Daedal, 8, **{name: 0}), f"{name} 0")
        for name in ("initial", "factor", "eos_window")
    ),
    (partial(EntropyBound, 0.1, least=0), "EntropyBound has least 0"),
    (partial(EntropyBound, 0.1, left_out="first"), "has left_out 'first'"),
    (partial(LocalLeap, 0.9, 0.7, -1), "radius -1"),
    (partial(Stable, TopK(), 0.9, -1.0), "Stable has eps -1.0"),
    (partial(Stable, TopK(), 0.9, 0.1, commits="one"), "has commits 'one'"),
    (partial(KLHistory, length=0), "KLHistory has length 0"),
    (partial(Dilated, base=0), "Dilated has base 0"),
    (partial(SlowFast, 0.9, 0.3, explores=1), "SlowFast has explores 1"),
    (partial(EarlyExit, block=0), "EarlyExit has block 0"),
    (partial(AnswerGap, width=0), "AnswerGap has width 0"),
    (partial(DelayedCache, delay=-1), "DelayedCache has delay -1"),
    (partial(TokenCounts, "nowhere.json"), "There are no token counts 'nowhere.json'"),
    (partial(WithEntropy, Confidence(last="ends")), "inner score has last 'ends'"),
    (partial(FrechetBound, -0.1), "FrechetBound has delta -0.1"),
    (partial(Ration, Threshold(0.9), 0), "Ration has steps 0"),
    (partial(SelfDraft, 0), "draft_steps 0; give a whole number of 1 or more"),
    (partial(SoftRevision, sure=0.9, likeliest=0), "SoftRevision has likeliest 0"),
    (partial(SoftRevision, sure=1.5), r"sure 1\.5"),
    (partial(Leftmost, 1.1), r"tau 1\.1"),
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
        partial(replace, SOFT, explore=Lookahead(2)),
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
