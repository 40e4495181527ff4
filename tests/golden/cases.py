"""The recorded cases, one test each, and their replay by decoders composed from `conf/`.

Which cases differ is written down in `differing.yaml`: inside of `agreement`, a case of a known
file that differs without being listed fails, and so does a listed one that agrees. A case that
differs needs a reason: one that its record shows (`reason`), or one that its test proves at the
forward where it differs. It is reported as xfailed with that reason. A file with more cases of the
same form may have others that differ, for the same reasons.

`decoders.yaml` names decoders of `conf/decoder` and their settings, by the recorded method. A value
that names a parameter of the run or one of `DERIVED` stands for it; settings under `if …` or
`unless …` apply by such a value. The run's block length is the schedule's unless `schedule.block`
is given (null: the schedule has none). The mask token may be written, as published.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from dllm_bench.api.generation import composed_decoder, slot_override
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.d3llm import EndFill
from dllm_bench.models.filters import FilterMetadata
from dllm_bench.training.filters import save_filter
from scripts import update_docs
from tests.helpers import Watched, canvases_of_trace, load_denoiser

GOLDEN = update_docs.GOLDEN
EVERY = 24
OFTEN = 10  # of the others
CLOSE = 1e-5  # decisions closer than this may differ by float32 rounding
ROUNDING = 5e-6  # the same of dInfer's runs: float32 and float64 differ by up to 4.5e-6 there
Case = dict[str, Any]
Settings = Mapping[str, Any]
Proof = Callable[[], str | None]  # the reason of a case, found by replaying it
GROUPS = ("cases", "runs", "extra_runs", "sampled_runs")  # of a file that holds more than a list
LENGTHS = ("gen_length", "max_gen_length", "max_new_tokens", "max_tokens")  # of a request
CHECKPOINTS = {
    "dinfer": "llada",
    "dmax_ckpt": "new2026/ckpt/dmax",
    "sdar": "new2026/ckpt/sdar",
    "fast_dllm_v2_ckpt": "caches/fast_dllm_v2_ckpt",
}
REASONS: dict[str, Callable[[Case], bool]] = {
    "bug: the released loop ends with masks left": lambda c: (  # with a step a block
        c.get("method", "").startswith("fast_dllm_dream_entropy")
        and c["params"]["steps"] * c["params"]["block_length"] == c["params"]["gen_length"]
    ),
    "coupling: a released batch stores the open block for all rows": lambda c: bool(
        c.get("batched") and c["params"]["use_block_cache"]
    ),
    "tie: the record depends on the order of equal values": lambda c: bool(
        c.get("tie_dependent") or c.get("low_margin")
    ),
    "not implemented: the eager mode, which is not lossless": lambda c: bool(
        c.get("params", {}).get("eager_acceptance_mode")
    ),
}
"""Why a case may differ -> whether it may; besides its margin and what tests prove by a replay."""


@cache
def known() -> dict[str, dict[str, Any]]:
    """File -> how many cases it is known to have, and which of them differ."""
    text = (Path(__file__).parent / "differing.yaml").read_text()
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


@cache
def recorded(file: str) -> tuple[Case, ...]:
    """Return all cases of a file, with their prompts; none without the reference data."""
    path = GOLDEN / file
    whole = json.loads(path.read_text()) if path.exists() else []
    if isinstance(whole, dict):
        prompts = whole.get("prompts")
        runs = [run for group in GROUPS for run in whole.get(group, ())]
        whole = [{"prompt": prompts[run["prompt_index"]]} | run if prompts else run for run in runs]
    return tuple(case | {"file": file, "index": index} for index, case in enumerate(whole))


def cases(file: str, *methods: str) -> list[Case]:
    """Return the cases of some methods of a file, of all without any."""
    return [case for case in recorded(file) if not methods or case["method"] in methods]


def name(case: Case) -> str:
    """Return the case's method, what sets it apart, and its place in the file."""
    method = case.get("method") or Path(case["file"]).stem
    return "-".join([method, *([case["case"]] if "case" in case else []), str(case["index"])])


