"""Decoders with selective caches reproduce the authors' code on the tiny golden checkpoints.

Every recorded case is replayed by the decoder of its yaml: output ids, the canvas before each
forward, and the positions that each forward fed. The published loops leave the mask token in, and
so do these decoders (`forbid_mask` off). What differs is named in the test of the method.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Round
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.position_caches import DPadCache, Drawn
from dllm_bench.methods.row_caches import DLLMCache, MostChanged
from tests.golden.cases import (
    SCORES,
    Case,
    Settings,
    agreement,
    canvases_of,
    cases,
    composed,
    denoiser,
    each,
    replayed,
    request,
    steps_per_block,
)
from tests.helpers import Watched


def model_of(case: Case) -> Any:
    return denoiser(f"caches/{case['checkpoint']}")


def replay(case: Case, decoder: MaskedDecoder) -> tuple[Generation, Watched]:
    model = Watched(model_of(case))
    return decoder.generate(model, request(case)), model


def equal(case: Case, decoder: MaskedDecoder) -> Watched:
    """Replay a case, whose tokens and canvases are the recorded ones; return the model."""
    generation, model = replay(case, decoder)
    assert list(generation.ids) == case["output"]
    assert canvases_of(model) == case["states"]
    return model


def fed(model: Watched) -> list[list[int]]:
    """Return the positions of every forward."""
    return [plan.positions(model.device).tolist() for plan in model.plans]


@replayed("caches/freecache_cases.json")
def test_freecache(case: Case) -> None:
    """With `early_stop` the released loop overwrites what follows an end token, and goes on; here
    it stands. So canvases are compared up to the first that holds an end token.
    """
    params = case["params"]
    steps = {"select.steps": steps_per_block(params), "schedule.block": params["block_length"]}
    decoder = composed("freecache", steps)
    generation, model = replay(case, decoder)
    canvases = canvases_of(model)
    ended = [params["eos_token_id"] in state[len(case["prompt"]) :] for state in case["states"]]
    if params["early_stop"] and True in ended:
        assert canvases[: ended.index(True)] == case["states"][: ended.index(True)]
        return
    assert list(generation.ids) == case["output"]
    assert canvases == case["states"]
    assert fed(model) == [list(range(first, first + n)) for first, n in case["calls"]]


@replayed("caches/adablock_cases.json")
def test_adablock(case: Case) -> None:
    """Calls are recorded as [start, length] of what was fed."""
    params = case["params"]
    settings = {
        "score.precision": "float64",
        "select.tau": params["threshold"],
        "schedule.block": params["init_block_length"],
        "schedule.delimiters": params["delimiter_ids"],
        "schedule.tau": params["delimiter_threshold"],
        "cache": params["cache"],
        "stop": "filled",
    }
    model = equal(case, composed("adablock", settings))
    starts = sorted({plan.rows[0] for plan in model.plans})
    ends = [*starts[1:], len(case["prompt"]) + params["gen_length"]]
    assert fed(model) == [list(range(first, first + n)) for first, n in case["calls"]]
    assert [b - a for a, b in zip(starts, ends, strict=True)] == case["block_lengths"]


def daedal(params: Settings) -> MaskedDecoder:
    return composed(
        "daedal",
        {
            "score": "mask_last",
            "select.tau": params["high_conf_threshold"],
            "schedule.block": params["block_length"],
            "schedule.initial": params["initial_gen_length"],
            "schedule.factor": params["expansion_factor"],
            "schedule.eos_enough": params["eos_confidence_threshold"],
            "schedule.eos_expand": params["expand_eos_confidence_threshold"],
            "schedule.low": params["low_conf_threshold"],
            "schedule.eos_window": params["eos_check_tokens"],
        },
    )


@replayed("caches/daedal_cases.json")
def test_daedal(case: Case) -> None:
    """The end token is one that the tiny model likes."""
    params, prompt = case["params"], tuple(case["prompt"])
    model = Watched(model_of(case))
    model.special = replace(model.special, eos=params["eos_token_id"])
    request = Request("golden", prompt, params["max_gen_length"])
    generation = daedal(params).generate(model, request)
    canvases = canvases_of(model)
    assert list(generation.ids) == case["output"]
    assert canvases == case["states"]
    lengths = [forward.canvas for forward in generation.trace.forwards]
    assert lengths == [len(state) - len(prompt) for state in case["states"]]


def recorded_fed(case: Case) -> list[list[int]]:
    """Return the positions of every recorded forward."""
    pairs = zip(case["fed"], case["states"], strict=True)
    return [list(range(len(state))) if fed is None else fed for fed, state in pairs]


def dkv_llada(params: Settings) -> MaskedDecoder:
    steps = {"select.steps": steps_per_block(params), "schedule.block": params["block_length"]}
    every = {"cache.every": params["cache_reloading_step"]}
    return composed("dkv_cache", {"score.precision": "float64"} | steps | every)


def dkv_dream(params: Settings) -> MaskedDecoder:
    early = params["shift_type"] == "un"
    settings = {
        "score": SCORES[params["alg"]],
        "select.steps": params["steps"],
        "select.idle": True,
        "cache.every": params["cache_steps"] or 1,
        "cache.keeps_prompt": params["cache_type"] != "decoded",
        "cache.early": early,
        "cache.released_end": not early,
    }
    return composed("dkv_cache_dream", settings)


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


@replayed("caches/dpad_cases.json")
def test_dpad(case: Case) -> None:
    """No recorded run ends early. The draws of the published generator are replayed."""
    params, stays = case["params"], tuple(map(tuple, case["kept_suffix"]))
    tau, block = params["threshold"], params["block_length"]
    steps = {"select": "topk", "select.steps": steps_per_block(params)}
    settings = {"schedule.block": block, "stop": "filled"}
    settings |= steps if tau is None else {"select.tau": tau}
    inner = {"cache@inner": params["cache"]}
    is_dual = params["cache"] == "dual"
    decoder = composed("dpad_dual", settings) if is_dual else composed("dpad", settings | inner)
    assert isinstance(decoder.cache, DPadCache)
    drawn = ReplayedDPad(decoder.cache.inner, stays=stays, block=block)
    model = equal(case, replace(decoder, cache=drawn))
    assert fed(model) == recorded_fed(case)


def sparse(params: Settings) -> MaskedDecoder:
    settings = {
        "schedule.block": params["block_length"],
        "cache.keep": params["keep_ratio"],
        "cache.kernel": params["kernel_size"] or 1,
        "cache.released_ties": True,
    }
    steps = steps_per_block(params)
    if "alg" not in params:
        return composed("sparse_dllm", settings | {"select.steps": steps})
    inner = {"select.inner.steps": steps, "select.inner.idle": True}
    return composed("sparse_dllm_dream", settings | inner | {"score": SCORES[params["alg"]]})


def kept(model: Watched) -> list[list[list[int]] | None]:
    """Return what the layers read of the cache in each forward."""
    sets = [plan.sets for plan in model.plans]
    return [one.read_C.tolist() if one and one.read_C.dim() > 1 else None for one in sets]


@replayed("caches/sparse_dllm_cases.json")
def test_sparse_dllm(case: Case) -> None:
    """Positions that the layers keep are recorded for the forward that chooses them."""
    model = equal(case, sparse(case["params"]))
    windows = [w or [0, len(s)] for w, s in zip(case["window"], case["states"], strict=True)]
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


def dkv_greedy(case: Case) -> MaskedDecoder:
    params, orders = case["params"], tuple(map(tuple, case["decode_order"]))
    settings = {
        "score.precision": "float64",
        "schedule.block": params["block_length"],
        "cache.every": params["cache_reloading_step"],
        "cache.window": params["window_size"],
    }
    order = ReplayedOrder(steps_per_block(params), orders)
    return replace(composed("dkv_cache_greedy", settings), select=order)


def dkv(case: Case) -> MaskedDecoder:
    if "greedy" in case["method"]:
        return dkv_greedy(case)
    return {"llada": dkv_llada, "dream": dkv_dream}[case["method"].split("_")[-1]](case["params"])


NOISE = 2e-6  # cosines that differ by less are equal up to rounding


def dllm_cache(params: Settings) -> MaskedDecoder:
    settings = {
        "cache.prompt_every": params["prompt_interval_steps"],
        "cache.every": params["gen_interval_steps"],
        "cache.share": params["transfer_ratio"],
    }
    if "alg" in params:
        dream = {"score": SCORES[params["alg"]], "select.steps": params["steps"]}
        return composed("dllm_cache_dream", settings | dream | {"select.idle": True})
    block = {"select.steps": steps_per_block(params), "schedule.block": params["block_length"]}
    return composed("dllm_cache", settings | block)


@replayed("caches/dllm_cache_cases.json")
def test_dllm_cache(case: Case) -> None:
    """Rows that layers chose are recorded where similarity decided; the others follow from the
    intervals.
    """
    chosen = list[list[int]]()

    class Recorded(MostChanged):
        def choose(self, old_SC: Tensor, new_SC: Tensor) -> Tensor:
            index_R = super().choose(old_SC, new_SC)
            chosen.append(sorted((index_R + self.prompt).tolist()))
            return index_R

    class RecordedCache(DLLMCache):
        def plan(self, round: Round) -> ForwardPlan:
            plan = super().plan(round)
            return replace(plan, recompute=Recorded(**vars(plan.recompute)))

    decoder = dllm_cache(case["params"])
    equal(case, replace(decoder, cache=RecordedCache(**vars(decoder.cache))))
    rows, gaps = ([one for f in case[name] for one in f] for name in ("selected", "sel_gap"))
    recorded = [pair for pair in zip(rows, gaps, strict=True) if pair[0] is not None]
    for (theirs, gap), ours in zip(recorded, chosen, strict=True):
        assert gap < NOISE or ours == theirs


@replayed("caches/dkv_cache_cases.json")
def test_dkv_cache(case: Case) -> None:
    """The orders in which "greedy" decodes are replayed."""
    model = equal(case, dkv(case))
    assert fed(model) == recorded_fed(case)


def v2_request(case: Case, prompt: list[int]) -> Request:
    """Return the request of a case. The released loops decode whole blocks from the prompt's own
    on, and one token more."""
    block = case["params"]["block_size"]
    blocks = len(prompt) // block + case["params"]["max_new_tokens"] // block
    return Request("golden", tuple(prompt), blocks * block + 1 - len(prompt))


def v2_decoder(params: Settings) -> MaskedDecoder:
    settings = {
        "select.tau": params["threshold"],
        "schedule.block": params["block_size"],
        "schedule.small": params["small_block_size"],
        "schedule.whole": False,
        "cache.inside": params["use_block_cache"],
    }
    stop = {} if params["loop"] == "generate" else {"stop": "eos"}
    return composed("fast_dllm_v2", settings | stop)


def v2_calls(case: Case) -> list[tuple[int, list[int]]]:
    """Return the recorded calls, the prompt's whole blocks with the first call that decodes."""
    calls = [(call["start"], call["ids"]) for call in case["calls"]]
    prompt, block = case["prompt"], case["params"]["block_size"]
    if len(prompt) > block and len(prompt) % block:
        (first, ids), (_, more) = calls[:2]
        calls[:2] = [(first, ids + more)]
    return calls


