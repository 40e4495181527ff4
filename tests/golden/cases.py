"""The recorded cases, one test each, and decoders composed from `conf/` for them.

`replayed(file, methods)` makes a test of every case of a file; each `EVERY`-th, and those that
differ, are in the default tier, the others are exhaustive. `composed(name, settings)` is the
decoder of a yaml with a case's numbers.

Which cases differ is written down in `differing.yaml`: inside of `agreement`, a case of a known
file that differs without being listed fails, and so does a listed one that agrees. A case that
differs needs a reason: one that its record shows (`reason`), or one that its test proves at the
forward where it differs. It is reported as xfailed with that reason, so that none is left out
unseen. An error counts as a difference only where `differing.yaml` names its message. A file with
more cases of the same form may have others that differ, for the same reasons.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dllm_bench.api.generation import composed_decoder, slot_override
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.common import AnyOf, Budget
from tests.helpers import Watched, golden_dir, load_denoiser

GOLDEN = golden_dir()
EVERY = 16
OFTEN = 3  # of the others
CLOSE = 1e-5  # decisions closer than this may differ by float32 rounding
ROUNDING = 5e-6  # the same of dInfer's runs: float32 and float64 differ by up to 4.5e-6 there
Case = dict[str, Any]
Settings = Mapping[str, Any]
GROUPS = ("cases", "runs", "extra_runs", "sampled_runs")  # of a file that holds more than a list
Proof = Callable[[], str | None]  # the reason of a case, found by replaying it
SCORES = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "neg_entropy"}
"""Dream's names of rankings -> the score that ranks so."""


def one_step_a_block(case: Case) -> bool:
    """Return whether Fast-dLLM's entropy loop with a cache ends before it has decoded a block."""
    params = case["params"]
    return params["steps"] == params["gen_length"] // params["block_length"]


REASONS: dict[str, Callable[[Case], bool]] = {
    "bug: the released loop ends with masks left": lambda c: (
        c.get("method", "").startswith("fast_dllm_dream_entropy") and one_step_a_block(c)
    ),
    "coupling: a released batch stores the open block for all rows": lambda c: bool(
        c.get("batched") and c["params"]["use_block_cache"]
    ),
    "not implemented: the eager mode, which is not lossless": lambda c: bool(
        c.get("params", {}).get("eager_acceptance_mode")
    ),
}
"""Why a case may differ -> whether it may; besides its margin and what tests prove by a replay."""


@lru_cache
def known() -> dict[str, dict[str, Any]]:
    """File -> how many cases it is known to have, and which of them differ."""
    text = (Path(__file__).parent / "differing.yaml").read_text()
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


@lru_cache
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


def is_listed(case: Case) -> bool:
    """Return whether `differing.yaml` lists the case."""
    return differs(case) or is_tie(case)


def differs(case: Case) -> bool:
    """Return whether it lists the case as one that differs everywhere."""
    return is_known(case["file"]) and case["index"] in known()[case["file"]].get("differ", ())


def is_tie(case: Case) -> bool:
    """Return whether it lists the case as one that rounding decides, otherwise on other
    processors."""
    return is_known(case["file"]) and case["index"] in known()[case["file"]].get("ties", ())


def tier(case: Case) -> list[pytest.MarkDecorator]:
    """Return the marker of a case: some and all that differ run every day, of the others a third is
    in the whole suite and the rest, alike and minutes long, with `-m drill`."""
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
    """Why the case may differ; None if it may not."""
    return margin(case) or next((why for why, holds in REASONS.items() if holds(case)), None)


def margin(case: Case) -> str | None:
    """Return the least recorded margin of a decision if it is within float32 rounding."""
    margins = (case.get("min_margin") or {}) | {"": 1.0}
    kind = min(margins, key=lambda kind: margins[kind])
    gap = case.get("min_gap_prob_to_threshold") or 1.0
    if margins[kind] < CLOSE:
        return f"margin: {kind} is decided by {margins[kind]:.1e}"
    return f"margin: a threshold is missed by {gap:.1e}" if gap <= ROUNDING else None


