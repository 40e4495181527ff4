"""Decoders with selective caches reproduce the authors' code on the tiny golden checkpoints.

Every recorded case of a method is replayed in one test: output ids, the canvas before each forward,
and the positions that each forward fed. The published loops leave the mask token in, and so do
these decoders (`forbid_mask` off). What differs is named in the test of the method.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.cache.block import BlockCache
from dllm_bench.decoding.cache.d2 import D2Cache
from dllm_bench.decoding.cache.dkv import DKVCache
from dllm_bench.decoding.cache.dkv_greedy import DKVGreedyCache
from dllm_bench.decoding.cache.dllm_cache import DLLMCache, MostChanged
from dllm_bench.decoding.cache.dpad import DPadCache
from dllm_bench.decoding.cache.dual import DualCache
from dllm_bench.decoding.cache.hierarchical import HierarchicalCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.cache.prefix import PrefixCache
from dllm_bench.decoding.cache.sparse import SparseCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.schedule.adablock import AdaBlock
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.schedule.daedal import Daedal
from dllm_bench.decoding.schedule.sub_blocks import SubBlocks
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.density import Density
from dllm_bench.decoding.score.margin import Margin
from dllm_bench.decoding.score.mask_last import MaskLast
from dllm_bench.decoding.score.neg_entropy import NegEntropy
from dllm_bench.decoding.select.best import Best
from dllm_bench.decoding.select.drawn import Drawn
from dllm_bench.decoding.select.epsilon import Epsilon
from dllm_bench.decoding.select.first_of_block import FirstOfBlock
from dllm_bench.decoding.select.threshold import Threshold
from dllm_bench.decoding.select.topk import TopK
from dllm_bench.decoding.select.union import Union
from dllm_bench.decoding.stop.eos import Eos
from tests.helpers import Watched, golden_dir, load_denoiser

FOLDER = golden_dir() / "caches"
SCORES = {"maskgit_plus": Confidence, "topk_margin": Margin, "entropy": NegEntropy}
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason=f"no golden traces at {FOLDER}")


@lru_cache
def denoiser(checkpoint: str):
    return load_denoiser(FOLDER / checkpoint)


def cases(file: str) -> list[dict]:
    """The recorded cases of a file."""
    found: list[dict] = json.loads((FOLDER / f"{file}_cases.json").read_text())
    return found


def steps_per_block(params: dict) -> int:
    return params["steps"] * params["block_length"] // params["gen_length"]


def replay(case: dict, decoder: MaskedDecoder) -> tuple[Generation, Watched]:
    model = Watched(denoiser(case["checkpoint"]))
    request = Request("golden", tuple(case["prompt"]), case["params"]["gen_length"])
    return decoder.generate(model, request), model


def fed(model: Watched) -> list[list[int]]:
    """The positions of every forward."""
    return [plan.positions(model.device).tolist() for plan in model.plans]


def test_freecache() -> None:
    """With `early_stop` the released loop overwrites what follows an end token, and goes on; here
    it stands. So canvases are compared up to the first that holds an end token.
    """
    for case in cases("freecache"):
        params = case["params"]
        decoder = MaskedDecoder(
            Confidence("float64"),
            TopK(steps_per_block(params)),
            Blocks(params["block_length"]),
            BlockCache("full", renews=False),
            forbid_mask=False,
        )
        generation, model = replay(case, decoder)
        canvases = [canvas[0].tolist() for canvas in model.canvases]
        ended = [params["eos_token_id"] in state[len(case["prompt"]) :] for state in case["states"]]
        if params["early_stop"] and True in ended:
            assert canvases[: ended.index(True)] == case["states"][: ended.index(True)]
            continue
        assert list(generation.ids) == case["output"]
        assert canvases == case["states"]
        assert fed(model) == [list(range(first, first + n)) for first, n in case["calls"]]


def test_adablock() -> None:
    """Calls are recorded as [start, length] of what was fed."""
    caches = {"none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
    for case in cases("adablock"):
        params = case["params"]
        delimiters, tau = tuple(params["delimiter_ids"]), params["delimiter_threshold"]
        decoder = MaskedDecoder(
            Confidence("float64"),
            Threshold(params["threshold"]),
            AdaBlock(params["init_block_length"], delimiters, tau),
            caches[params["cache"]],
            forbid_mask=False,
        )
        generation, model = replay(case, decoder)
        starts = sorted({plan.rows[0] for plan in model.plans})
        ends = [*starts[1:], len(case["prompt"]) + params["gen_length"]]
        assert list(generation.ids) == case["output"]
        assert [canvas[0].tolist() for canvas in model.canvases] == case["states"]
        assert fed(model) == [list(range(first, first + n)) for first, n in case["calls"]]
        assert [b - a for a, b in zip(starts, ends, strict=True)] == case["block_lengths"]


def daedal(params: dict) -> MaskedDecoder:
    schedule = Daedal(
        params["block_length"],
        params["initial_gen_length"],
        params["expansion_factor"],
        params["eos_confidence_threshold"],
        params["expand_eos_confidence_threshold"],
        params["low_conf_threshold"],
        params["eos_check_tokens"],
    )
    select = Threshold(params["high_conf_threshold"], strict=True)
    return MaskedDecoder(MaskLast(), select, schedule, NoCache(), forbid_mask=False)


def test_daedal() -> None:
    """The end token is one that the tiny model likes."""
    for case in cases("daedal"):
        params, prompt = case["params"], tuple(case["prompt"])
        model = Watched(denoiser(case["checkpoint"]))
        model.special = replace(model.special, eos=params["eos_token_id"])
        request = Request("golden", prompt, params["max_gen_length"])
        generation = daedal(params).generate(model, request)
        canvases = [canvas[0].tolist() for canvas in model.canvases]
        assert list(generation.ids) == case["output"]
        assert canvases == case["states"]
        lengths = [forward.canvas for forward in generation.trace.forwards]
        assert lengths == [len(state) - len(prompt) for state in case["states"]]


def recorded_fed(case: dict) -> list[list[int]]:
    """The positions of every recorded forward."""
    pairs = zip(case["fed"], case["states"], strict=True)
    return [list(range(len(state))) if fed is None else fed for fed, state in pairs]


def dkv_llada(params: dict) -> MaskedDecoder:
    return MaskedDecoder(
        Confidence("float64"),
        TopK(steps_per_block(params)),
        Blocks(params["block_length"]),
        DKVCache(params["cache_reloading_step"]),
        forbid_mask=False,
    )


def dkv_dream(params: dict) -> MaskedDecoder:
    early, prompt = params["shift_type"] == "un", params["cache_type"] != "decoded"
    every = params["cache_steps"] or 1
    cache = DKVCache(every, 1, keeps_prompt=prompt, early=early, released_end=not early)
    score, select = SCORES[params["alg"]](), Epsilon(params["steps"], idle=True)
    return MaskedDecoder(score, select, Blocks(None), cache, forbid_mask=False)


@dataclass(frozen=True)
class ReplayedDPad(DPadCache):
    """DPad with the positions that a recorded run drew for its blocks."""

    stays: tuple[tuple[int, ...], ...] = ()
    block: int = 1

    def draw(self, state: DecodeState, window: Window) -> Tensor:
        stays_1L = torch.ones(1, state.length, dtype=torch.bool)
        stays_1L[:, window.stop :] = False
        block = (window.start - state.prompt_len) // self.block
        stays_1L[:, list(self.stays[block])] = True
        return stays_1L


def test_dpad() -> None:
    """No recorded run ends early. The draws of the published generator are replayed."""
    inner = {"none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
    for case in cases("dpad"):
        params, stays = case["params"], tuple(map(tuple, case["kept_suffix"]))
        tau, block = params["threshold"], params["block_length"]
        decoder = MaskedDecoder(
            Confidence("float64"),
            TopK(steps_per_block(params)) if tau is None else Threshold(tau),
            Blocks(block),
            ReplayedDPad(inner[params["cache"]], stays=stays, block=block),
            forbid_mask=False,
        )
        generation, model = replay(case, decoder)
        assert list(generation.ids) == case["output"]
        assert [canvas[0].tolist() for canvas in model.canvases] == case["states"]
        assert fed(model) == recorded_fed(case)


def sparse(params: dict) -> MaskedDecoder:
    cache = SparseCache(params["keep_ratio"], params["kernel_size"] or 1, released_ties=True)
    schedule, steps = Blocks(params["block_length"]), steps_per_block(params)
    if "alg" not in params:
        return MaskedDecoder(Confidence(), TopK(steps), schedule, cache, forbid_mask=False)
    select = FirstOfBlock(Epsilon(steps, idle=True))
    return MaskedDecoder(SCORES[params["alg"]](), select, schedule, cache, forbid_mask=False)


def kept(model: Watched) -> list[list[list[int]] | None]:
    """What the layers read of the cache in each forward."""
    sets = [plan.sets for plan in model.plans]
    return [one.read_C.tolist() if one and one.read_C.dim() > 1 else None for one in sets]


def test_sparse_dllm() -> None:
    """Positions that the layers keep are recorded for the forward that chooses them."""
    for case in cases("sparse_dllm"):
        generation, model = replay(case, sparse(case["params"]))
        windows = [w or [0, len(s)] for w, s in zip(case["window"], case["states"], strict=True)]
        assert list(generation.ids) == case["output"]
        assert [canvas[0].tolist() for canvas in model.canvases] == case["states"]
        assert fed(model) == [list(range(*window)) for window in windows]
        chosen = zip(case["kept"], kept(model)[1:], strict=False)
        pairs = [(theirs, ours) for theirs, ours in chosen if theirs and ours]
        assert pairs
        assert all(theirs == ours for theirs, ours in pairs)


@dataclass(frozen=True)
class ReplayedOrder(Drawn):
    """The orders that a recorded run drew for its blocks."""

    orders: tuple[tuple[int, ...], ...] = ()

    def order(self, state: DecodeState, window: Window) -> Tensor:
        block = (window.start - state.prompt_len) // window.block
        return torch.tensor(self.orders[block]) - window.start


def dkv_greedy(case: dict) -> MaskedDecoder:
    params, orders = case["params"], tuple(map(tuple, case["decode_order"]))
    return MaskedDecoder(
        Confidence("float64"),
        ReplayedOrder(steps_per_block(params), orders),
        Blocks(params["block_length"]),
        DKVGreedyCache(params["cache_reloading_step"], params["window_size"]),
        forbid_mask=False,
    )


def dkv(case: dict) -> MaskedDecoder:
    if "greedy" in case["method"]:
        return dkv_greedy(case)
    return {"llada": dkv_llada, "dream": dkv_dream}[case["method"].split("_")[-1]](case["params"])


NOISE = 2e-6  # cosines that differ by less are equal up to rounding


def dllm_cache(params: dict) -> MaskedDecoder:
    intervals = params["prompt_interval_steps"], params["gen_interval_steps"]
    cache = DLLMCache(*intervals, params["transfer_ratio"])
    if "alg" in params:
        score, select = SCORES[params["alg"]](), Epsilon(params["steps"], idle=True)
        return MaskedDecoder(score, select, Blocks(None), cache, forbid_mask=False)
    schedule = Blocks(params["block_length"])
    return MaskedDecoder(
        Confidence(), TopK(steps_per_block(params)), schedule, cache, forbid_mask=False
    )


def test_dllm_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that layers chose are recorded where similarity decided; the others follow from the
    intervals.
    """
    compared, chosen, choose = 0, list[list[int]](), MostChanged.choose

    def recorded_choice(self: MostChanged, old_SC: Tensor, new_SC: Tensor) -> Tensor:
        index_R = choose(self, old_SC, new_SC)
        chosen.append(sorted((index_R + self.prompt).tolist()))
        return index_R

    monkeypatch.setattr(MostChanged, "choose", recorded_choice)
    for case in cases("dllm_cache"):
        chosen.clear()
        generation, model = replay(case, dllm_cache(case["params"]))
        assert list(generation.ids) == case["output"]
        assert [canvas[0].tolist() for canvas in model.canvases] == case["states"]
        rows, gaps = ([one for f in case[name] for one in f] for name in ("selected", "sel_gap"))
        recorded = [pair for pair in zip(rows, gaps, strict=True) if pair[0] is not None]
        for (theirs, gap), ours in zip(recorded, chosen, strict=True):
            assert gap < NOISE or ours == theirs
            compared += gap >= NOISE
    assert compared > 1000