def is_known(file: str) -> bool:
    """Return whether the file has the cases that `differing.yaml` was written for."""
    return bool(known().get(file, {}).get("cases") == len(recorded(file)))


def is_listed(case: Case, *kinds: str) -> bool:
    """Return whether `differing.yaml` says that the case differs, or that rounding decides it."""
    lists = known()[case["file"]] if is_known(case["file"]) else {}
    return any(case["index"] in lists.get(kind, ()) for kind in kinds or ("differ", "ties"))


def tier(case: Case) -> list[pytest.MarkDecorator]:
    """Return the marker of a case: some and all that differ run every day, of the others each
    `OFTEN`-th is in the whole suite and the rest, alike and minutes long, with `-m drill`."""
    if not case["index"] % EVERY or is_listed(case):
        return []
    return [pytest.mark.drill if case["index"] % OFTEN else pytest.mark.exhaustive]


def each(found: list[Case]) -> pytest.MarkDecorator:
    """Return one test per case; one that is skipped without the reference data."""
    params = [pytest.param(case, id=name(case), marks=tier(case)) for case in found]
    absent = pytest.mark.skip(reason=f"no golden traces at {GOLDEN}")
    return pytest.mark.parametrize("case", params or [pytest.param(None, marks=absent)])


def replayed(file: str, *methods: str) -> pytest.MarkDecorator:
    """Return one test per case of a file."""
    return each(cases(file, *methods))


def reason(case: Case) -> str | None:
    """Return why the case may differ, None if it may not: the least recorded margin of a decision
    is within float32 rounding, or the record shows it otherwise."""
    margins = (case.get("min_margin") or {}) | {"": 1.0}
    least, kind = min((margin, kind) for kind, margin in margins.items())
    if least < CLOSE:
        return f"margin: {kind} is decided by {least:.1e}"
    gap = case.get("min_gap_prob_to_threshold") or 1.0
    if gap <= ROUNDING:
        return f"margin: a threshold is missed by {gap:.1e}"
    return next((why for why, holds in REASONS.items() if holds(case)), None)


@contextmanager
def agreement(case: Case, proof: Proof = lambda: None) -> Iterator[None]:
    """Let what is asserted in the block hold, or not, as `differing.yaml` and the reasons say."""
    try:
        yield
    except AssertionError:
        may_differ = is_listed(case) or not is_known(case["file"])
        why = (reason(case) or proof()) if may_differ else None
        if why is None:
            raise
        pytest.xfail(why)
    assert not is_listed(case, "differ"), "it agrees; take it out of tests/golden/differing.yaml"


# --- replaying -----------------------------------------------------------------------------------


@cache
def denoiser(folder: str) -> Any:
    return load_denoiser(GOLDEN / folder)


def model_of(case: Case, eos: int | None = None) -> Watched:
    """Return the model of a case, watched, with the case's end token unless another is given."""
    params, own = case.get("params", case), case.get("checkpoint", Path(case["file"]).parts[0])
    model = copy(denoiser(CHECKPOINTS.get(Path(own).name, Path(own).name)))
    named = (eos, params.get("eos_id"), params.get("eos_token_id"), model.special.eos)
    model.special = replace(model.special, eos=next(token for token in named if token is not None))
    return Watched(model)


def canvases_of(model: Watched) -> list[list[int]]:
    """Return the canvas of every forward, of its first branch."""
    return [canvas_KL[0].tolist() for canvas_KL in model.canvases]


def forwards_made(generation: Generation, model: Watched) -> list[dict[str, Any]]:
    """Return what may be recorded of every forward: the canvas, the window, what was fed."""
    found = []
    forwards = generation.trace.forwards
    for one, plan, canvas in zip(forwards, model.plans, canvases_of(model), strict=True):
        positions = plan.positions(model.device).tolist()
        fed = {"positions": positions, "ids": [canvas[at] for at in positions]}
        counts = {"rows": one.fed, "cached": one.cached, "grown": one.canvas}
        found.append({"canvas": canvas, "open": canvas[slice(*plan.rows)]} | fed | counts)
    return found


