"""Fixtures of tests of loading: a tiny checkpoint in each of the two dense layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import tiny_checkpoint
from tests.unit.models.common import LAYOUTS


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(layout: str, tmp_path: Path) -> Path:
    return tiny_checkpoint(layout, tmp_path / "checkpoint", seed=5)