def test_dkv_cache() -> None:
    """The orders in which "greedy" decodes are replayed."""
    for case in cases("dkv_cache"):
        generation, model = replay(case, dkv(case))
        assert list(generation.ids) == case["output"]
        assert [canvas[0].tolist() for canvas in model.canvases] == case["states"]
        assert fed(model) == recorded_fed(case)


def v2_request(case: dict, prompt: list[int]) -> Request:
    """The released loops decode whole blocks from the prompt's own on, and one token more."""
    block = case["params"]["block_size"]
    blocks = len(prompt) // block + case["params"]["max_new_tokens"] // block
    return Request("golden", tuple(prompt), blocks * block + 1 - len(prompt))


def v2_decoder(params: dict) -> MaskedDecoder:
    return MaskedDecoder(
        Confidence(),
        Threshold(params["threshold"], strict=True),
        SubBlocks(params["block_size"], params["small_block_size"], whole=False),
        HierarchicalCache(params["use_block_cache"]),
        stop=Eos("token" if params["loop"] == "generate" else "block"),
        forbid_mask=False,
    )


def v2_calls(case: dict) -> list[tuple[int, list[int]]]:
    """The recorded calls, the prompt's whole blocks with the first call that decodes."""
    calls = [(call["start"], call["ids"]) for call in case["calls"]]
    prompt, block = case["prompt"], case["params"]["block_size"]
    if len(prompt) > block and len(prompt) % block:
        (first, ids), (_, more) = calls[:2]
        calls[:2] = [(first, ids + more)]
    return calls


