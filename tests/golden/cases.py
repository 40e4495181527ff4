"""The recorded cases, one test each, and decoders composed from `conf/` for them.

`replayed(file, methods)` makes a test of every case of a file; each `EVERY`-th is in the default
tier, the others are exhaustive. `composed(name, settings)` is the decoder of a yaml with a case's
numbers. A case may differ for a reason of `REASONS` only, and which ones do is written down in
`differing.yaml`: inside of `agreement`, a case of a known file that differs without being listed
fails, and so does a listed one that agrees. A case that may differ and does is reported as xfailed
with its reason, so that none is left out unseen; cases of other files of the same form are too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dllm_bench.api.generation import composed_decoder, slot_override
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.decoding.masked import MaskedDecoder
from tests.helpers import golden_dir, load_denoiser

GOLDEN = golden_dir()
EVERY = 5
CLOSE = 1e-5  # decisions closer than this may differ by float32 rounding
ROUNDING = 5e-6  # the same of dInfer's runs: float32 and float64 differ by up to 4.5e-6 there
Case = dict[str, Any]
Settings = Mapping[str, Any]
TIED = {
    "prompt_index": 2,
    "threshold": 0.9,
    "cache": "none",
    "gen_length": 64,
    "block_length": 16,
    "start_block_align": False,
}
ASKED: dict[str, set[str]] = {}
"""File -> methods that some test replays; an empty name stands for all."""


def one_step_a_block(case: Case) -> bool:
    """Whether Fast-dLLM's entropy loop with a cache ends before it has decoded a block."""
    params = case["params"]
    return params["steps"] == params["gen_length"] // params["block_length"]


REASONS: dict[str, Callable[[Case], bool]] = {
    "tie: torch.topk decides between equal scores": lambda c: bool(c.get("tie_dependent")),
    "overwrites: the released fallback writes over a token": lambda c: not c.get("restated", True),
    "margin: a decision within float32 rounding": lambda c: (
        min((c.get("min_margin") or {}).values(), default=1.0) < CLOSE
        or (c.get("min_gap_prob_to_threshold") or 1.0) <= ROUNDING
    ),
    "tie: two probabilities are 8e-7 apart": lambda c: (
        "hierarchy_" in c["file"] and all(c.get(key) == TIED[key] for key in TIED)
    ),
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
"""Why a case may differ -> whether it may."""


@lru_cache
def known() -> dict[str, dict[str, Any]]:
    """File -> how many cases it is known to have, and which of them differ."""
    text = (Path(__file__).parent / "differing.yaml").read_text()
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


@lru_cache
def recorded(file: str) -> tuple[Case, ...]:
    """All cases of a file, with their prompts; none without the reference data."""
    path = GOLDEN / file
    whole = json.loads(path.read_text()) if path.exists() else []
    if isinstance(whole, dict):
        prompts = whole["prompts"]
        whole = [{"prompt": prompts[run["prompt_index"]]} | run for run in whole["runs"]]
    return tuple({"file": file, "index": index} | case for index, case in enumerate(whole))


def cases(file: str, *methods: str) -> list[Case]:
    """The cases of some methods of a file, of all without any."""
    ASKED.setdefault(file, set()).update(methods or {""})
    return [case for case in recorded(file) if not methods or case["method"] in methods]


def name(case: Case) -> str:
    """The case's method, its place in the file and why it may differ."""
    method = case.get("method") or Path(case["file"]).stem
    why = reason(case)
    return f"{method}-{case['index']}" + (f"-{why.partition(':')[0]}" if why else "")


def each(found: list[Case]) -> pytest.MarkDecorator:
    """One test per case; one that is skipped without the reference data."""
    rest = pytest.mark.exhaustive
    params = [
        pytest.param(case, id=name(case), marks=rest if case["index"] % EVERY else ())
        for case in found
    ]
    absent = pytest.mark.skip(reason=f"no golden traces at {GOLDEN}")
    return pytest.mark.parametrize("case", params or [pytest.param(None, marks=absent)])


def replayed(file: str, *methods: str) -> pytest.MarkDecorator:
    """One test per case of a file."""
    return each(cases(file, *methods))


def reason(case: Case) -> str | None:
    """Why the case may differ; None if it may not."""
    return next((why for why, holds in REASONS.items() if holds(case)), None)


@contextmanager
def agreement(case: Case) -> Iterator[None]:
    """Whether what is asserted in the block holds, as `differing.yaml` and `REASONS` say."""
    file = known().get(case["file"], {})
    is_known = file.get("cases") == len(recorded(case["file"]))
    listed = is_known and case["index"] in file.get("differ", ())
    try:
        yield
    except (AssertionError, DllmBenchError):
        why = reason(case)
        if why is None or (is_known and not listed):
            raise
        pytest.xfail(why)
    assert not listed, "the case agrees; take it out of tests/golden/differing.yaml"


# --- replaying -----------------------------------------------------------------------------------


@lru_cache
def denoiser(folder: str) -> Any:
    """The model of a checkpoint folder, read once."""
    return load_denoiser(GOLDEN / folder)


def composed(decoder: str, settings: Settings) -> MaskedDecoder:
    """The decoder of a yaml with a case's numbers; it may write the mask token, as published."""
    return _composed(decoder, json.dumps(settings, sort_keys=True))


@cache
def _composed(decoder: str, settings: str) -> MaskedDecoder:
    given = {"forbid_mask": False} | json.loads(settings)
    made = composed_decoder(decoder, [override(key, value) for key, value in given.items()])
    assert isinstance(made, MaskedDecoder)
    return made


def override(key: str, value: Any) -> str:
    """A setting as `db.decoder` takes it, or another inner piece: `score@inner`."""
    slot, is_inner, inner = key.partition("@")
    if is_inner:
        return f"decoder/{slot}@decoder.{slot}.{inner}={value}"
    return slot_override(key, value)


def request(case: Case, length: str = "gen_length") -> Request:
    """The case as a request; `length`: the parameter that has its length."""
    given = case.get("params", case)
    return Request("golden", tuple(case["prompt"]), given[length])


def steps_per_block(params: Settings) -> int:
    """The steps that a schedule of the whole generation leaves for a block."""
    return int(params["steps"] * params["block_length"] // params["gen_length"])
