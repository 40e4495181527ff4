"""Learn2PD's authors' loop, token for token: filter with top-k, their canvas cut, and both.

The filters are read through `models/filters.py`, as a run reads them. Compared are the ids, the
canvas before every forward (its length shrinks where it is cut) and the number of forwards.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.models.filters import FilterMetadata, save_filter
from tests.golden.cases import (
    GOLDEN,
    Case,
    canvases_of,
    composed,
    denoiser,
    replayed,
    request,
    steps_per_block,
)
from tests.helpers import Watched


@pytest.fixture(scope="module")
def filters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recorded filters, one folder a block length."""
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("filters")
    recorded = load_file(GOLDEN / "llada" / "learn2pd_filters.safetensors")
    for block in {name.partition(".")[0] for name in recorded}:
        prefix = f"{block}."
        own = {n.removeprefix(prefix): t for n, t in recorded.items() if n.startswith(prefix)}
        save_filter(folder / block, own, FilterMetadata())
    return folder


def decoder(case: Case, filters: Path) -> MaskedDecoder:
    params, method = case["params"], case["method"]
    block = {"schedule.block": params["block_length"]}
    if method == "eotp_authors":
        steps = {"select": "topk", "select.steps": steps_per_block(params)}
        return composed("learn2pd_eotp", block | steps)
    select = {
        "select.first.head.source": str(filters / f"block{params['block_length']}"),
        "select.first.tau": params["threshold"],
        "select.second.steps": steps_per_block(params),
    }
    return composed("learn2pd_eotp" if "eotp" in method else "learn2pd", block | select)


@replayed("llada/learn2pd_cases.json")
def test_the_authors_loop(case: Case, filters: Path) -> None:
    model = Watched(denoiser("llada"))
    generation = decoder(case, filters).generate(model, request(case))
    assert list(generation.ids) == case["output"]
    assert canvases_of(model) == case["states"]
    fed = [forward.fed for forward in generation.trace.forwards]
    assert fed == [len(state) for state in case["states"]]
    assert len(generation.trace) == case["nfe"]
