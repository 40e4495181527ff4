"""What pieces and decoders refuse: settings without sense, and parts that do not fit each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from torch.nn import Embedding

from dllm_bench.core.declared import in_words
from dllm_bench.core.decoder import parts_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Option, Request
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.speculative import FixedLength, SpeculativeDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache, PrefixCache
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
from dllm_bench.methods.confidence_rules import AnswerGap, SlowFast, WithEntropy
from dllm_bench.methods.d3llm import EndFill
from dllm_bench.methods.drafting import NGramDraft, NoDraft, StepProfile, SurvivalThreshold
from dllm_bench.methods.dream import Epsilon, Gumbel, Origin, Sampled
from dllm_bench.methods.fast_dllm import FirstOfBlock, Ration, SubBlocks
from dllm_bench.methods.history import Credit
from dllm_bench.methods.learn2pd import EndOfTextPrediction, Filter, Oracle
from dllm_bench.methods.lengths import Daedal
from dllm_bench.methods.likelihood import LikelihoodDecoder
from dllm_bench.methods.position_caches import Density, DPadCache
from dllm_bench.methods.position_rules import TokenCounts
from dllm_bench.methods.s2d2 import SelfVerified
from dllm_bench.methods.trained_drafts import HardwareAwareLength
from dllm_bench.models.load import denoiser_class
from dllm_bench.models.wrapped import FunctionDenoiser
from dllm_bench.paths import read_yaml
from tests.canvas import canvas_decoder, tiny_canvas_model
from tests.helpers import VOCAB, tiny_denoiser
from tests.pieces import SLOTS, RandomHead, Table, decoders, pieces

BASE = MaskedDecoder(Confidence(), TopK(), Blocks(8), NoCache())
GREEDY = decoders()["dkv_cache_greedy"]
CAUSAL, WHOLE = Blocks(8, sees_future=False), replace(BASE, schedule=Blocks(None))
BLOCKS = replace(BASE, select=SelfVerified(inner=Best(1)), schedule=CAUSAL, cache=BlockCache())
GROWS = replace(BASE, select=Threshold(0.4, strict=True), schedule=Daedal(8, 4))
REQUEST = Request("refused", tuple(range(3, 14)), 24)
PIPELINE, RELEASED = Pipeline(8, 0.1, 0.95), TopK(2, released=True)
OPTION = Option(tuple(range(20, 27)), tuple(range(5, 11)))
Make = Callable[[], Any]


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


def unfit(words: str, base: MaskedDecoder = BASE, **parts: Any) -> tuple[Make, str]:
    """Return what makes a decoder with other parts, and the words of its refusal."""
    return partial(replace, base, **parts), words


def undecoded(words: str, decoder: Any, layout: str = "llada", **changes: Any) -> tuple[Make, str]:
    """Return what decodes a request with some changes, and the words of its refusal."""
    model = tiny_canvas_model if layout == "canvas" else partial(tiny_denoiser, layout, 1)
    return lambda: decoder.generate(model(), replace(REQUEST, **changes)), words


SETTINGS: list[tuple[Make, str]] = [
    (partial(FixedLength, -1), "FixedLength has tokens -1"),
    (partial(SubBlocks, 8, 3), "block of 8 and small 3.*divides"),
    (partial(BlockCache, "full", reuse="exact"), "choose reuse approximate or none"),
    unfit("forbid 'mask'; give 'eos' or 'eot' or 'ends'", forbid="mask"),
    unfit("smoothing -0.1; give a number of 0", smoothing=-0.1),
    (partial(Credit, Credit(Confidence())), "Credit has another Credit"),
    (partial(Origin, alg_temp=1.0), "the same at every mask"),
    (partial(Origin, 4, eps=1.0), "Origin has eps 1.0"),
    (partial(Origin, 4, ties="canvas"), "Origin has alg_temp None and ties canvas"),
    (partial(Lookahead, 2, sliding=4, fraction=0.5), "sliding 4 and fraction 0.5"),
    (partial(Lookahead, 3, base_wins=True, base_competes=False), "change one of the two"),
    (partial(SlowFast, 0.9, 0.3, explores=1), "SlowFast has explores 1"),
    (partial(Eos, "token", prompt=True), "would end a request at once"),
    (partial(TokenCounts, "nowhere.json"), "There are no token counts 'nowhere.json'"),
    (partial(TokenCounts, __file__), "There are no token counts .*refusals.py.*num_token"),
    (partial(TokenCounts, "assets/tiny-llada/config.json"), "There are no token counts"),
    (partial(WithEntropy, Confidence(last="ends")), "inner score has last 'ends'"),
    (partial(LikelihoodDecoder, draws=40), r"make decoder\.draws a multiple"),
    (partial(LikelihoodDecoder, block=0), "1 or more"),
]
CREDIT, RAW = Credit(Confidence()), Lookahead(3, reads="raw")
JUDGES = (HardwareAwareLength(StepProfile((1, 64), (1.0, 1.0))), SurvivalThreshold(0.5))
UNJUDGED = partial(SpeculativeDecoder, NGramDraft(3, 2))
GROWN: dict[str, dict[str, Any]] = {
    "DualCache": {"cache": DualCache()},
    "Lookahead": {"explore": Lookahead(2)},
    "Credit": {"score": CREDIT},
    "EndFill": {"revise": EndFill(), "stop": Eos("token", turn_end=False)},
    "EndOfTextPrediction": {"stop": AnyOf((Filled(), EndOfTextPrediction()))},
    "Oracle": {"select": Union(Threshold(0.9), Oracle())},
    "TopK": {"select": TopK(4)},
    "smoothing": {"smoothing": 0.3},
}
PARTS: list[tuple[Make, str]] = [
    *(
        unfit(f"DPadCache needs a inner with spans .*{type(one).__name__}", cache=DPadCache(one))
        for name, one in pieces("cache").items()
        if name in ("dkv", "dkv_greedy", "dllm_cache", "sparse", "dpad")
    ),
    unfit("DKVGreedyCache .* score with scores of each row alone.*Credit", GREEDY, score=CREDIT),
    unfit("DKVGreedyCache needs a select with an order that is", GREEDY, select=TopK()),
    unfit("Density needs a inner with probabilities.*NegEntropy", score=Density(NegEntropy())),
    unfit("D2Cache needs a score with raw", decoders()["d2cache"], score=CREDIT),
    unfit("ElasticCache needs a explore with", decoders()["elastic_cache"], explore=Lookahead(3)),
    *(unfit(f"{name}.*choose another", GROWS, **parts) for name, parts in GROWN.items()),
    unfit(r"Filter needs .*of 16 \(decoder.schedule", select=Filter(RandomHead(block=16))),
    unfit("Oracle needs a schedule with blocks of 8", select=Oracle(BASE), schedule=Blocks(16)),
    unfit("Lookahead needs a score with raw confidence.*Credit", score=CREDIT, explore=RAW),
    *(
        unfit(f"guidance 1.0 needs .* {type(cache).__name__}", cache=cache, guidance=1.0)
        for cache in (PrefixCache(), DualCache(), BlockCache())
    ),
    unfit("TopK needs a schedule with .*Pipeline does not", schedule=PIPELINE),
    unfit("needs a schedule with absolute blocks", BLOCKS, cache=BlockCache(reuse="exact")),
    *(
        unfit("with one open block at a time", select=select, schedule=PIPELINE)
        for select in (Epsilon(), Origin(), Ration(Threshold(0.9), 2))
    ),
    unfit("Gumbel needs a inner with scores of the logits alone.*Credit", score=Gumbel(CREDIT)),
    unfit("Sampled needs a inner with scores of the logits alone.*Gumbel", score=Sampled(Gumbel())),
    unfit("needs a guidance with one prompt, which guidance 1.0", smoothing=0.3, guidance=1.0),
    unfit("smoothing 0.3 needs a cache with", decoders()["ar"], smoothing=0.3),
    unfit("EntropyBound needs a score with", decoders()["eb_sampler"], score=Confidence()),
    unfit("commits after the open block.*FirstOfBlock", select=FirstOfBlock(RELEASED)),
    unfit("TopK needs a cache with the whole canvas", select=RELEASED, cache=DualCache()),
    unfit("Epsilon needs a explore with one", select=Epsilon(ties="canvas"), explore=Lookahead(2)),
    unfit("divergences from earlier", decoders()["klass"], score=Confidence()),
    unfit("SelfVerified needs a cache with block-causal", BLOCKS, cache=DualCache()),
    unfit("the whole generation as one block", score=AnswerGap()),
    unfit("SoftRevision needs a explore with one", decoders()["dmax"], explore=Lookahead(2)),
    *((partial(UNJUDGED, length=one), f"{type(one).__name__}.*survival") for one in JUDGES),
]
FIVES = replace(BASE, schedule=Blocks(5))
PIPED = replace(BASE, select=Best(1), schedule=Pipeline(5, 0.1, 0.9))
FREE = replace(decoders()["ar"], forbid_mask=False)
HIDDEN = replace(decoders()["sparse_dllm"], schedule=Blocks(8, sees_rest=False))
THRICE = (OPTION._replace(ids=OPTION.ids * 3),)
OF_IDS = FunctionDenoiser(Embedding(VOCAB, VOCAB), Table().special, False)  # a function of ids
REQUESTS: list[tuple[Make, str]] = [
    (partial(replace(BASE, smoothing=0.3).generate, OF_IDS, REQUEST), "set smoothing to 0"),
    undecoded("a model with shifted logits", decoders()["fast_dllm_v2"], "sdar"),
    undecoded("pinned .*a schedule with positions that keep .* Daedal", GROWS, pinned=((2, 5),)),
    undecoded("a model with logits of each position at its own row", BLOCKS, "dream"),
    undecoded("from new position 24 on", replace(WHOLE, score=AnswerGap(answer=24))),
    undecoded("no reference", replace(BASE, select=Oracle())),
    undecoded("the schedule .sees_rest. hides some", HIDDEN),
    undecoded("forbid_mask=true", FREE, "dream", prompt_ids=(8,), max_new_tokens=60),
    undecoded(r"does not divide the generation length 24.*to a divisor of 24.*\.short", FIVES),
    undecoded(r"schedule\.floor=true", PIPED),
    undecoded("autoregressive target", SpeculativeDecoder(NoDraft()), "dream"),
    undecoded("pinned .* masks", SpeculativeDecoder(NoDraft()), "qwen3", pinned=((2, 5),)),
    undecoded("asks for a text; choose another decoder", LikelihoodDecoder()),
    undecoded("at most 12 are enumerated", LikelihoodDecoder(exact=True), options=THRICE),
]
CANVAS, MASK = canvas_decoder(), "needs a model with a mask token"
WITH_MASKS = [decoders()[name] for name in ("vanilla", "ar", "block_diffusion", "oracle")]
OF_FORM = {
    form: SimpleNamespace(name="m", attention_form=form)
    for form in ("canvas", "full", "block_causal", "causal")
}
ON_CANVAS: list[tuple[Make, str]] = [
    *(undecoded(f"Decoder {MASK}", one, "canvas") for one in WITH_MASKS),
    *(
        (partial(one.check_run_fits, OF_FORM["canvas"]), "a mask token .*decoder=diffusion_gemma")
        for one in WITH_MASKS
    ),
    undecoded("needs a model with causal", SpeculativeDecoder(NGramDraft(3, 2)), "canvas"),
    undecoded(f"likelihood {MASK}", LikelihoodDecoder(), "canvas", options=THRICE),
    undecoded(f"pinned tokens {MASK}", CANVAS, "canvas", pinned=((1, 7),)),
    *(undecoded("a canvas of random", CANVAS, layout) for layout in ("llada", "sdar", "qwen3")),
    *(
        (partial(CANVAS.check_run_fits, model), f"random tokens .*m of {form} attention does not")
        for form, model in [*OF_FORM.items()][1:]
    ),
    (partial(canvas_decoder, anneal__last=0.8), r"decoder\.anneal\.last"),
    (partial(denoiser_class, "max", "canvas"), "set hardware.compile=none"),
]


@pytest.mark.parametrize(("make", "words"), [*SETTINGS, *PARTS, *REQUESTS, *ON_CANVAS])
def test_what_makes_no_sense_or_does_not_fit_is_refused(make: Make, words: str) -> None:
    with pytest.raises(DllmBenchError, match=words):
        make()
