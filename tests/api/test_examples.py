"""The examples run as they are, each in an empty folder, and are short."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.tiers import covering

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST = 40  # lines


@pytest.mark.parametrize("path", covering(2, EXAMPLES, often=1), ids=lambda path: path.stem)
def test_an_example_runs_in_an_empty_folder(path, tmp_path, monkeypatch, capsys) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLLM_BENCH_RESULTS", "results")
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/decoders.md"])
def test_the_python_of_a_page_works_when_pasted(page, tmp_path, monkeypatch) -> None:
    """All blocks of a page, one after the other, as in a notebook."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLLM_BENCH_RESULTS", str(tmp_path / "results"))
    module = ModuleType(f"pasted_from_{Path(page).stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _, *blocks = (ROOT / page).read_text(encoding="utf-8").split("```python\n")
    assert blocks
    for block in blocks:
        exec(compile(block.partition("```")[0], page, "exec"), vars(module))
