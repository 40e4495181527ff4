"""Examples, the Python of pages and notebooks run as they are, and are short.

Notebooks are stored with what they show.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jupyter_client
import nbclient
import nbformat
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


NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
CELLS, LINES = 4, 16
SHOWN = {  # a notebook -> what it shows
    "acceptance": ("acceptance/length", "image/png"),
    "score_drift": ("points on 40 shared samples", "text/html"),
    "trace_viewer": ("tokens in", "denoise", "text/html"),
    "trade_off": ("image/png", "front"),
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a kernel, which imports the package once, and results that the notebooks share."""
    own = tmp_path_factory.mktemp("kernel")
    folders = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "DLLM_BENCH_RESULTS")
    env = {**os.environ, **{name: str(own / name) for name in folders}}
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT / "notebooks"), env=env)
    yield manager
    manager.shutdown_kernel(now=True)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown_by(notebook: Any) -> str:
    """Return the texts of the outputs, and the kinds of data that they have."""
    shown = []
    for output in (output for cell in code_cells(notebook) for output in cell.outputs):
        if output.output_type == "error":
            shown.append(f"ERROR {output.ename}: {output.evalue}")
        data = output.get("data", {})
        texts = (output.get("text", ""), data.get("text/plain", ""), data.get("text/html", ""))
        shown += [*texts, *data]
    return "\n".join(shown)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_short_and_stored_with_what_it_shows(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    assert 1 < len(notebook.cells) <= CELLS and notebook.cells[0].cell_type == "markdown"
    lines = [line for cell in code_cells(notebook) for line in cell.source.splitlines() if line]
    assert len(lines) <= LINES
    assert all(cell.execution_count for cell in code_cells(notebook))
    text = shown_by(notebook)
    assert "ERROR" not in text and ".venv" not in text
    assert all(expected in text for expected in SHOWN[name])


@pytest.mark.parametrize(
    "few",
    [
        pytest.param({"40": "3", "20": "2"}, marks=pytest.mark.exhaustive, id="few items"),
        pytest.param({}, marks=pytest.mark.drill, id="as it is"),  # minutes of decoding
    ],
)
@pytest.mark.xdist_group("notebooks")  # which share results
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, few: Mapping[str, str], kernel: Any) -> None:
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    for cell in code_cells(notebook):
        cell.outputs = []
        for items, fewer in few.items():
            cell.source = cell.source.replace(f"limit={items}", f"limit={fewer}")
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    nbclient.NotebookClient(notebook, km=kernel, allow_errors=True).execute()
    text = shown_by(notebook)
    assert "ERROR" not in text, text
    assert all(expected.replace("40", few.get("40", "40")) in text for expected in SHOWN[name])
