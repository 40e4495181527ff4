"""Learn2PD's authors' loop, token for token: filter with top-k, their canvas cut, and both.

The filters are read through `models/filters.py`, as a run reads them. Compared are the ids, the
canvas before every forward (its length shrinks where it is cut) and the number of forwards.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.core.contracts import Select
from dllm_bench.core.request import Request
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.select.filter import Filter
from dllm_bench.decoding.select.topk import TopK
from dllm_bench.decoding.select.union import Union
from dllm_bench.decoding.stop.eotp import EndOfTextPrediction
from dllm_bench.decoding.stop.filled import Filled
from dllm_bench.models.filters import FilterMetadata, LearnedFilter, save_filter
from tests.helpers import Watched, golden_dir, load_denoiser
from tests.tiers import covering

FOLDER = golden_dir() / "llada"
FILE = FOLDER / "learn2pd_cases.json"
CASES = json.loads(FILE.read_text()) if FILE.exists() else []


@lru_cache
def denoiser() -> Any:
    return load_denoiser(FOLDER)


@pytest.fixture(scope="module")
def filters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded filters, one folder a block length."""
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("filters")
    recorded = load_file(FOLDER / "learn2pd_filters.safetensors")
    for block in {name.partition(".")[0] for name in recorded}:
        prefix = f"{block}."
        own = {n.removeprefix(prefix): t for n, t in recorded.items() if n.startswith(prefix)}
        save_filter(folder / block, own, FilterMetadata())
    return folder


def decoder(case: dict, filters: Path) -> MaskedDecoder:
    params, method = case["params"], case["method"]
    block = params["block_length"]
    topk = TopK(params["steps"] * block // params["gen_length"])
    select: Select = topk
    if method != "eotp_authors":
        head = LearnedFilter(str(filters / f"block{block}"))
        select = Union(Filter(head, params["threshold"]), topk)
    stop = EndOfTextPrediction() if "eotp" in method else Filled()
    return MaskedDecoder(
        Confidence(), select, Blocks(block), NoCache(), stop=stop, forbid_mask=False
    )


@pytest.mark.skipif(not CASES, reason=f"no golden traces at {FILE}")
@pytest.mark.parametrize(
    "case", covering(3, CASES), ids=lambda case: f"{case['method']}-p{len(case['prompt'])}"
)
def test_the_authors_loop(case: dict, filters: Path) -> None:
    model = Watched(denoiser())
    request = Request("golden", tuple(case["prompt"]), case["params"]["gen_length"])
    generation = decoder(case, filters).generate(model, request)
    assert list(generation.ids) == case["output"]
    assert [canvas[0].tolist() for canvas in model.canvases] == case["states"]
    fed = [forward.fed for forward in generation.trace.forwards]
    assert fed == [len(state) for state in case["states"]]
    assert len(generation.trace) == case["nfe"]