def check(
    case: Case, decoder: MaskedDecoder, recorded: Iterable[Case], proof: Proof = lambda: None
) -> tuple[Generation, Watched]:
    """Replay a case: its text, and of every forward what is recorded of `forwards_made`.

    A canvas is recorded up to the last open block, and blocks that are never opened hold masks or
    end tokens in a text. The trace alone gives the same canvases, unless they grow or show end
    tokens that are not committed.
    """
    model, wanted = model_of(case), list(recorded)
    mask, eos, output = model.special.mask, model.special.eos, case["output"]
    with agreement(case, proof):
        generation = decoder.generate(model, request(case))
        made, ids = forwards_made(generation, model), list(generation.ids)
        assert len(made) == len(wanted)
        for own, one in zip(made, wanted, strict=True):
            own["canvas"] = own["canvas"][: len(one.get("canvas", ()))]
            assert {key: own[key] for key in one} == one
        rest = len(output) - len(ids)
        assert output in (ids[: len(output)] + [mask] * rest, ids + [eos] * rest)
        if not (made[-1]["grown"] or isinstance(decoder.revise, EndFill)):
            canvases = [*canvases_of(model), [*case["prompt"], *ids]]
            rebuilt = canvases_of_trace(generation, case["prompt"], mask)
            for canvas, same in zip(canvases, rebuilt, strict=True):
                assert canvas[: len(same)] == same[: len(canvas)]
    return generation, model


def composed(decoder: str, settings: Settings) -> MaskedDecoder:
    """Return the decoder of a yaml with a case's numbers; it may write the mask token."""
    made = decoder_with(decoder, json.dumps({"forbid_mask": False} | settings, sort_keys=True))
    assert isinstance(made, MaskedDecoder)
    return made


@cache
def decoder_with(decoder: str, settings: str) -> Any:
    """Return the decoder of a yaml with settings, which are given as JSON."""
    overrides = [override(key, value) for key, value in json.loads(settings).items()]
    return composed_decoder(decoder, overrides)


def override(key: str, value: Any) -> str:
    """Return a setting as `db.decoder` takes it, or another inner piece: `score@inner`."""
    slot, is_inner, inner = key.partition("@")
    if is_inner:
        return f"decoder/{slot}@decoder.{slot}.{inner}={value}"
    return slot_override(key, value)


def request(case: Case, new: int | None = None) -> Request:
    """Return the case as a request, of its own length unless another is given."""
    params = case.get("params", case)
    given = [params[name] for name in LENGTHS if name in params]
    return Request("golden", tuple(case["prompt"]), new or given[0])


# --- the decoder of a masked method, with the numbers of a run ------------------------------------

PIPELINED = ("d2f_dream", "diffucoder_d2f", "lopa_dream_single_branch")
BRANCHING = ("lopa_dream", "lopa_dream_one_block", "lopa_coder")
DECODERS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "decoders.yaml").read_text())
ELSEWHERE = """
    adablock_llada sparse_dllm_llada sparse_dllm_dream dllm_cache_llada dllm_cache_dream dmax
    fast_dllm_v2_generate fast_dllm_v2_batch_sample freedave_llada multi_bd wedlm_hf wedlm_engine
"""
METHODS = DECODERS.keys() - {*BRANCHING, *ELSEWHERE.split()}
"""Methods of which all that is recorded is compared in one way."""

FILTERS = tempfile.TemporaryDirectory()  # removed at exit
NEVER = 10_000  # a refresh interval that means none
COMMITS = {"all": "all", "max_conf": "most_probable", "min_kl": "most_stable"}
JUDGES = {"low_prob": "probability", "t2t_remask": "candidate", "logit_diff": "drop"}
SCORES = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "neg_entropy"}
RANKINGS = {"default": "confidence", "neg_entropy": "neg_entropy", "margin": "margin"}