def text(ids: Iterable[int], end: int) -> list[int]:
    """The tokens up to the end token, that one included."""
    ids = list(ids)
    return ids[: ids.index(end) + 1] if end in ids else ids


def test_fast_dllm_v2() -> None:
    """`batch_sample` misses an end token that begins a block and goes on; here it ends there."""
    for case in (case for case in cases("fast_dllm_v2") if not case["batched"]):
        model, params = Watched(denoiser(case["checkpoint"])), case["params"]
        generation = v2_decoder(params).generate(model, v2_request(case, case["prompt"]))
        end, canvases = model.special.eos, zip(model.canvases, model.plans, strict=True)
        ours = [(plan.feed[0], c[0, slice(*plan.feed)].tolist()) for c, plan in canvases]
        theirs, output = v2_calls(case), text(case["output"], end)
        missed = (
            output[-1] == end and (len(case["prompt"] + output) - 1) % params["block_size"] == 0
        )
        assert text(generation.ids, end)[: len(output)] == output
        assert ours == (theirs[: len(ours)] if missed else theirs)


def test_fast_dllm_v2_in_batches() -> None:
    """A released batch stores the open block of all rows again if one row needs it. That changed
    one of the ten recorded rows, so that one with such a store may differ.
    """
    coupled = 0
    for case in (case for case in cases("fast_dllm_v2") if case["batched"]):
        model, decoder = denoiser(case["checkpoint"]), v2_decoder(case["params"])
        requests = [replace(v2_request(case, p), id=str(i)) for i, p in enumerate(case["prompt"])]
        batched = {one.request_id: one.ids for one in decoder.generate_stream(model, requests, 2)}
        assert batched == {one.id: decoder.generate(model, one).ids for one in requests}
        for i, output in enumerate(case["output"]):
            ours, theirs = (text(ids, model.special.eos) for ids in (batched[str(i)], output))
            differs = ours[: len(theirs)] != theirs
            assert not differs or case["params"]["use_block_cache"]
            coupled += differs
    assert coupled <= 1


def d2(params: dict) -> MaskedDecoder:
    """The released quirks are on."""
    score, select = SCORES[params["alg"]](), Best(params["num_transfer_tokens"])
    cache = D2Cache(
        params["current_k"],
        params["rollout_p"],
        params["sigma"],
        params["inflate_w"],
        released=True,
    )
    return MaskedDecoder(
        Density(score, params["decode_sigma"]) if params["decode_sigma"] else score,
        Union(Threshold(params["threshold"]), select) if params["threshold"] else select,
        Blocks(params["block_length"]),
        cache,
        forbid_mask=False,
    )


def test_d2cache() -> None:
    for case in cases("d2cache"):
        generation, model = replay(case, d2(case["params"]))
        assert list(generation.ids) == case["output"]
        assert [canvas[0].tolist() for canvas in model.canvases] == case["states"]
        assert fed(model) == recorded_fed(case)
