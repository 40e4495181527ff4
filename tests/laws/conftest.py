"""Models of the laws: random denoisers of both layouts, and a target with a folder for drafters."""

from __future__ import annotations

from pathlib import Path

import pytest

from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import load_denoiser, tiny_checkpoint, tiny_denoiser


@pytest.fixture(scope="module", params=("llada", "dream"))
def model(request: pytest.FixtureRequest) -> TransformerDenoiser:
    return tiny_denoiser(request.param, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


@pytest.fixture(scope="module")
def target(folder: Path) -> TransformerDenoiser:
    return load_denoiser(tiny_checkpoint("qwen3", folder / "target", 10))
