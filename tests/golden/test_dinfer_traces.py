"""Threshold and credit decoding reproduce dInfer's decoders on the tiny LLaDA checkpoint.

dInfer ends a generation at a finished block that holds EOS, counts forwards made after a block is
full, and leaves the mask token in the distribution but never commits it. Forwards that had nothing
to decode are not made here; all others must agree, with the same tokens committed in each.
"""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from dllm_bench.core.request import Request
from dllm_bench.decoding.cache.dual import DualCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.cache.prefix import PrefixCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.credit import Credit
from dllm_bench.decoding.select.threshold import Threshold
from dllm_bench.decoding.stop.eos import Eos
from tests.helpers import golden_dir, load_denoiser

FOLDER = golden_dir() / "dinfer"
CACHES = {None: NoCache(), "none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
BAND = 1e-5
GUARD = 1e-5  # runs with a decision closer than this to its threshold hang on rounding


@lru_cache
def denoiser():
    return load_denoiser(golden_dir() / "llada")


def runs(name: str) -> list[dict]:
    """Recorded runs of one file that ended by themselves, prompts filled in."""
    path = FOLDER / name
    if not path.exists():
        return []
    whole = json.loads(path.read_text())
    return [
        run | {"prompt": whole["prompts"][run["prompt_index"]]}
        for run in whole["runs"]
        if run["status"] == "ok" and (run.get("min_gap_prob_to_threshold") or 1) > GUARD
    ]


def decoder(run: dict) -> MaskedDecoder:
    credit = Credit(Confidence(), alpha=0.7, beta=0.8, gamma=0.2)
    return MaskedDecoder(
        score=credit if run["decoder"].startswith("Credit") else Confidence(),
        select=Threshold(run["threshold"], band=BAND),
        schedule=Blocks(run["block_length"]),
        cache=CACHES[run["cache"]],
        stop=Eos("block"),
        forbid_mask=False,
    )


def check(run: dict) -> None:
    request = Request("golden", tuple(run["prompt"]), run["gen_length"])
    generation = decoder(run).generate(denoiser(), request)
    new = run["final_sequence"][len(run["prompt"]) :]
    assert list(generation.ids) == new[: len(generation.ids)]
    assert set(new[len(generation.ids) :]) <= {denoiser().special.mask}
    expected = [
        sorted(position - len(run["prompt"]) for position, _ in step["committed"])
        for step in run["steps"]
        if step["masked_before"]
    ]
    made = [
        [at for at, born in enumerate(generation.born) if born == forward]
        for forward in range(len(generation.trace))
    ]
    assert made == expected


PLAIN = runs("threshold_plain.json") + runs("credit_plain.json")


def name(run: dict) -> str:
    cut = f"{run['gen_length']}-{run['block_length']}-p{len(run['prompt'])}"
    return f"{run['decoder']}-{run['threshold']}-{run['cache']}-{cut}"


@pytest.mark.skipif(not PLAIN, reason=f"no golden traces at {FOLDER}")
@pytest.mark.parametrize("run", PLAIN, ids=name)
def test_plain_runs(run: dict) -> None:
    check(run)