def text(ids: Iterable[int], end: int) -> list[int]:
    """Return the tokens up to the end token, that one included."""
    ids = list(ids)
    return ids[: ids.index(end) + 1] if end in ids else ids


@each([case for case in cases("caches/fast_dllm_v2_cases.json") if not case["batched"]])
def test_fast_dllm_v2(case: Case) -> None:
    """`batch_sample` misses an end token that begins a block and goes on; here it ends there."""
    model, params = Watched(model_of(case)), case["params"]
    generation = v2_decoder(params).generate(model, v2_request(case, case["prompt"]))
    end, canvases = model.special.eos, zip(model.canvases, model.plans, strict=True)
    ours = [(plan.feed[0], c[0, slice(*plan.feed)].tolist()) for c, plan in canvases]
    theirs, output = v2_calls(case), text(case["output"], end)
    missed = output[-1] == end and (len(case["prompt"] + output) - 1) % params["block_size"] == 0
    assert text(generation.ids, end)[: len(output)] == output
    assert ours == (theirs[: len(ours)] if missed else theirs)


@each([case for case in cases("caches/fast_dllm_v2_cases.json") if case["batched"]])
def test_fast_dllm_v2_in_batches(case: Case) -> None:
    """A released batch stores the open block of all rows again if one row needs it, so that a row
    may differ.
    """
    model, decoder = model_of(case), v2_decoder(case["params"])
    requests = [replace(v2_request(case, p), id=str(i)) for i, p in enumerate(case["prompt"])]
    batched = {one.request_id: one.ids for one in decoder.generate_stream(model, requests, 2)}
    assert batched == {one.id: decoder.generate(model, one).ids for one in requests}
    with agreement(case):
        for i, output in enumerate(case["output"]):
            ours, theirs = (text(ids, model.special.eos) for ids in (batched[str(i)], output))
            assert ours[: len(theirs)] == theirs


def d2(case: Case) -> MaskedDecoder:
    """Return the decoder of a case, with the released quirks on."""
    params, score = case["params"], SCORES[case["params"]["alg"]]
    sigma, tau = params["decode_sigma"], params["threshold"]
    prior = {"score@inner": score, "score.sigma": sigma} if sigma else {"score": score}
    both = {"select": "threshold_best", "select.first.tau": tau, "select.first.strict": False}
    settings = {
        "select.second.number" if tau else "select.number": params["num_transfer_tokens"],
        "schedule.block": params["block_length"],
        "cache.current": params["current_k"],
        "cache.rollout": params["rollout_p"],
        "cache.sigma": params["sigma"],
        "cache.inflate": params["inflate_w"],
        "cache.released": True,
    }
    name = "d2cache_dream" if case["method"].endswith("dream") else "d2cache"
    return composed(name, settings | prior | (both if tau else {}))


@replayed("caches/d2cache_cases.json")
def test_d2cache(case: Case) -> None:
    model = equal(case, d2(case))
    assert fed(model) == recorded_fed(case)