@cache
def filters() -> Path:
    """Return Learn2PD's recorded filters as a run reads them, one folder a block length."""
    from safetensors.torch import load_file

    recorded = load_file(GOLDEN / "llada" / "learn2pd_filters.safetensors")
    for block in {name.partition(".")[0] for name in recorded}:
        prefix = f"{block}."
        own = {n.removeprefix(prefix): t for n, t in recorded.items() if n.startswith(prefix)}
        save_filter(Path(FILTERS.name) / block, own, FilterMetadata())
    return Path(FILTERS.name)


def steps_per_block(params: Settings) -> int:
    """Return the steps that a schedule of the whole generation leaves for a block."""
    block = params.get("block_length", params.get("block_size"))
    return int(params["steps"] * block // params["gen_length"])


DERIVED: dict[str, Callable[[Settings], Any]] = {
    "steps_per_block": steps_per_block,
    "tokens_per_step": lambda p: p["gen_length"] // p["steps"],
    "refinement_steps": lambda p: min(
        p["num_inference_steps"], p["gen_length"] // p["minimal_topk"]
    ),
    "one_more_step": lambda p: p["max_post_steps"] + 1,
    "score_of_alg": lambda p: SCORES[p["alg"]],
    "ranking": lambda p: RANKINGS[p.get("sampling_strategy", "default")],
    "commits": lambda p: COMMITS[p.get("unmask_strategy", "all")],
    "judge": lambda p: JUDGES[p["remask_strategy"]],
    "precision": lambda p: "float64" if p.get("use_float64") else "float32",
    "attention": lambda p: "full" if p.get("use_full_attention") else "block_causal",
    "lookaheads": lambda p: p["branching_factor"] if p["branching_factor"] > 1 else 0,
    "base_wins": lambda p: bool(p.get("verification_force_base_winner")),
    "filter": lambda p: str(filters() / f"block{p['block_length']}"),
    "counts": lambda p: str(GOLDEN / "samplers" / "pc_sampler_baseline.json"),
    "pinned": lambda p: [[int(at), token] for at, token in (p["constraints"] or {}).items()],
    "renewal": lambda p: p["refresh_interval"] if p["refresh_interval"] < NEVER else None,
    "cache_steps_or_1": lambda p: p["cache_steps"] or 1,
    "keeps_prompt": lambda p: p["cache_type"] != "decoded",
    "kernel": lambda p: p["kernel_size"] or 1,
    "editing_threshold_or_1": lambda p: p["editing_threshold"] or 1,
    "threshold_up_to_1": lambda p: min(p["threshold"], 1),
    "stability": lambda p: p.get("token_stability_threshold", 0.0),
    "is_klass": lambda p: p["method"] == "klass",
    "is_linear": lambda p: p["kind"] == "linear_position",
    "is_unshifted": lambda p: p["shift_type"] == "un",
    "is_shifted": lambda p: p["shift_type"] != "un",
    "is_dual": lambda p: p["cache"] == "dual",
    "remasks": lambda p: p["remasking"] != "none",
    "edits": lambda p: p["sampling_mode"] == "edit",
}


def value_of(name: str, params: Settings, otherwise: Any = None) -> Any:
    return DERIVED[name](params) if name in DERIVED else params.get(name, otherwise)


def settings_of(entry: Settings, params: Settings) -> dict[str, Any]:
    """Return an entry's settings for the parameters of a run."""
    found = dict[str, Any]()
    for key, value in entry.items():
        word, _, name = key.partition(" ")
        if not name:
            found[key] = value_of(value, params, value) if isinstance(value, str) else value
        elif bool(value_of(name, params)) == (word == "if"):
            found |= settings_of(value, params)
    return found


def decoder_of(case: Case, changes: Settings = MappingProxyType({})) -> MaskedDecoder:
    """Return the decoder of a case, with other settings where there are `changes`."""
    params = case["params"] | {"method": case["method"], "nfe": case["nfe"]}
    given = {"schedule.block": params.get("block_length", params.get("block_size"))}
    settings = given | settings_of(DECODERS[case["method"]] | changes, params)
    if settings["schedule.block"] is None:
        del settings["schedule.block"]
    return composed(settings.pop("decoder"), settings)