@contextmanager
def agreement(case: Case, proof: Proof = lambda: None) -> Iterator[None]:
    """Yield whether what is asserted in the block holds, as `differing.yaml` and the reasons
    say."""
    try:
        yield
    except (AssertionError, DllmBenchError) as error:
        allowed = is_listed(case) or not is_known(case["file"])
        if not allowed or not may_raise(case, error):
            raise
        why = reason(case) or proof()
        if why is None:
            raise
        pytest.xfail(why)
    assert not differs(case), "the case agrees; take it out of tests/golden/differing.yaml"


def may_raise(case: Case, error: Exception) -> bool:
    """Return whether the error is a failed comparison, or has the message that `differing.yaml`
    names."""
    raises = known().get(case["file"], {}).get("raises", {})
    texts = [raises.get(case["index"])] if is_known(case["file"]) else raises.values()
    return isinstance(error, AssertionError) or any(text and text in str(error) for text in texts)


# --- replaying -----------------------------------------------------------------------------------


@lru_cache
def denoiser(folder: str) -> Any:
    """Return the model of a checkpoint folder, read once."""
    return load_denoiser(GOLDEN / folder)


def with_end(folder: str, eos: int) -> Any:
    """Return the model of a checkpoint folder with another end token."""
    model = copy(denoiser(folder))
    model.special = replace(model.special, eos=eos)
    return model


def canvases_of(model: Watched) -> list[list[int]]:
    """Return the canvas of every forward, of its first branch."""
    return [canvas_KL[0].tolist() for canvas_KL in model.canvases]


def rebuilt(generation: Generation, case: Case, mask: int) -> list[list[int]]:
    """Return the canvas before every forward, rebuilt from `born`."""
    drawn = list(zip(generation.ids, generation.born, strict=True))
    return [
        case["prompt"] + [token if 0 <= born < step else mask for token, born in drawn]
        for step in range(len(generation.trace))
    ]


def composed(decoder: str, settings: Settings) -> MaskedDecoder:
    """Return the decoder of a yaml with a case's numbers; it may write the mask token, as
    published."""
    return _composed(decoder, json.dumps(settings, sort_keys=True))


@cache
def _composed(decoder: str, settings: str) -> MaskedDecoder:
    given = {"forbid_mask": False} | json.loads(settings)
    made = composed_decoder(decoder, [override(key, value) for key, value in given.items()])
    assert isinstance(made, MaskedDecoder)
    return made


def override(key: str, value: Any) -> str:
    """Return a setting as `db.decoder` takes it, or another inner piece: `score@inner`."""
    slot, is_inner, inner = key.partition("@")
    if is_inner:
        return f"decoder/{slot}@decoder.{slot}.{inner}={value}"
    return slot_override(key, value)


def request(case: Case, length: str = "gen_length") -> Request:
    """Return the case as a request; `length`: the parameter that has its length."""
    given = case.get("params", case)
    return Request("golden", tuple(case["prompt"]), given[length])


def takes_more_than_masked(case: Case, decoder: MaskedDecoder, count: int) -> str | None:
    """Return why the case differs if the released top-k of `count` has fewer masks to choose from.

    It then takes positions at -inf too: which ones is the order of `torch.topk`, and tokens there
    are overwritten. Looked at is the forward after which the canvases differ first.
    """
    model = Watched(denoiser("llada"))
    decoder = replace(decoder, stop=AnyOf((decoder.stop, Budget(case["nfe"]))))
    generation = decoder.generate(model, request(case))
    ours = [*canvases_of(model), [*case["prompt"], *generation.ids]]
    theirs = [*case["states"], [*case["prompt"], *case["output"]]]
    pairs = enumerate(zip(ours, theirs, strict=False))
    forward = next(i for i, (own, other) in pairs if own[: len(other)] != other) - 1
    masks = ours[forward][: model.plans[forward].rows[1]].count(model.special.mask)
    why = f"tie: too few masks ({masks}) for the released top-{count}"
    return why if masks < count else None


def steps_per_block(params: Settings) -> int:
    """Return the steps that a schedule of the whole generation leaves for a block."""
    return int(params["steps"] * params["block_length"] // params["gen_length"])
